"""The drop-in sampler in one process: orders, loaders, what a model may be, bad input."""

import warnings

import pytest
import torch
from dropin_cases import (
    EPOCHS,
    EXAMPLES,
    Awkward,
    attached,
    dataset,
    gradient,
    network,
    retrained,
    seen_by,
    sorted_alone,
    train,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

from cdgrab import CdgrabError, OrderedBatchSampler
from cdgrab.dropin import units
from cdgrab.dropin.diagnosis import held_bytes
from cdgrab.dropin.sharded import WholeGradient


def in_order(sampler, orders):
    """Batches that the units in these orders are, by epoch."""
    return [[batch for unit in order.tolist() for batch in sampler._own[unit]] for order in orders]


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


def test_accumulated_batches_are_one_unit():
    model = network()
    sampler = attached(model, 4, accumulation_steps=2)  # 16 batches, the last one of a single example
    visited = train(model, sampler, accumulate=2)
    orders = sorted_alone(retrained(network(), visited, accumulate=2)[:, None])
    assert in_order(sampler, orders[:, 0]) == visited


def test_a_scalers_scale_does_not_matter_however_it_changes():
    plain, scaled = network(), network()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    sampler = attached(scaled, attach={"scaler": scaler})
    assert train(scaled, sampler, scaler=scaler) == train(plain, attached(plain))
    assert scaler.get_scale() == 64.0 * 2 ** (8 * EPOCHS // 3)


def test_an_overflow_counts_as_zero():
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    sampler = attached(model, attach={"scaler": scaler})
    seen = seen_by(sampler.sorter)
    with pytest.warns(UserWarning, match="not finite"):
        train(model, sampler, epochs=2, scaler=scaler, factor=lambda step: float("inf") if step == 3 else 1.0)
    assert [bool(rows.any()) for rows in seen] == [step != 3 for step in range(16)]


@pytest.mark.parametrize("kind", ["awkward", "compiled", "norms"])
def test_models_of_all_kinds(kind):
    def make():
        return Awkward() if kind == "awkward" else network(*([nn.BatchNorm1d(8)] if kind == "norms" else []))

    model = torch.compile(make(), backend="aot_eager") if kind == "compiled" else make()
    sampler = attached(model)
    visited = train(model, sampler)
    assert in_order(sampler, sorted_alone(retrained(make(), visited)[:, None])[:, 0]) == visited


def test_a_fully_sharded_model_on_one_process(monkeypatch):
    """On a GPU, where there is one: FSDP reduces in a stream of its own there. A module's gradients are copied at
    once."""
    device, copies, copy = "cuda" if torch.cuda.is_available() else "cpu", [], WholeGradient.take_share
    monkeypatch.setattr(WholeGradient, "take_share", lambda *all, **how: (copies.append(all), copy(*all, **how)))

    def trained(model):
        sampler = attached(model)
        loader = DataLoader(dataset(), batch_sampler=sampler, collate_fn=lambda some: on(device, default_collate(some)))
        return train(model, sampler, loader=loader)

    plain = network().to(device)
    expected = trained(plain)
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(network().to(device))
        assert trained(model) == expected
        for whole, sharded in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(sharded.to_local(), whole)
        assert len(copies) == sum(map(len, expected))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("sketch", ["none", "countsketch"])
def test_what_is_decided_beside_the_training_changes_nothing_and_takes_little_memory(sketch):
    """In a stream on a GPU, where there is one, otherwise in a thread: rows that fill a block by themselves."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = []
    for background in (True, False):
        model = network(width=20_000).to(device)
        sampler = attached(model, background=background, sketch=sketch)
        loader = DataLoader(dataset(), batch_sampler=sampler, collate_fn=lambda some: on(device, default_collate(some)))
        found.append((train(model, sampler, 2, loader), [parameter.detach() for parameter in model.parameters()]))
    (visited, weights), (same, others) = found
    assert visited == same and all(map(torch.equal, weights, others))
    options = {} if sketch == "none" else {"sketch": sketch}
    gradients = retrained(network(width=20_000), visited)
    assert in_order(sampler, sorted_alone(gradients[:, None], **options)[:, 0]) == visited
    held = held_bytes([sampler._model, sampler.ledger]) / gradients.shape[2]
    places = 4.5 if device == "cuda" else 2.5  # of the coordinates in a sketch
    assert held < (16.5 if sketch == "none" else places)  # the sum and a pair's difference, here both of 8 bytes


def on(device, tensors):
    return [tensor.to(device) for tensor in tensors]


def test_autograd_copies_no_gradient_not_even_in_the_first_pass():
    model, made, moved = network(), {}, []
    sampler = attached(model, sketch="countsketch")
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: made.update({name: gradient.data_ptr()}))

    def note(_):
        moved.append([parameter.grad.data_ptr() == made[name] for name, parameter in model.named_parameters()])

    train(model, sampler, epochs=1, note=note)
    assert len(moved) == len(sampler) and all(map(all, moved))


@pytest.mark.parametrize("where", ["hooks", "last hook", "nodes"])
def test_steps_amid_a_backward_pass_may_overwrite_gradients(where):
    """The sampler has them as they were. At autograd's own nodes nobody sees such steps before the first one."""
    model, expected, nodes = network(), [], []
    sampler = attached(model)
    seen = seen_by(sampler.ledger)

    def step(*parameters):
        for parameter in parameters:
            expected.append(parameter.grad.flatten().clone())
            parameter.grad.zero_()
            parameter.grad = None

    first, *others = model.parameters()
    for parameter in [first] if where == "last hook" else [first, *others]:
        if where == "nodes":
            nodes.append(parameter.view_as(parameter).grad_fn.next_functions[0][0])
            nodes[-1].register_hook(lambda *_, parameter=parameter: step(parameter))
        else:
            every = [first, *others] if where == "last hook" else [parameter]
            parameter.register_post_accumulate_grad_hook(lambda _, every=every: step(*every))
    train(model, sampler, epochs=1)
    seen, expected = torch.cat(seen).flatten(), torch.cat(expected)
    first = len(seen) // len(sampler) if where == "nodes" else 0
    assert sorted(seen[first:].tolist()) == sorted(expected[first:].tolist())


def test_clipping_comes_after_the_sampler_has_looked():
    model = network()
    sampler = attached(model)
    seen = seen_by(sampler.ledger)
    train(model, sampler, epochs=1, note=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e-3))
    assert min(float(g.norm()) for g in seen) > 1e-2


def test_backward_passes_that_belong_to_no_batch():
    model = network()
    sampler = attached(model)
    inputs, labels = dataset().tensors[1:]
    nn.functional.cross_entropy(model(inputs), labels).backward()  # before the first epoch: ignored
    model.zero_grad()
    train(model, sampler, epochs=1)
    with sampler.paused():
        nn.functional.cross_entropy(model(inputs), labels).backward()
    with pytest.raises(CdgrabError, match="more backward passes than the 8 batches so far"):
        nn.functional.cross_entropy(model(inputs), labels).backward()


@pytest.mark.parametrize("model", [network(), network(nn.LayerNorm(8)), Awkward()], ids=["plain", "norm", "awkward"])
def test_gradients_of_single_examples(model):
    sampler = attached(model, 7, unit="example")
    seen = []
    sampler.ledger.observe = lambda gradients: (
        seen.append(gradients),
        setattr(sampler.sorter, "position", 7 * len(seen)),
    )
    _, inputs, labels = dataset().tensors
    for batch in list(sampler)[:2]:
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        for number, found in zip(batch, seen[-1], strict=True):
            model.zero_grad()
            if isinstance(model, Awkward):
                model.calls -= 1  # as in the batch
            with sampler.paused():
                nn.functional.cross_entropy(model(inputs[[number]]), labels[[number]]).backward()
            torch.testing.assert_close(found, gradient(model), rtol=1e-10, atol=1e-12)


def test_single_examples_are_ordered():
    model = network()
    sampler = attached(model, 7, unit="example")
    average = AveragedModel(model)  # a copy, which is not observed
    visited = train(model, sampler, epochs=2, note=lambda model: average(torch.ones(3, 6).double()))
    assert [sorted(sum(epoch, [])) for epoch in visited] == [list(range(EXAMPLES))] * 2
    assert visited[0] != visited[1] and len(visited[0]) == len(sampler) == 9


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
