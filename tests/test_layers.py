"""Gradients of every worker from one pass over all units, against a pass for each; and the kernels that normalise."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cdgrab.errors import CdgrabError
from experiments.tasks import make_task
from experiments.tasks.base import Task
from experiments.tasks.layers import ByWorker, _GroupNorm, knows
from experiments.training.config import compose
from experiments.training.gradients import FlatParameters, gradient_function, summed, together

WORKERS, UNITS = 3, 2


def resnet(device: str, dtype: str) -> Task:
    sizes = ["workers=2", "task.batch=4", "task.limit=8", "task.test_limit=2", "task.gradients=layers"]
    settings = ["task=cifar10", "data=embedded", "task.model=resnet18", f"device={device}", f"task.dtype={dtype}"]
    run = compose(settings + sizes)
    return make_task(run.config, run.source, torch.device(device))


def small_model() -> nn.Module:
    """Every kind of layer, with and without what is optional."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GroupNorm(4, 8), nn.ReLU()),
        *(nn.Conv2d(8, 8, (1, 3), groups=2, dilation=(1, 2), bias=False), nn.GroupNorm(2, 8, affine=False), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(8 * 5, 6, bias=False), nn.ReLU(), nn.Linear(6, 4)),
    )


@pytest.mark.parametrize("last", [False, True], ids=["channel by channel", "channels last"])
def test_each_worker_gets_the_gradient_of_its_own_pass(last):
    torch.manual_seed(0)
    model = small_model().double()
    images, labels = torch.randn(WORKERS * UNITS, 3, 10, 10).double(), torch.randint(4, (WORKERS * UNITS,))
    images = images.contiguous(memory_format=torch.channels_last) if last else images
    rows = {name: p.detach().expand(WORKERS, *p.shape).requires_grad_() for name, p in model.named_parameters()}
    with ByWorker():
        logits = torch.func.functional_call(model, rows, (images,))
    found = torch.autograd.grad(WORKERS * F.cross_entropy(logits, labels), list(rows.values()))
    for worker in range(WORKERS):
        own = slice(worker * UNITS, (worker + 1) * UNITS)
        expected = torch.autograd.grad(F.cross_entropy(model(images[own]), labels[own]), list(model.parameters()))
        for name, one, other in zip(rows, expected, found, strict=True):
            torch.testing.assert_close(other[worker], one, msg=f"{name} of worker {worker}")


@pytest.mark.parametrize("per_unit", [False, True])
def test_layers_of_a_resnet_give_the_gradients_of_vmap(narrow_resnet, per_unit):
    task = resnet("cpu", "float64")
    flat = FlatParameters(task.model)
    parameters = flat.flatten(dict(task.model.named_parameters())).detach()
    batch = task.fetch("train", torch.arange(4).view(2, 2))
    ways = [gradient_function(task, flat, per_unit, how)(parameters, *batch) for how in ("vmap", "layers")]
    (units, means, losses), (units_by_layers, means_by_layers, losses_by_layers) = ways
    torch.testing.assert_close(units_by_layers, units)
    torch.testing.assert_close(means_by_layers, means)
    torch.testing.assert_close(losses_by_layers, losses.mean().expand(2))  # the losses' mean, for each


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU wants the channels last")
def test_a_gpu_trains_and_evaluates_a_resnet_like_plain_passes(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    task = resnet("cuda", "float32")
    flat = FlatParameters(task.model)
    parameters = flat.flatten(dict(task.model.named_parameters())).detach()
    batch = task.fetch("train", torch.arange(4, device="cuda").view(2, 2))
    plain, found = (gradient_function(task, flat, False, how)(parameters, *batch)[1] for how in ("backward", "layers"))
    assert torch.linalg.vector_norm(found - plain) < 1e-4 * torch.linalg.vector_norm(plain)
    with torch.no_grad():
        logits = task.apply(flat.unflatten(parameters), batch[0].flatten(0, 1))
    torch.testing.assert_close(logits, task.model(batch[0].flatten(0, 1)).detach(), rtol=1e-4, atol=1e-4)


def test_models_of_other_layers_are_refused():
    run = compose(["task=cifar10", "data=embedded", "device=cpu", "task.gradients=layers"])
    task = make_task(run.config, run.source, torch.device("cpu"))
    with pytest.raises(CdgrabError, match="gradients=layers does not know this model of cifar10; use vmap or backward"):
        gradient_function(task, FlatParameters(task.model), False, "layers")
    other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    assert knows(other)
    for layer in (nn.LayerNorm(2), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding="same"), nn.PReLU()):
        assert not knows(nn.Sequential(other, layer))


