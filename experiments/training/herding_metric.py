"""The parallel herding bound of a training run, epoch by epoch (paper: Figure 9), without holding all gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cdgrab.runtime.group import WorkerGroup
from experiments.tasks.base import Task
from experiments.training.gradients import GradientFunction


def replayed_herding(
    task: Task,
    compute: GradientFunction,
    parameters: Tensor,
    owned: Tensor,
    order: Tensor,
    group: WorkerGroup,
    positions_at_once: int,
) -> dict[str, float]:
    """`herding_per_step` and `herding_per_vector` of `order`, over the unit gradients at fixed `parameters`.

    compute: a `gradient_function` with unit gradients; owned, order [local workers, units]. What
    `cdgrab.herding.parallel_herding_bound` gives for all unit gradients at once, in two passes over them: the first
    for their mean, the second for the running sum. Held at a time are the gradients of `positions_at_once` units a
    worker. A task with a carry takes one at a time.
    """
    visits = owned.gather(1, order.to(owned.device))
    if task.first_carry(1):
        positions_at_once = 1

    def replay() -> Iterator[Tensor]:
        """Unit gradients in float64 [n, dim]: position by position, workers in rank order."""
        carry = task.first_carry(len(visits))
        for block in visits.split(positions_at_once, dim=1):
            gradients, _, _, *carry = compute(parameters, *carry, *task.fetch("train", block))
            yield group.gather(gradients).transpose(0, 1).flatten(0, 1).double()

    mean = sum(gradients.sum(0) for gradients in replay()) / (group.workers * visits.shape[1])
    running = torch.zeros_like(mean)
    per_step = per_vector = running.new_zeros(())
    for gradients in replay():
        strayed = (gradients - mean).cumsum(0) + running
        running = strayed[-1]
        distances = strayed.abs().amax(1)
        per_vector = torch.maximum(per_vector, distances.amax())
        per_step = torch.maximum(per_step, distances[group.workers - 1 :: group.workers].amax())
    return {"herding_per_step": float(per_step), "herding_per_vector": float(per_vector)}
