"""The drop-in sampler in one process: orders, loaders, epochs cut short, bad input."""

import warnings
from itertools import cycle

import pytest
import torch
from dropin_cases import EXAMPLES, attached, dataset, in_order, network, retrained, sorted_alone, train
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from cdgrab import CdgrabError, OrderedBatchSampler
from cdgrab.dropin import units


@given(st.integers(1, 200), st.integers(1, 5), st.integers(0, 9), st.integers(1, 9), st.booleans())
def test_processes_share_the_examples(examples, processes, seed, multiple, drop_last):
    if drop_last and examples < processes * multiple:
        with pytest.raises(CdgrabError):
            units.share(examples, 0, processes, seed, multiple)
        return
    shares = [
        units.share(examples, rank, processes, seed, multiple if drop_last else None) for rank in range(processes)
    ]
    assert len({len(share) for share in shares}) == 1
    visited = torch.cat(shares)
    if drop_last:
        assert len(visited.unique()) == len(visited) > examples - processes * multiple
        assert len(shares[0]) % multiple == 0
    else:
        assert set(visited.tolist()) == set(range(examples)) and len(visited) < examples + processes


@pytest.mark.parametrize("sorter", ["cd_grab", "grab", "kh"])
def test_orders_are_those_of_the_sorter_fed_with_the_same_gradients(sorter):
    model = network()
    sampler = attached(model, sorter=sorter)
    visited = train(model, sampler)
    gradients = retrained(network(), visited)
    orders = sorted_alone(gradients[:, None], sorter=sorter)
    assert in_order(sampler, orders[:, 0]) == visited
    assert not torch.equal(orders[0], orders[1])


@pytest.mark.parametrize("drop_last, sizes", [(False, [5, *[8] * 7]), (True, [8] * 7)])
def test_every_epoch_visits_each_example_once_in_batches_that_stay_together(drop_last, sizes):
    model = network()
    visited = train(model, attached(model, drop_last=drop_last))
    for epoch in visited:
        numbers = sum(epoch, [])
        assert sorted(map(len, epoch)) == sizes and len(set(numbers)) == len(numbers) == sum(sizes)
        assert set(numbers) <= set(range(EXAMPLES))
        assert sorted(epoch) == sorted(visited[0])
    assert visited[0] != visited[1] != visited[2]


def test_a_loader_that_is_repeated_by_cycle_is_refused():
    model = network()
    sampler = attached(model)
    with pytest.raises(CdgrabError, match=r"itertools\.cycle repeats .*: yield from loader"):
        train(model, sampler, 1, cycle(DataLoader(dataset(), batch_sampler=sampler)))


def test_a_sampler_that_is_detached_while_it_is_paused_stays_so():
    model = network()
    sampler = attached(model)
    with sampler.paused():
        sampler.detach()
    assert len(train(model, sampler, 1)[0]) == len(sampler) and sampler.sorter.position == 0


def test_a_sampler_says_what_it_is():
    sampler = OrderedBatchSampler(dataset(), 8, sorter="grab")
    sentence = (
        "OrderedBatchSampler(batch_size=8, sorter='grab', seed=0, unit='batch', batches=8, processes=1, attached=False)"
    )
    assert repr(sampler) == sentence
    assert repr(sampler.attach(network())) == sentence.replace("False", "True")


@pytest.mark.parametrize("make_loader", [DataLoader, StatefulDataLoader])
def test_a_loader_that_would_make_batches_of_batches_is_refused(make_loader):
    sampler = OrderedBatchSampler(dataset(), 8, sorter="d_rr")
    for settings in ({}, {"batch_size": 8, "drop_last": True}):
        with pytest.raises(CdgrabError, match="batch_sampler=sampler instead of"):
            next(iter(make_loader(dataset(), sampler=sampler, **settings)))
    whole = next(iter(make_loader(dataset(), sampler=sampler, batch_size=None)))  # a dataset that takes a list
    assert len(whole[0]) == 8


def test_a_dataset_may_give_whole_batches_only():
    class Whole:
        def __len__(self):
            return 6

        def __getitems__(self, numbers):
            return [10 * number for number in numbers]

    sampler = OrderedBatchSampler(Whole(), 2, sorter="d_rr")
    batches = [batch.tolist() for batch in DataLoader(Whole(), batch_sampler=sampler)]
    assert sorted(sum(batches, [])) == [0, 10, 20, 30, 40, 50]


def test_loader_processes_read_no_order_ahead_of_the_epochs_end():
    visited = []
    for settings in ({}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 9}):
        model = network()
        sampler = attached(model)
        visited.append(train(model, sampler, loader=DataLoader(dataset(), batch_sampler=sampler, **settings)))
    assert visited[0] == visited[1] == visited[2]


