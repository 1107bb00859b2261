"""What is measured after an epoch: the full train loss, the task's test metrics, and the parallel herding bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from cdgrab.runtime.group import WorkerGroup
from experiments.tasks.base import Task
from experiments.training.gradients import GradientFunction

Attempt = Callable[[Callable], dict]  # calls a function, and returns what that does


def plainly(action: Callable) -> dict:
    """The `Attempt` that nothing disturbs."""
    return action()


def evaluate(
    task: Task,
    parameters: dict[str, Tensor],
    owned: Tensor,
    group: WorkerGroup,
    at_once: bool = False,
    attempt: Attempt = plainly,
) -> dict[str, float]:
    """The task's metrics: train loss over the units owned [local workers, units], test metrics over the test split.

    Worker by worker, summed in worker order; `at_once`: all workers of one process, faster and equal up to rounding.
    attempt: calls what takes long, and may raise.
    """
    tested = torch.arange(task.test_units, device=owned.device)
    if at_once:
        units = {"train": [owned.flatten()], "test": [tested]}
    else:
        units = {"train": list(owned), "test": list(tested.tensor_split(group.workers)[group.local])}

    def totals(split: str) -> dict[str, float]:
        parts = [attempt(partial(task.totals, split, parameters, some)) for some in units[split]]
        names = sorted(parts[0])
        local = torch.stack([torch.stack([part[name].double().to(owned.device) for name in names]) for part in parts])
        return dict(zip(names, group.gather(local).sum(0).tolist(), strict=True))

    return task.metrics(totals("train"), totals("test"))


def evaluate_together(task: Task, parameters: dict[str, Tensor], owned: Tensor) -> list[dict[str, float]]:
    """The same, all units of all workers at once, for runs that share their data: parameters [runs, ...], owned [runs,
    workers, units]."""

    def totals(split: str, units: Tensor) -> list[dict[str, float]]:
        sums = task.totals_together(split, parameters, units)
        rows = torch.stack([tensor.to(owned.device) for tensor in sums.values()], dim=1).tolist()
        return [dict(zip(sums, row, strict=True)) for row in rows]

    train, test = totals("train", owned.flatten(1)), totals("test", torch.arange(task.test_units).to(owned))
    return list(map(task.metrics, train, test))


def fixed_herding(
    task: Task,
    compute: GradientFunction,
    parameters: Tensor,
    visits: Tensor,
    group: WorkerGroup,
    positions_at_once: int,
) -> dict[str, float]:
    """The parallel herding bound of an order, over the unit gradients at fixed `parameters` (equation 8).

    compute: a `gradient_function` with unit gradients; visits [local workers, units]: units in the order to be judged.
    Equals `cdgrab.herding.parallel_herding_bound` of all unit gradients, but needs two passes over them instead of
    holding them all: one for their mean, one for the running sum. Only the gradients of `positions_at_once` units of
    each worker are held at a time; one unit if the task has a carry.
    """
    if task.first_carry(1):
        positions_at_once = 1

    def visited() -> Iterator[Tensor]:
        """Unit gradients in float64 [n, dim]: position by position, workers in rank order."""
        carry = task.first_carry(len(visits))
        for block in visits.split(positions_at_once, dim=1):
            gradients, _, _, *carry = compute(parameters, *carry, *task.fetch("train", block))
            yield group.gather(gradients).transpose(0, 1).flatten(0, 1).double()

    mean = sum(gradients.sum(0) for gradients in visited()) / (group.workers * visits.shape[1])
    running = torch.zeros_like(mean)
    per_step = per_vector = running.new_zeros(())
    for gradients in visited():
        strayed = (gradients - mean).cumsum(0) + running
        running = strayed[-1]
        distances = strayed.abs().amax(1)
        per_vector = torch.maximum(per_vector, distances.amax())
        per_step = torch.maximum(per_step, distances[group.workers - 1 :: group.workers].amax())
    return {"herding_per_step": float(per_step), "herding_per_vector": float(per_vector)}
