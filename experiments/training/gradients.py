"""Gradients of units and of workers, over flat parameter vectors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from cdgrab.balance import optional
from cdgrab.errors import CdgrabError
from cdgrab.runtime.mean import tree_sum
from experiments.tasks.base import Task
from experiments.tasks.layers import ByWorker, channels_last, knows
from experiments.training.compiled import side_by_side


class FlatParameters:
    """The parameters of a model as one vector, in `named_parameters` order."""

    def __init__(self, model: nn.Module) -> None:
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.dim = sum(self.sizes)

    def flatten(self, tensors: dict[str, Tensor], batch_dims: int = 0) -> Tensor:
        """Named tensors [batch..., *shape] -> [batch..., dim]."""
        return torch.cat([tensors[name].flatten(batch_dims) for name in self.shapes], dim=-1)

    def unflatten(self, vectors: Tensor) -> dict[str, Tensor]:
        """[batch..., dim] -> named views [batch..., *shape]."""
        parts, batch = vectors.split(self.sizes, dim=-1), vectors.shape[:-1]
        return {name: part.view(*batch, *shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


GRADIENTS = ("vmap", "backward", "layers")
MANY = 2**20  # numbers in the gradients of all workers: worth two functions, if some runs need only their mean
GradientFunction = Callable[..., tuple[Tensor, ...]]


def gradient_function(task: Task, flat: FlatParameters, per_unit: bool, how: str = "vmap") -> GradientFunction:
    """A function (parameters [dim], *carry [workers, ...], *batch [workers, units, ...])
    -> (gradients, worker means [workers, dim], worker losses [workers], *carry).

    `gradients` is [workers, units, dim] with `per_unit`, otherwise empty: sorters that don't look at gradients don't
    pay for them. `how`: vmap (torch.func, all workers and units at once), backward (one backward pass per worker, or
    per unit of a worker, for models on which vmap is slow), or layers (one backward pass for all, see `ByWorker`;
    instead of each worker's loss, it gives their mean).
    """
    carried = len(task.first_carry(1))
    on_all_workers = {"vmap": _by_vmap, "backward": _by_backward, "layers": _by_layers}[how](task, flat)

    def compute(parameters: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        carry, batch = inputs[:carried], inputs[carried:]
        workers, units = batch[0].shape[:2]
        if units == 1:  # a worker's only unit is its mean: one gradient serves both
            means, losses, carry = on_all_workers(parameters, carry, tuple(b[:, 0] for b in batch))
            return means[:, None] if per_unit else means.new_empty(0), means, losses, *carry
        if not per_unit:
            means, losses, carry = on_all_workers(parameters, carry, batch)
            return means.new_empty(0), means, losses, *carry
        if carried:
            raise ValueError("a task with a carry visits one unit per step")
        gradients, losses, _ = on_all_workers(parameters, (), tuple(b.flatten(0, 1) for b in batch))
        gradients, losses = gradients.view(workers, units, -1), losses.view(workers, units)
        return gradients, gradients.mean(1), losses.mean(1)

    return compute


def _by_vmap(task: Task, flat: FlatParameters) -> Callable:
    def compute(parameters: Tensor, carry: tuple, batch: tuple) -> tuple[Tensor, Tensor, tuple]:
        each = vmap(grad_and_value(task.loss, has_aux=True), in_dims=(None, 0, *(0 for _ in batch)))
        gradients, (losses, carry) = each(flat.unflatten(parameters), carry, *batch)
        return flat.flatten(gradients, batch_dims=1), losses, carry

    return compute


def _by_backward(task: Task, flat: FlatParameters) -> Callable:
    def one(parameters: Tensor, carry: tuple, batch: tuple) -> tuple[Tensor, Tensor, tuple]:
        with torch.enable_grad():
            leaf = parameters.detach().requires_grad_()
            loss, carry = task.loss(flat.unflatten(leaf), carry, *batch)
            return torch.autograd.grad(loss, leaf)[0], loss.detach(), tuple(c.detach() for c in carry)

    def compute(parameters: Tensor, carry: tuple, batch: tuple) -> tuple[Tensor, Tensor, tuple]:
        rows = side_by_side(
            [
                partial(one, parameters, tuple(c[i] for c in carry), tuple(b[i] for b in batch))
                for i in range(len(batch[0]))
            ],
            parameters.device,
        )
        gradients, losses, carries = zip(*rows, strict=True)
        return torch.stack(gradients), torch.stack(losses), tuple(torch.stack(c) for c in zip(*carries, strict=True))

    return compute


def _by_layers(task: Task, flat: FlatParameters) -> Callable:
    if task.first_carry(1) or not knows(task.model):
        raise CdgrabError(f"task.gradients=layers does not know this model of {task.name}; use vmap or backward")

    def compute(parameters: Tensor, carry: tuple, batch: tuple) -> tuple[Tensor, Tensor, tuple]:
        workers, several = len(batch[0]), batch[-1].dim() > 1  # units of a worker; the last tensor has a class for each
        units = [channels_last(b.flatten(0, 1) if several else b) for b in batch]
        with torch.enable_grad():
            rows = parameters.detach().expand(workers, -1).requires_grad_()
            with ByWorker():
                loss, _ = task.loss(flat.unflatten(rows), (), *units)
            gradients = torch.autograd.grad(workers * loss, rows)[0]
        return gradients, loss.detach().expand(workers), ()

    return compute


def together(
    task: Task,
    flat: FlatParameters,
    compute: GradientFunction,
    how: str,
    owned: Tensor,
    lookers: int,
    every_worker: bool = False,
) -> GradientFunction:
    """`compute`, which returns means over the workers, or with `every_worker` those of each, for several runs at once:
    inputs and outputs [replicas, ...]; unit gradients only of the first `lookers` runs. owned [replicas, workers, ...].
    """
    replicas, workers = owned.shape[:2]
    if written_at_once(task, owned.device):
        function = at_once(task, flat, lookers)
        return function if every_worker else summed(function, workers)
    if task.factors and task.units_per_step == 1 and not (every_worker or owned.is_cuda):
        return by_factors(task, flat, lookers)
    function = over_replicas(compute, lookers, how)
    needs_all = every_worker or lookers == replicas or (lookers and workers * flat.dim < MANY)
    if needs_all or how != "vmap" or task.first_carry(1):
        return function
    others = vmap(pooled(task, flat))
    return mixed(function, others, lookers) if lookers else others


def over_replicas(compute: GradientFunction, lookers: int, how: str) -> GradientFunction:
    """The same function for all. Together, runs may round differently than alone, since products are batched."""

    def one_by_one(*inputs: Tensor) -> tuple[Tensor, ...]:
        rows = side_by_side([partial(compute, *its) for its in zip(*inputs, strict=True)], inputs[0].device)
        return tuple(map(torch.stack, zip(*rows, strict=True)))

    on_all = vmap(compute) if how == "vmap" else one_by_one

    def function(*inputs: Tensor) -> tuple[Tensor, ...]:
        unit_gradients, *rest = on_all(*inputs)
        return unit_gradients[:lookers], *rest

    return function


def pooled(task: Task, flat: FlatParameters) -> GradientFunction:
    """The mean over all workers as one gradient, for a task without a carry: much less to write, if nobody looks at the
    gradients of single workers. Instead of each worker's loss, returns their mean."""

    def compute(parameters: Tensor, *batch: Tensor) -> tuple[Tensor, ...]:
        everybodys = (tensor.flatten(0, 1) for tensor in batch)
        gradient, (loss, _) = grad_and_value(task.loss, has_aux=True)(flat.unflatten(parameters), (), *everybodys)
        return parameters.new_empty(0), flat.flatten(gradient), loss.expand(len(batch[0]))

    return compute


def mixed(looked_at: GradientFunction, others: GradientFunction, lookers: int) -> GradientFunction:
    """The first function for the first `lookers` runs, the second for the others."""

    def function(*inputs: Tensor) -> tuple[Tensor, ...]:
        unit_gradients, *first = looked_at(*(tensor[:lookers] for tensor in inputs))
        _, *rest = others(*(tensor[lookers:] for tensor in inputs))
        return unit_gradients, *map(torch.cat, zip(first, rest, strict=True))

    return function


def written_at_once(task: Task, device: torch.device) -> bool:
    """Kernels of its own write the gradients of a task's runs that train together; no trace would show them."""
    return bool(task.write_gradients) and device.type == "cuda"


def at_once(task: Task, flat: FlatParameters, lookers: int) -> GradientFunction:
    """For a task that has `write_gradients` and visits one unit per step; returns the gradients of every worker."""
    carried = len(task.first_carry(1))

    def function(parameters: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        batch = [tensor[:, :, 0] for tensor in inputs[carried:]]  # the only unit
        replicas, workers = batch[0].shape[:2]
        gradients = parameters.new_empty(replicas, workers, flat.dim)
        into = flat.unflatten(gradients)
        losses, carry = task.write_gradients(flat.unflatten(parameters), inputs[:carried], *batch, into)
        return gradients[:lookers, :, None], gradients, losses, *carry

    return function


def by_factors(task: Task, flat: FlatParameters, lookers: int) -> GradientFunction:
    """For a task of linear layers that has `factors` and visits one unit per step. The mean over the workers is a
    product of matrices too, so that the gradients of single workers are computed only for sorters that look at them."""

    def multiplied(factors: list[tuple[Tensor, Tensor]]) -> Tensor:
        """slopes [..., n, outputs] and inputs [..., n, inputs] -> [..., dim]"""
        layers = (((slopes.mT @ inputs).flatten(-2), slopes.sum(-2)) for slopes, inputs in factors)
        return torch.cat([gradient for layer in layers for gradient in layer], dim=-1)

    def function(parameters: Tensor, *batch: Tensor) -> tuple[Tensor, ...]:
        losses, factors = task.factors(flat.unflatten(parameters), *(tensor[:, :, 0] for tensor in batch))
        gradients = multiplied([(slopes[:lookers], inputs[:lookers]) for slopes, inputs in factors])
        total = multiplied([(slopes.flatten(1, 2), inputs.flatten(1, 2)) for slopes, inputs in factors])
        return gradients[:, :, None], total / losses.shape[1], losses

    return function


def summed(compute: GradientFunction, workers: int | None) -> Callable[..., tuple[Tensor, ...]]:
    """`compute` with the workers' mean gradients [..., workers, dim] replaced by their sum [..., dim], or mean over
    `workers`."""

    def function(*inputs: Tensor) -> tuple[Tensor, ...]:
        unit_gradients, worker_means, *rest = compute(*inputs)
        total = tree_sum(worker_means) if worker_means.dim() == 2 else sum_by_run(worker_means)
        return unit_gradients, total if workers is None else total / workers, *rest

    return function


def sum_by_run(rows: Tensor) -> Tensor:
    """[runs, workers, dim] -> [runs, dim], by one kernel where there is one; what `vmap` looks through has none."""
    first, kernel = rows.transpose(0, 1), optional("tree") if rows.is_cuda else None
    return kernel.tree_sum(first) if kernel and kernel.takes(first) else tree_sum(first)
