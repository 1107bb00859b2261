"""The parallel herding bound of a training run, epoch by epoch (paper: Figure 9), without holding all gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .gradients import GradientFunction
from .tasks.base import Task
from .workers import WorkerGroup


def replayed_herding(
    task: Task,
    compute: GradientFunction,
    parameters: Tensor,
    owned: Tensor,
    order: Tensor,
    group: WorkerGroup,
    microbatch: int,
) -> dict[str, float]:
    """`herding_per_step` and `herding_per_vector` of `order`, over the unit gradients at fixed `parameters`.

    compute: a `gradient_function` with unit gradients; owned, order [local workers, units]. What
    `cdgrab.herding.parallel_herding_bound` gives for all unit gradients at once, in two passes over them: the first
    for their mean, the second for the running sum. Held at a time are the gradients of `microbatch` units a worker.
    """
    visits = owned.gather(1, order.to(owned.device))

    def replay() -> Iterator[Tensor]:
        """Every unit's gradient [dim]: position by position, workers in rank order."""
        carry = task.first_carry(len(visits))
        for block in visits.split(microbatch, dim=1):
            gradients, _, _, *carry = compute(parameters, *carry, *task.fetch("train", block))
            yield from group.gather(gradients).transpose(0, 1).flatten(0, 1)

    # Sums are float64 whatever the gradients are, as in `parallel_herding_bound`.
    mean = torch.zeros_like(parameters, dtype=torch.float64)
    for gradient in replay():
        mean += gradient
    mean /= group.workers * visits.shape[1]
    running = torch.zeros_like(mean)
    per_step = per_vector = running.new_zeros(())
    for count, gradient in enumerate(replay(), start=1):
        running += gradient
        running -= mean
        distance = running.abs().amax()
        per_vector = torch.maximum(per_vector, distance)
        if count % group.workers == 0:
            per_step = torch.maximum(per_step, distance)
    return {"herding_per_step": float(per_step), "herding_per_vector": float(per_vector)}
