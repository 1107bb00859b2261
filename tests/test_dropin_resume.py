"""The drop-in sampler in one process: states, by itself and through torchdata's StatefulDataLoader."""

import io
from collections import deque
from itertools import chain, islice

import pytest
import torch
from dropin_cases import EPOCHS, EXAMPLES, attached, dataset, network, train
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from cdgrab import CdgrabError, OrderedBatchSampler


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("sorter", ["cd_grab", "grab", "d_rr"])
@pytest.mark.parametrize("stop_after", [1, 4, 8, 13])
def test_resumes_mid_epoch(sorter, stop_after):
    whole, model = network(), network()
    expected = train(whole, attached(whole, sorter=sorter))
    sampler = attached(model, sorter=sorter)
    optimiser_free = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)  # kept across the interruption
    visited = continued(model, sampler, optimiser_free, stop_after)
    state = through_a_file(sampler.state_dict())
    sampler.detach()
    again = OrderedBatchSampler(dataset(), 8, seed=3, sorter=sorter)
    again.load_state_dict(state)  # before attach
    again.attach(model)
    visited += continued(model, again, optimiser_free, 8 * EPOCHS - stop_after)
    assert visited == sum(expected, [])
    assert torch.equal(
        torch.cat([p.flatten() for p in model.parameters()]), torch.cat([p.flatten() for p in whole.parameters()])
    )


def continued(model, sampler, optimiser, steps, loader=None):
    """Some steps more, over the ends of epochs."""
    visited = []
    while len(visited) < steps:
        for numbers, inputs, labels in loader or DataLoader(dataset(), batch_sampler=sampler):
            visited.append(numbers.tolist())
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimiser.step()
            optimiser.zero_grad()
            if len(visited) == steps:
                break
    return visited


@pytest.mark.parametrize("stop_after", [8, 11])
@pytest.mark.parametrize("workers", [0, 2])
def test_resumes_through_a_stateful_loader(workers, stop_after):
    model = network()
    expected = sum(train(model, attached(model)), [])
    model = network()
    sampler = attached(model)
    loader = StatefulDataLoader(dataset(), batch_sampler=sampler, num_workers=workers)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    visited = continued(model, sampler, optimiser, stop_after, loader)
    states = through_a_file([loader.state_dict(), sampler.state_dict()])
    sampler.detach()
    again = attached(model)
    loader = StatefulDataLoader(dataset(), batch_sampler=again, num_workers=workers)
    loader.load_state_dict(states[0])
    if workers:
        with pytest.raises(CdgrabError, match="save sampler.state_dict"):
            next(iter(loader))
        loader = StatefulDataLoader(dataset(), batch_sampler=again, num_workers=workers)
        again.load_state_dict(states[1])
        loader.load_state_dict(states[0])
    visited += continued(model, again, optimiser, 8 * EPOCHS - stop_after, loader)
    assert visited == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_gives_its_whole_state_whatever_a_stateful_loader_asks_for(workers):
    """Before and after the backward pass of a batch, and while a loader process reads ahead amid an accumulation."""
    model = network()
    sampler = attached(model, accumulation_steps=2)
    loader = StatefulDataLoader(dataset(), batch_sampler=sampler, num_workers=workers)
    for step, (_, inputs, labels) in enumerate(loader):
        if step % 2 == 0:
            before = sampler.state_dict(), loader.state_dict(), sampler.state_dict()
            assert [state["sorter"]["position"] for state in before[::2]] == [step // 2] * 2
        nn.functional.cross_entropy(model(inputs), labels).backward()
    after = loader.state_dict(), sampler.state_dict()
    assert after[1]["sorter"]["position"] == 4
    again = attached(model, accumulation_steps=2)
    again.load_state_dict(before[2])
    loader = StatefulDataLoader(dataset(), batch_sampler=again, num_workers=workers)
    loader.load_state_dict(before[1])
    with pytest.raises(CdgrabError, match="in epoch 0 after batch 7, the sampler in epoch 0 after batch 6"):
        next(iter(loader))


def test_a_stateful_loader_may_be_resumed_before_attach():
    model = network()
    sampler = attached(model)
    loader = StatefulDataLoader(dataset(), batch_sampler=sampler)
    visited = train(model, sampler, 1, loader, stop_after=3)[0]
    state = loader.state_dict()
    again = OrderedBatchSampler(dataset(), 8, seed=3)
    loader = StatefulDataLoader(dataset(), batch_sampler=again)
    loader.load_state_dict(state)
    rest = iter(loader)
    again.attach(model)
    visited += [numbers.tolist() for numbers, _, _ in rest]
    assert visited == [batch for unit in sampler.sorter.order(0)[0].tolist() for batch in sampler._own[unit]]


@pytest.mark.parametrize("earlier", [2, 8])
def test_states_of_loader_and_sampler_must_be_of_one_moment(earlier):
    """Two batches, or one epoch, apart."""
    model = network()
    sampler = attached(model)
    loader = StatefulDataLoader(dataset(), batch_sampler=sampler, num_workers=1)
    states = []
    train(model, sampler, loader=loader, stop_after=11, note=lambda _: states.append(sampler.state_dict()))
    again = attached(network())
    again.load_state_dict(states[10 - earlier])
    state, loader = loader.state_dict(), StatefulDataLoader(dataset(), batch_sampler=again, num_workers=1)
    loader.load_state_dict(state)
    with pytest.raises(CdgrabError, match="save both together"):
        next(iter(loader))


def test_a_state_amid_an_accumulation_is_refused():
    model = network()
    sampler = attached(model, accumulation_steps=2, drop_last=True)
    _, inputs, labels = next(iter(DataLoader(dataset(), batch_sampler=sampler)))
    nn.functional.cross_entropy(model(inputs), labels).backward()
    with pytest.raises(CdgrabError, match="take the state after a step of the optimiser"):
        sampler.state_dict()


DAMAGED = [[], {}, {"held": -1}, {"certain": 1}, {"late": 3}, {"late": ["1"]}, {"examples": torch.zeros(1, 1, 8)}]
DAMAGED += [{"examples": torch.full((1, 1, 8), EXAMPLES)}, {"examples": torch.zeros(2, 1, 8, dtype=torch.long)}]


def test_damaged_notes_of_batches_fetched_ahead_are_refused():
    model = network()
    sampler = attached(model)
    batches = chain(sampler, sampler)
    inputs, labels = dataset().tensors[1:]
    now = deque(islice(batches, 3))
    for batch in islice(batches, 6):  # 3 ahead, one of them of the next epoch
        now.append(batch)
        nn.functional.cross_entropy(model(inputs[now[0]]), labels[now.popleft()]).backward()
    state = sampler.state_dict()
    assert (state["fetched"]["held"], state["fetched"]["late"]) == (3, [6, 7])
    for damage in DAMAGED:
        damaged = state["fetched"] | damage if damage else damage
        with pytest.raises(CdgrabError, match="damaged"):
            sampler.load_state_dict(state | {"fetched": damaged})
    sampler.load_state_dict(through_a_file(state))
    assert list(islice(sampler, 2)) == list(islice(now, 2))


def test_a_new_partition_on_request():
    state = attached(network()).state_dict()
    model = network()
    sampler = attached(model, 4)
    sampler.load_state_dict(state, repartition=True)
    assert sum(map(len, train(model, sampler, epochs=1)[0])) == EXAMPLES
