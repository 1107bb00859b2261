"""The drop-in sampler in one process when something goes wrong: batches left out, passes that fail, late changes."""

from contextlib import suppress
from itertools import islice

import pytest
import torch
from dropin_cases import EXAMPLES, attached, dataset, gradient, network, seen_by, train
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from cdgrab import CdgrabError, OrderedBatchSampler


def one_pass(model, batch):
    _, inputs, labels = dataset().tensors
    nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_skipped_batches_count_as_zero_and_do_not_shift_the_others(accumulate):
    model = network()
    sampler = attached(model, 4, accumulation_steps=accumulate)
    seen, expected = seen_by(sampler.ledger), []
    for index, batch in enumerate(sampler):
        model.zero_grad()
        if index in (3, 4, 5):
            sampler.skip()
        else:
            one_pass(model, batch)
        expected.append(gradient(model))
    summed = torch.stack(expected).unflatten(0, (-1, accumulate)).sum(1)
    torch.testing.assert_close(torch.cat(seen), summed, rtol=1e-12, atol=1e-14)


def test_skipped_examples_count_as_zero():
    model = network()
    sampler = attached(model, 7, unit="example")
    seen = seen_by(sampler.ledger)
    for batch in sampler:
        sampler.skip() if len(seen) in (2, 8) else one_pass(model, batch)
    assert [len(rows) for rows in seen] == [7] * 8 + [5]
    assert [bool(rows.any()) for rows in seen] == [index not in (2, 8) for index in range(9)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_without_a_backward_pass_is_told(workers):
    model = network()
    sampler = attached(model)
    with pytest.warns(UserWarning, match="call sampler.skip") as told:
        for index, (numbers, _, _) in enumerate(DataLoader(dataset(), batch_sampler=sampler, num_workers=workers)):
            if index != 2:
                one_pass(model, numbers)
    assert [one.filename for one in told] == [__file__]
    with pytest.raises(CdgrabError, match="more backward passes than the 8 batches"):
        one_pass(model, numbers), one_pass(model, numbers)


def test_a_second_backward_pass_is_refused_at_once():
    model = network()
    sampler = attached(model)
    with pytest.raises(CdgrabError, match=r"more backward passes than the 1 batches.*detach\(\).*use_reentrant=False"):
        for batch in sampler:
            one_pass(model, batch), one_pass(model, batch)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_backward_pass_that_failed_is_forgotten(accumulate):
    """As when memory runs out on the way: the batch is tried again."""

    class Fails(torch.autograd.Function):
        now = False

        @staticmethod
        def forward(context, inputs):
            return inputs.clone()

        @staticmethod
        def backward(context, gradient):
            if Fails.now:
                raise MemoryError
            return gradient

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = network()

        def forward(self, inputs):
            return self.parts[2](Fails.apply(self.parts[:2](inputs)))

    model = Module()
    sampler = attached(model, 4, accumulation_steps=accumulate)
    seen, expected = seen_by(sampler.ledger), []
    for index, batch in enumerate(sampler):
        for Fails.now in [True, False] if index == 3 else [False]:
            model.zero_grad()
            with suppress(MemoryError):
                one_pass(model, batch)
        expected.append(gradient(model))
    summed = torch.stack(expected).unflatten(0, (-1, accumulate)).sum(1)
    torch.testing.assert_close(torch.cat(seen), summed, rtol=1e-12, atol=1e-14)


def test_a_model_converted_after_attach_is_seen_all_the_same():
    model, same = network().float(), network()
    sampler = attached(model)
    model.double().load_state_dict(same.state_dict())
    assert train(model, sampler) == train(same, attached(same))


def test_a_whole_model_in_a_file_is_an_ordinary_one(tmp_path):
    model = network()
    sampler = attached(model)
    train(model, sampler, epochs=1)
    torch.save(model, tmp_path / "model.pt")
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.Tanh]):
        copy = torch.load(tmp_path / "model.pt", weights_only=True)
    inputs, labels = dataset().tensors[1:]
    assert torch.equal(copy(inputs), model(inputs))
    nn.functional.cross_entropy(copy(inputs), labels).backward()  # that of the other one would be one too many
    with pytest.raises(CdgrabError, match="more backward passes"):
        nn.functional.cross_entropy(model(inputs), labels).backward()


