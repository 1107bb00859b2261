"""Unit gradients, the traced step and the optimisers, each against a slow, obvious computation in float64."""

import pytest
import torch
from omegaconf import OmegaConf
from torch.fx.experimental.proxy_tensor import make_fx

from experiments.tasks import make_task
from experiments.training.compiled import Compiled, simplify
from experiments.training.config import compose
from experiments.training.gradients import FlatParameters, gradient_function
from experiments.training.optimisers import Optimiser

WORKERS, UNITS = 3, 5


@pytest.fixture(scope="module")
def problem():
    """Task, parameters away from the start, and a batch [workers, units, ...]."""
    run = compose(["data=embedded"])
    task = make_task(run.config, run.source, torch.device("cpu"))
    flat = FlatParameters(task.model)
    parameters = torch.randn(flat.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch = task.fetch("train", torch.arange(WORKERS * UNITS).view(WORKERS, UNITS))
    return task, flat, parameters, batch


def one_by_one(task, flat, parameters, batch):
    """The gradient of every unit by an ordinary backward pass on an ordinary module."""
    for p, value in zip(task.model.parameters(), flat.unflatten(parameters).values(), strict=True):
        p.data.copy_(value)
    gradients = torch.empty(WORKERS, UNITS, flat.dim, dtype=torch.float64)
    losses = torch.empty(WORKERS, UNITS, dtype=torch.float64)
    for w in range(WORKERS):
        for u in range(UNITS):
            features, label = (b[w, u] for b in batch)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(task.model(features)[0], label)
            task.model.zero_grad()
            loss.backward()
            gradients[w, u] = torch.cat([p.grad.flatten() for p in task.model.parameters()])
            losses[w, u] = loss
    return gradients, losses.detach()


@pytest.mark.parametrize("how, traced", [("vmap", False), ("vmap", True), ("backward", False)])
@pytest.mark.parametrize("per_unit", [False, True])
def test_gradients_equal_a_one_by_one_loop(problem, how, traced, per_unit):
    task, flat, parameters, batch = problem
    expected, losses = one_by_one(task, flat, parameters, batch)
    compute = Compiled(gradient_function(task, flat, per_unit, how), traced).for_inputs(parameters, *batch)
    with torch.no_grad():
        for _ in range(3):  # the TorchScript interpreter re-optimises on its second and third call
            gradients, means, worker_losses, *_ = compute(parameters, *batch)
    torch.testing.assert_close(means, expected.mean(1), rtol=0, atol=1e-12)
    torch.testing.assert_close(worker_losses, losses.mean(1), rtol=0, atol=1e-12)
    if per_unit:
        torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-12)
    else:
        assert gradients.numel() == 0  # nobody looks at them, nobody pays for them


def test_flat_parameters_round_trip(problem):
    _, flat, parameters, _ = problem
    assert torch.equal(flat.flatten(flat.unflatten(parameters)), parameters)


def test_tracing_specialises_to_shapes_and_strides():
    double = Compiled(lambda x: (x.reshape(-1) * 2,))
    contiguous, transposed = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(3, 2).T
    for x in (contiguous, transposed, torch.arange(4.0).view(2, 2)):
        assert torch.equal(double(x)[0], x.reshape(-1) * 2)


def test_simplifying_keeps_a_mean_over_everything():
    graph = make_fx(lambda x: torch.ops.aten.mean.dim(x, []))(torch.arange(6.0).view(2, 3))
    simplify(graph)
    assert float(graph(torch.arange(6.0).view(2, 3))) == 2.5


def test_simplified_graphs_are_smaller_and_give_the_same_bits(problem):
    """Against the plain trace: outer products, means of one, transposes undone, reshapes that change nothing."""
    task, flat, parameters, batch = problem
    compute = gradient_function(task, flat, per_unit=True)
    with torch.no_grad():
        plain, simple = make_fx(compute)(parameters, *batch), make_fx(compute)(parameters, *batch)
        simplify(simple)
        for before, after in zip(plain(parameters, *batch), simple(parameters, *batch), strict=True):
            assert torch.equal(before, after)
    assert len(simple.graph.nodes) <= len(plain.graph.nodes) - 10
    assert not any("bmm" in str(node.target) for node in simple.graph.nodes)


def optimiser_config(**changes):
    base = {"optimiser": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "schedule": {"kind": "constant"}}
    return OmegaConf.create(base | changes)


@pytest.mark.parametrize(
    ("config", "make_torch"),
    [
        (optimiser_config(), lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9, weight_decay=0.01)),
        (optimiser_config(momentum=0.0, weight_decay=0.0), lambda p: torch.optim.SGD([p], lr=0.1)),
        (optimiser_config(optimiser="adamw"), lambda p: torch.optim.AdamW([p], lr=0.1, weight_decay=0.01)),
    ],
)
@pytest.mark.parametrize("traced", [False, True])
def test_optimiser_equals_torch_over_a_hundred_steps(config, make_torch, traced):
    start = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours, theirs = start.clone(), start.clone().requires_grad_()
    optimiser, reference = Optimiser([config], 10, 10, ours, traced), make_torch(theirs)
    for _ in range(100):
        theirs.grad = theirs.detach() ** 3 - 1.0
        with torch.no_grad():
            ours, *optimiser.state = optimiser.update(ours, ours**3 - 1.0, *optimiser.state)
        reference.step()
    tolerance = 2e-6 if config.optimiser == "adamw" else 1e-12  # torchopt corrects Adam's bias in float32
    torch.testing.assert_close(ours, theirs.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("schedule", "rate"),
    [
        ({"kind": "step", "every": 2, "factor": 0.1}, lambda step: 0.1 * 0.1 ** (step // 6)),
        ({"kind": "linear"}, lambda step: 0.1 * (1 - step / 15)),
    ],
)
@pytest.mark.parametrize("traced", [False, True])
def test_schedules_change_the_rate_at_the_right_step(schedule, rate, traced):
    parameters = torch.zeros(1, dtype=torch.float64)
    config = optimiser_config(momentum=0.0, weight_decay=0.0, schedule=schedule)
    optimiser = Optimiser([config], steps_per_epoch=3, epochs=5, parameters=parameters, compiled=traced)
    for step in range(15):
        with torch.no_grad():
            gradient = torch.ones(1, dtype=torch.float64)
            moved, *optimiser.state = optimiser.update(parameters, gradient, *optimiser.state)
        assert float(parameters - moved) == pytest.approx(rate(step), rel=1e-6), step
        parameters = moved
