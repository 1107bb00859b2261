"""Gradients of every worker from one forward and one backward pass over the units of all of them.

For models of ordinary layers that do not mix units: what passes from layer to layer is then the same as if every worker
had its own pass, and only the gradient of a layer's parameters is computed worker by worker. This keeps a GPU busy with
a large model; a pass for each worker does not, and vmap makes convolutions with as many groups as workers, which are
slow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode


def knows(model: nn.Module) -> bool:
    """Whether all parameters are those of layers that `ByWorker` knows; what is derived from these may do other things
    with them."""
    owners = [module for module in model.modules() if list(module.parameters(recurse=False))]
    known = all(type(module) in (nn.Conv2d, nn.Linear, nn.GroupNorm) for module in owners)
    return known and not any(isinstance(getattr(module, "padding", None), str) for module in owners)


class ByWorker(TorchFunctionMode):
    """Within it, layers take units [workers · units, ...] and parameters [workers, ...], of which all workers have the
    same: their gradients are those of each worker."""

    def __torch_function__(self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
        return LAYERS.get(function, function)(*args, **(kwargs or {}))


def channels_last(units: Tensor) -> Tensor:
    """Pictures as the tensor cores of a GPU want them."""
    return units.contiguous(memory_format=torch.channels_last) if units.is_cuda and units.dim() == 4 else units


def _format(images: Tensor) -> torch.memory_format:
    last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def _convolution(
    images: Tensor,
    filters: Tensor,
    bias: Tensor | None = None,
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, ...] = (0, 0),
    dilation: tuple[int, ...] = (1, 1),
    groups: int = 1,
) -> Tensor:
    found = _Convolution.apply(images, filters, _pair(stride), _pair(padding), _pair(dilation), groups)
    return found if bias is None else _by_channel(torch.add, found, bias)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(context, images: Tensor, filters: Tensor, *options: object) -> Tensor:
        own = filters[0].contiguous(memory_format=_format(images))
        context.save_for_backward(images, own)
        context.workers, context.options = len(filters), options
        return F.conv2d(images, own, None, *options)

    @staticmethod
    @once_differentiable
    def backward(context, slopes: Tensor) -> tuple[Tensor | None, ...]:
        (images, filters), (stride, padding, dilation, groups) = context.saved_tensors, context.options
        slopes = slopes.contiguous(memory_format=_format(images))

        def passed_back(some_slopes: Tensor, some_images: Tensor, of_images: bool) -> Tensor:
            options = [stride, padding, dilation, False, [0, 0], groups, [of_images, not of_images, False]]
            found = torch.ops.aten.convolution_backward(some_slopes, some_images, filters, None, *options)
            return found[0 if of_images else 1]

        each = zip(slopes.chunk(context.workers), images.chunk(context.workers), strict=True)
        of_filters = torch.stack([passed_back(*its, of_images=False) for its in each])
        of_images = passed_back(slopes, images, of_images=True) if context.needs_input_grad[0] else None
        return of_images, of_filters, None, None, None, None


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found = inputs.reshape(len(weight), -1, inputs.shape[-1]) @ weight.mT
    found = found if bias is None else found + bias[:, None]
    return found.view(*inputs.shape[:-1], -1)


def _group_norm(
    images: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    kernels = _kernels() if images.is_cuda and weight is not None and bias is not None else None
    if kernels and kernels.takes(images, groups):
        return _GroupNorm.apply(images, weight, bias, groups, eps)
    found = F.group_norm(images, groups, eps=eps)
    found = found if weight is None else _by_channel(torch.mul, found, weight)
    return found if bias is None else _by_channel(torch.add, found, bias)


class _GroupNorm(torch.autograd.Function):
    """By kernels."""

    @staticmethod
    def forward(context, images: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        found, *statistics = _kernels().normalise(images, groups, weight[0], bias[0], eps)
        context.save_for_backward(images, weight, *statistics)
        context.groups = groups
        return found

    @staticmethod
    @once_differentiable
    def backward(context, slopes: Tensor) -> tuple[Tensor | None, ...]:
        images, weight, *statistics = context.saved_tensors
        slopes = slopes.contiguous(memory_format=torch.channels_last)
        of_images, *of_each = _kernels().passed_back(slopes, images, context.groups, weight[0], *statistics)
        return of_images, *(each.unflatten(0, (len(weight), -1)).sum(1) for each in of_each), None, None


@cache  # looking for Triton takes longer than a small layer
def _kernels() -> ModuleType | None:
    if not find_spec("triton"):
        return None
    from experiments.tasks import norm_kernels

    return norm_kernels


def _by_channel(operation: Callable[[Tensor, Tensor], Tensor], units: Tensor, values: Tensor) -> Tensor:
    """units [workers · units, channels, ...] and each worker's values [workers, channels]"""
    by_worker = units.unflatten(0, (len(values), -1))
    shape = (len(values), 1, -1, *(1 for _ in by_worker.shape[3:]))
    return operation(by_worker, values.view(shape)).flatten(0, 1)


LAYERS = {F.conv2d: _convolution, F.linear: _linear, F.group_norm: _group_norm}