def test_no_batch_is_handed_out_before_attach():
    with pytest.raises(CdgrabError, match="call sampler.attach.*to look at a batch before, make a loader without"):
        next(iter(OrderedBatchSampler(dataset(), 8)))


def test_an_epoch_without_any_gradient_is_told():
    sampler, other = attached(network()), network()
    with pytest.warns(UserWarning, match="no gradient of epoch 0 was seen"):
        train(other, sampler, epochs=2)


def test_parameters_that_come_later_are_refused():
    model = network()
    model[0].requires_grad_(False)
    sampler = attached(model)
    train(model, sampler, epochs=1)
    model[0].requires_grad_(True)
    with pytest.raises(CdgrabError, match="0.weight needs a gradient now"):
        next(iter(sampler))


def test_a_refused_attach_can_be_repeated():
    model = network()
    sampler = OrderedBatchSampler(dataset(), 8, seed=3)
    state = attached(network(width=9)).state_dict()
    with pytest.raises(CdgrabError, match="has no option"):
        sampler.attach(model, density=0.1)
    sampler.load_state_dict(state)
    with pytest.raises(CdgrabError, match="dim"):
        sampler.attach(model)
    other = network(width=9)
    assert len(train(other, sampler.attach(other), epochs=1)[0]) == 8
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_gradients_by_autograd_grad():
    model = network()
    sampler = attached(model)
    _, inputs, labels = dataset().tensors
    seen = seen_by(sampler.ledger)
    for batch in sampler:
        loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        with sampler.paused():
            torch.autograd.grad(loss, model.parameters(), retain_graph=True)
        found = torch.autograd.grad(loss, model.parameters())  # a backward pass like others
        torch.testing.assert_close(seen[-1][0], torch.cat([gradient.flatten() for gradient in found]))
    assert len(seen) == 8


def test_gradients_that_do_not_stay_in_grad():
    """Steps inside the backward pass, which leave nothing; and torch.autograd.grad after backward passes."""
    model = network()
    seen, expected = seen_by((sampler := attached(model)).ledger), []

    def step(parameter):
        expected.append(parameter.grad.flatten())
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for batch in sampler:
        one_pass(model, batch)
        torch.testing.assert_close(seen[-1][0].sum(), torch.cat(expected).sum(), rtol=1e-12, atol=1e-12)
        expected.clear()
    model = network()
    with pytest.raises(CdgrabError, match="are not in .grad.*paused"):
        for index, batch in enumerate(attached(model)):
            _, inputs, labels = dataset().tensors
            loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
            torch.autograd.grad(loss, model.parameters()) if index == 2 else loss.backward()
            model.zero_grad()


KINDS = ["plain", "plain", "plain", "zeroed in place", "not zeroed", "called in parts", "after one for an input"]
KINDS += ["after one of frozen weights", "partly frozen"]


