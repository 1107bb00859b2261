"""Gradients of units and of workers, over one flat parameter vector."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from .tasks.base import Task


class FlatParameters:
    """The parameters of a model as one vector, in `named_parameters` order."""

    def __init__(self, model: nn.Module) -> None:
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        self.dim = sum(shape.numel() for shape in self.shapes.values())

    def flatten(self, tensors: dict[str, Tensor], batch_dims: int = 0) -> Tensor:
        """Named tensors [batch..., *shape] -> [batch..., dim]."""
        return torch.cat([tensors[name].flatten(batch_dims) for name in self.shapes], dim=-1)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """[dim] -> named views."""
        parts = vector.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


GRADIENTS = ("vmap", "backward")
GradientFunction = Callable[..., tuple[Tensor, Tensor, Tensor]]


def gradient_function(task: Task, flat: FlatParameters, per_unit: bool, how: str = "vmap") -> GradientFunction:
    """A function (parameters [dim], *batch [workers, units, ...]) -> (gradients, worker means [workers, dim],
    worker losses [workers]).

    `gradients` is [workers, units, dim] with `per_unit`, otherwise empty: sorters that don't look at gradients never
    pay for them. `how`: vmap (torch.func, all units at once) or backward (one backward pass per unit or worker, for
    models that vmap cannot take efficiently).
    """
    return {"vmap": _by_vmap, "backward": _by_backward}[how](task, flat, per_unit)


def _by_vmap(task: Task, flat: FlatParameters, per_unit: bool) -> GradientFunction:
    one = grad_and_value(task.loss)

    def compute(parameters: Tensor, *batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        axes = (None, *(0 for _ in batch))
        each = vmap(vmap(one, axes), axes) if per_unit else vmap(one, axes)
        gradients, losses = each(flat.unflatten(parameters), *batch)
        gradients = flat.flatten(gradients, batch_dims=2 if per_unit else 1)
        if per_unit:
            return gradients, gradients.mean(1), losses.mean(1)
        return parameters.new_empty(0), gradients, losses

    return compute


def _by_backward(task: Task, flat: FlatParameters, per_unit: bool) -> GradientFunction:
    def one(parameters: Tensor, *batch: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = parameters.detach().requires_grad_()
            loss = task.loss(flat.unflatten(leaf), *batch)
            return torch.autograd.grad(loss, leaf)[0], loss.detach()

    def compute(parameters: Tensor, *batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        workers, units = batch[0].shape[:2]
        if not per_unit:
            gradients, losses = zip(*(one(parameters, *(b[w] for b in batch)) for w in range(workers)), strict=True)
            return parameters.new_empty(0), torch.stack(gradients), torch.stack(losses)
        results = [one(parameters, *(b[w, u] for b in batch)) for w in range(workers) for u in range(units)]
        gradients = torch.stack([gradient for gradient, _ in results]).view(workers, units, flat.dim)
        losses = torch.stack([loss for _, loss in results]).view(workers, units)
        return gradients, gradients.mean(1), losses.mean(1)

    return compute
