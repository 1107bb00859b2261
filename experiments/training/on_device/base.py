"""What the sparsifiers of several runs share, when they are computed together and nothing is asked of the device.

A kind of sparsifier does with tensors [runs, ...] what its class in `cdgrab.sparsify` does with one run, step by step:
no result decides what is launched next, so that a step can be captured as a CUDA graph. In float32. Of equal magnitudes
the first ones are taken; there, some at random, or any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cdgrab.sparsify import Sparsifier
from cdgrab.sparsify.averager import LOGGED
from cdgrab.sparsify.base import wanted
from experiments.training.gradients import sum_by_run

INDEX, COUNT, VALUE = 4, 4, 4  # bytes of a coordinate's number, of how many there are, and of a gradient's number


class Selection(NamedTuple):
    """What is sent: where [runs, dim], how many by each worker [runs, workers]; bytes [runs] for agreeing on it; the
    threshold [runs], if there is one."""

    union: Tensor
    counts: Tensor
    bytes: Tensor | int = 0
    threshold: Tensor | None = None


class Kind:
    """Sparsifiers that differ in density, warm-up, error feedback, and how they correct momentum, only. A subclass
    implements `select` and, if it adapts, `learn`."""

    def __init__(self, sparsifiers: Sequence[Sparsifier], device: torch.device) -> None:
        first, self.device = sparsifiers[0], device
        self.workers, self.dim, self.runs = first.workers, first.dim, len(sparsifiers)
        self.iteration = torch.zeros((), dtype=torch.long, device=device)
        self.sums = torch.zeros(self.runs, len(LOGGED), dtype=torch.float64, device=device)  # since they were read
        self._feedback = self._each([each.error_feedback for each in sparsifiers])[:, None, None]
        self._correction = self._each([each.momentum_correction for each in sparsifiers], torch.float32)[:, None, None]
        self._residual = torch.zeros(self.runs, self.workers, self.dim, device=device)
        self._masking = self._each([each.momentum_masking for each in sparsifiers])[:, None, None]
        corrects = any(each.momentum_correction for each in sparsifiers)
        self._momentum = torch.zeros_like(self._residual) if corrects else None
        self._last = max(getattr(each, "warm_up_steps", 0) for each in sparsifiers)  # nothing changes after this step
        self._targets = self._each(
            [[wanted(each.density_at(step), each.dim) for step in range(self._last + 1)] for each in sparsifiers]
        )

    def _each(self, values: list, dtype: torch.dtype | None = None) -> Tensor:
        """[runs, ...]"""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def tensors(self) -> list[Tensor]:
        """All that a step changes, in place."""
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    def now(self, table: Tensor) -> Tensor:
        """The column [runs] of this step, of what is known beforehand [runs, steps]."""
        return table.index_select(1, self.iteration.clamp(max=self._last).view(1))[:, 0]

    @property
    def targets(self) -> Tensor:
        """How many coordinates are wanted in this step, [runs]."""
        return self.now(self._targets)

    def average(self, gradients: Tensor) -> Tensor:
        """The updates [runs, dim] from the workers' gradients [runs, workers, dim]; NaN for a run whose gradients are
        not finite, which ends it."""
        finite = are_finite(gradients)
        accumulated = self._accumulated(gradients)
        found = self.select(accumulated)
        mean = sum_by_run(accumulated) / self.workers
        update = mean.masked_fill(~found.union, 0)
        self._residual.masked_fill_(found.union[:, None] | ~self._feedback, 0)
        if self._momentum is not None:
            self._momentum.masked_fill_(found.union[:, None] & self._masking, 0)
        self._record(found)
        self.learn(found)
        self.iteration += 1
        return update.masked_fill(~finite[:, None], torch.nan)

    def _accumulated(self, gradients: Tensor) -> Tensor:
        if self._momentum is None:
            return self._residual.add_(gradients)
        return self._residual.add_(self._momentum.mul_(self._correction).add_(gradients))

    def select(self, accumulated: Tensor) -> Selection:
        """accumulated [runs, workers, dim]"""
        raise NotImplementedError

    def learn(self, found: Selection) -> None:
        """Adapt to what was selected."""

    def _record(self, found: Selection) -> None:
        others, counts, sent = self.workers - 1, found.counts, found.union.sum(1)
        longest, total = counts.amax(1), counts.sum(1)
        indices = others * (COUNT + INDEX * longest)
        values = 2 * others * (VALUE * sent) // self.workers
        self._add(
            density=sent.double() / self.dim,
            imbalance=(self.workers * longest / total.clamp(min=1).double() - 1).masked_fill(total == 0, 0),
            threshold=found.threshold,
            bytes=others + found.bytes + indices + values,
        )

    def _add(self, **numbers: Tensor | float | None) -> None:
        for place, name in enumerate(LOGGED):
            if numbers[name] is not None:
                self.sums[:, place] += numbers[name]


def are_finite(gradients: Tensor) -> Tensor:
    """Whether those of each run [runs, workers, dim] are; each is read once and nothing of their size is written."""
    return torch.linalg.vector_norm(gradients, torch.inf, dim=(1, 2)).isfinite()