@given(st.lists(st.sampled_from(KINDS), min_size=8, max_size=15), st.sampled_from([1, 3]))
@example([*KINDS[:3] * 2, *KINDS[-2:], "plain"], 1)
def test_passes_of_all_kinds_after_each_other(kinds, accumulate):
    """After some plain ones parameters are no longer watched one by one, but for one of them; others change that."""
    model, twin = network(), network()
    sampler = attached(model, 1, accumulation_steps=accumulate, drop_last=True)
    seen, expected, plain = seen_by(sampler.ledger), [], 0
    _, inputs, labels = dataset().tensors
    for number, (kind, batch) in enumerate(zip(kinds, sampler, strict=False)):
        given_, first = inputs[batch].requires_grad_(), number % accumulate == 0
        if kind == "after one of frozen weights":
            model.requires_grad_(False)
            model(given_).sum().backward()
            model.requires_grad_(True)
        if first and kind != "not zeroed":
            model.zero_grad(set_to_none=kind != "zeroed in place")
        output = model[2](model[:2](given_)) if kind == "called in parts" else model(given_)
        loss = nn.functional.cross_entropy(output, labels[batch])
        if kind == "after one for an input":
            torch.autograd.grad(loss, given_, retain_graph=True)
        if kind == "partly frozen":
            model[0].requires_grad_(False)
            loss = nn.functional.cross_entropy(model(given_), labels[batch])
        loss.backward()
        model.requires_grad_(True)
        own = torch.autograd.grad(nn.functional.cross_entropy(twin(given_), labels[batch]), twin.parameters())
        frozen = 2 if kind == "partly frozen" else 0
        expected.append(torch.cat([gradient.flatten() * (i >= frozen) for i, gradient in enumerate(own)]))
        plain = plain + 1 if kind in ("plain", "after one for an input") else 0
        if plain >= 4 * accumulate:
            assert sum(parameter._backward_hooks is not None for parameter in model.parameters()) == 1
    units = [sum(expected[end - accumulate : end]) for end in range(accumulate, len(expected) + 1, accumulate)]
    torch.testing.assert_close(torch.cat(seen), torch.stack(units), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("unit", ["batch", "example"])
@pytest.mark.parametrize("zeroed", [True, False])
def test_weights_frozen_while_inputs_are_attacked_or_something_else_is_trained(unit, zeroed):
    """The gradients of the attack, and of what runs inside `paused`, belong to no batch."""
    model, twin = network(), network()
    seen, expected = seen_by((sampler := attached(model, 1, unit=unit)).ledger), []
    _, inputs, labels = dataset().tensors
    for index, batch in enumerate(islice(sampler, 20)):
        attacked = inputs[batch].requires_grad_()
        model.requires_grad_(False)
        nn.functional.cross_entropy(model(attacked), labels[batch]).backward()
        if index % 2:
            with sampler.paused():
                model(inputs.clone().requires_grad_()).sum().backward()
        model.requires_grad_(True)
        torch.autograd.grad(model(attacked).sum(), attacked)
        if zeroed:
            model.zero_grad()
        given_ = inputs[batch] + attacked.grad
        nn.functional.cross_entropy(model(given_), labels[batch]).backward()
        own = torch.autograd.grad(nn.functional.cross_entropy(twin(given_), labels[batch]), twin.parameters())
        expected.append(torch.cat([gradient.flatten() for gradient in own]))
    torch.testing.assert_close(torch.cat(seen), torch.stack(expected), rtol=1e-12, atol=1e-14)


def test_sparse_embeddings():
    def run(sparse):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(EXAMPLES, 3, sparse=sparse), nn.Linear(3, 2)).double()
        sampler, visited = attached(model), []
        for _ in range(2):
            for batch in sampler:
                visited.append(batch)
                nn.functional.cross_entropy(model(torch.tensor(batch)), dataset().tensors[2][batch]).backward()
                model.zero_grad()
        return visited

    assert run(sparse=True) == run(sparse=False)


def test_reentrant_checkpointing_is_refused_and_the_other_kind_works():
    class Checkpointed(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.parts, self.reentrant = network(), reentrant

        def forward(self, inputs):
            hidden = checkpoint(self.parts[:2], inputs.requires_grad_(), use_reentrant=self.reentrant)
            return checkpoint(self.parts[2], hidden, use_reentrant=self.reentrant)

    model, plain = Checkpointed(False), network()
    assert train(model, attached(model)) == train(plain, attached(plain))
    model = Checkpointed(True)
    with pytest.raises(CdgrabError, match="use_reentrant=False"):
        train(model, attached(model))