def test_linear_layers_take_inputs_of_any_shape():
    torch.manual_seed(0)
    layer, inputs = nn.Linear(4, 5).double(), torch.randn(WORKERS * UNITS, UNITS, 3, 4).double()
    rows = {name: p.detach().expand(WORKERS, *p.shape).requires_grad_() for name, p in layer.named_parameters()}
    with ByWorker():
        found = torch.func.functional_call(layer, rows, (inputs,))
    torch.testing.assert_close(found, layer(inputs))
    gradients = torch.autograd.grad((found**2).sum(), list(rows.values()))
    for worker, own in enumerate(inputs.chunk(WORKERS)):
        expected = torch.autograd.grad((layer(own) ** 2).sum(), list(layer.parameters()))
        torch.testing.assert_close([gradient[worker] for gradient in gradients], list(expected))


def test_runs_that_train_together_have_the_gradients_of_each(narrow_resnet, monkeypatch):
    """And none is computed in another way."""
    task = resnet("cpu", "float64")
    flat, entered = FlatParameters(task.model), []
    enter = ByWorker.__enter__
    monkeypatch.setattr(ByWorker, "__enter__", lambda self: entered.append(self) or enter(self))
    first = flat.flatten(dict(task.model.named_parameters())).detach()
    parameters, visits = torch.stack([first, first + 0.01]), torch.arange(8).view(2, 2, 2)
    one = summed(gradient_function(task, flat, False, "layers"), 2)
    found = together(task, flat, one, "layers", visits, lookers=0)(parameters, *task.fetch("train", visits))[1]
    assert len(entered) == 2
    for run in range(2):
        torch.testing.assert_close(found[run], one(parameters[run], *task.fetch("train", visits[run]))[1])


@pytest.mark.parametrize(
    ("channels", "groups", "side"), [(16, 8, (4, 4)), (64, 4, (3, 5)), (32, 32, (8, 8)), (128, 16, (1, 1))]
)
def test_kernels_normalise_and_pass_back(triton_device, channels, groups, side):
    from experiments.tasks import norm_kernels

    torch.manual_seed(channels)
    count = WORKERS * UNITS
    exact = [(5 + 3 * torch.randn(count, channels, *side)).double(), *torch.randn(2, channels).double()]
    images, weight, bias = (tensor.clone().requires_grad_() for tensor in exact)
    slopes = torch.randn(count, channels, *side).double()
    expected = F.group_norm(images, groups, weight, bias)
    of_images = torch.autograd.grad(expected, images, slopes, retain_graph=True)[0]
    of_rows = [
        torch.stack([torch.autograd.grad(expected[rows], which, slopes[rows], retain_graph=True)[0] for rows in owned])
        for owned in [torch.arange(count).split(UNITS)]
        for which in (weight, bias)
    ]
    single = [tensor.float().to(triton_device) for tensor in exact]
    last = single[0].contiguous(memory_format=torch.channels_last).requires_grad_()
    rows = [vector.expand(WORKERS, -1).requires_grad_() for vector in single[1:]]
    assert norm_kernels.takes(last, groups)
    found = _GroupNorm.apply(last, *rows, groups, 1e-5)
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(found, [last, *rows], slopes.float().to(triton_device))
    for one, other in zip(gradients, [of_images, *of_rows], strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=2e-5, atol=2e-5)


def test_kernels_leave_to_others_what_they_cannot_normalise():
    norm_kernels = pytest.importorskip("experiments.tasks.norm_kernels", reason="there is no Triton")
    last = torch.zeros(2, 32, 4, 4).contiguous(memory_format=torch.channels_last)
    assert norm_kernels.takes(last, 8)
    assert not norm_kernels.takes(last.contiguous(), 8)  # channel by channel
    assert not norm_kernels.takes(last.double(), 8)
    assert not norm_kernels.takes(last[0], 8)
    three = torch.zeros(2, 48, 4, 4).contiguous(memory_format=torch.channels_last)
    assert not norm_kernels.takes(three, 16)  # groups of three channels
    large = torch.zeros(1, 32, 128, 128).contiguous(memory_format=torch.channels_last)
    assert not norm_kernels.takes(large, 8)
