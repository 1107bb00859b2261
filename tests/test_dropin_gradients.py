"""Gradients that the drop-in sampler sees in one process: of models of all kinds, of batches and single examples."""

import pytest
import torch
from dropin_cases import (
    EPOCHS,
    EXAMPLES,
    Awkward,
    attached,
    dataset,
    gradient,
    in_order,
    network,
    retrained,
    seen_by,
    sorted_alone,
    train,
)
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, default_collate

from cdgrab import CdgrabError
from cdgrab.dropin.diagnosis import held_bytes
from cdgrab.dropin.sharded import WholeGradient


def test_accumulated_batches_are_one_unit():
    model = network()
    sampler = attached(model, 4, accumulation_steps=2)  # 16 batches, the last one of a single example
    visited = train(model, sampler, accumulate=2)
    orders = sorted_alone(retrained(network(), visited, accumulate=2)[:, None])
    assert in_order(sampler, orders[:, 0]) == visited


def test_single_examples_under_autocast_are_refused():
    model = network().float()
    sampler = attached(model, unit="example")
    (_, inputs, labels), *_ = DataLoader(dataset(), batch_sampler=sampler)
    with pytest.raises(CdgrabError, match="no gradients of single examples under autocast"):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs.float()), labels)
        loss.backward()


def test_gradients_that_are_zeroed_amid_a_unit_spoil_no_other():
    """From the fifth unit on the script zeroes them twice as often as the sampler was told: of that one, only what is
    left then can be seen."""
    model = network()
    sampler = attached(model, 2, accumulation_steps=4, drop_last=True)
    seen, expected = seen_by(sampler.ledger), []
    for step, (_, inputs, labels) in enumerate(DataLoader(dataset(), batch_sampler=sampler)):
        before = gradient(model)
        nn.functional.cross_entropy(model(inputs), labels).backward()
        expected.append(gradient(model) - before)
        if step % 4 == 3 or (step > 16 and step % 2):
            model.zero_grad()
    expected = torch.stack(expected).unflatten(0, (-1, 4))
    expected[4, :2] = 0.0
    torch.testing.assert_close(torch.cat(seen), expected.sum(1), rtol=1e-10, atol=1e-13)


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