def test_looking_at_a_batch_starts_no_epoch():
    model, twin = network(), network()
    sampler, other = attached(model), attached(twin)
    looked_at = next(iter(DataLoader(dataset(), batch_sampler=other)))[0].tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        visited = train(model, sampler)
        assert train(twin, other) == visited
    assert looked_at == visited[0][0]


def test_an_epoch_cut_short_keeps_the_order_of_what_was_not_seen():
    model = network()
    sampler = attached(model)
    train(model, sampler, stop_after=5)  # two pairs and a half, of 8
    first = sampler.sorter.order(0)[0].tolist()
    with pytest.warns(UserWarning, match="epoch 0 ended with 3 of 8 batches without a gradient"):
        train(model, sampler, epochs=1)
    second = sampler.sorter.order(1)[0].tolist()
    assert second[2:6] == first[4:]
    assert sorted(second[:2] + second[6:]) == sorted(first[:4])


def test_looking_at_a_batch_does_not_end_an_epoch_that_goes_on():
    whole = train(network_ := network(), attached(network_))
    model = network()
    sampler = attached(model)
    first = train(model, sampler, 1, stop_after=3)
    state = sampler.state_dict()
    sampler.detach()
    again = attached(model)
    again.load_state_dict(state)
    loader = DataLoader(dataset(), batch_sampler=again)
    next(iter(loader)), [None for _ in loader]  # to show one, to evaluate
    assert first[0] + train(model, again, 1)[0] == whole[0]


class Stream(IterableDataset):
    """One that knows how long it is."""

    def __iter__(self):
        return iter(range(8))

    def __len__(self):
        return 8


BAD = {
    "an iterable one has no order": lambda: OrderedBatchSampler(Stream(), 4),
    "the dataset must have a length": lambda: OrderedBatchSampler([], 4),
    "and examples by number": lambda: OrderedBatchSampler(DataLoader([1, 2]), 4),
    "use_distributed_sampler=False": lambda: OrderedBatchSampler(SequentialSampler(dataset()), 4, drop_last=True),
    "batch_size must be a whole number": lambda: OrderedBatchSampler(dataset(), 0),
    "unknown sorter": lambda: OrderedBatchSampler(dataset(), 4, sorter="best"),
    "has no option": lambda: OrderedBatchSampler(dataset(), 4, speed=3),
    "unit must be batch or example": lambda: OrderedBatchSampler(dataset(), 4, unit="epoch"),
    "cannot be grouped by accumulation_steps=5": lambda: OrderedBatchSampler(dataset(), 4, accumulation_steps=5),
    "drop_last leaves nothing": lambda: OrderedBatchSampler(dataset(), 64, drop_last=True),
    "call sampler.attach": lambda: next(iter(OrderedBatchSampler(dataset(), 4))),
    "attach needs a torch.nn.Module": lambda: OrderedBatchSampler(dataset(), 4).attach(list),
    "no parameters that need a gradient": lambda: OrderedBatchSampler(dataset(), 4).attach(nn.ReLU()),
    "takes no hooks": lambda: attached(torch.jit.script(nn.Linear(6, 2))),
    "complex parameters": lambda: attached(nn.Linear(6, 2, dtype=torch.complex64)),
    "attached to a model already": lambda: attached(m := network()).attach(m),
    "need a model wrapped in DistributedDataParallel": lambda: attached(network(), attach={"compress": "bf16"}),
    "compress must be": lambda: attached(network(), attach={"compress": "int8"}),
    r"GradScaler, got object: .*loss_scaler\._scaler": lambda: attached(network(), attach={"scaler": object()}),
    "attach has no option": lambda: attached(network(), attach={"density": 0.1}),
    "no state before": lambda: OrderedBatchSampler(dataset(), 4).state_dict(),
    "not the state of": lambda: attached(network()).load_state_dict({}),
    "batch_size 8 there, 4 here": lambda: attached(network(), 4).load_state_dict(attached(network()).state_dict()),
    "cannot look into a compiled model": lambda: attached(torch.compile(network()), unit="example"),
    r"mixes the examples of a batch \(BatchNorm\)": lambda: attached(network(nn.BatchNorm1d(8)), unit="example"),
}  # fmt: skip


@pytest.mark.parametrize("sentence", BAD)
def test_bad_input_is_one_sentence(sentence):
    with pytest.raises(CdgrabError, match=sentence) as error:
        BAD[sentence]()
    assert "\n" not in str(error.value)
