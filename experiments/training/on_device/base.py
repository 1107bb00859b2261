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
from experiments.training.on_device.accumulation import accumulate, forget
from experiments.training.on_device.counting import how_many

INDEX, COUNT, VALUE = 4, 4, 4  # bytes of a coordinate's number, of how many there are, and of a gradient's number


class Selection(NamedTuple):
    """What is sent: where [runs, dim], how many by each worker [runs, workers]; bytes [runs] for agreeing on it; the
    threshold [runs], if there is one; how many a worker may send [runs], if that is limited."""

    union: Tensor
    counts: Tensor
    bytes: Tensor | int = 0
    threshold: Tensor | None = None
    most: Tensor | None = None


class Kind:
    """A subclass implements `average`."""

    def __init__(self, runs: int, workers: int, dim: int, device: torch.device) -> None:
        self.runs, self.workers, self.dim, self.device = runs, workers, dim, device
        self.iteration = torch.zeros((), dtype=torch.long, device=device)
        self.sums = torch.zeros(runs, len(LOGGED), dtype=torch.float64, device=device)  # since they were read

    def average(self, gradients: Tensor, rows: Tensor) -> Tensor:
        """The updates [runs, dim] from the workers' gradients [all runs, workers, dim], of which the runs of this kind
        are in these rows; NaN for a run whose gradients, or what they add up to, are not finite: that ends it."""
        raise NotImplementedError

    def tensors(self) -> list[Tensor]:
        """All that a step changes, in place."""
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    def _add(self, **numbers: Tensor | float | None) -> None:
        for place, name in enumerate(LOGGED):
            if numbers[name] is not None:
                self.sums[:, place] += numbers[name]


class Sparse(Kind):
    """Sparsifiers that differ in density, warm-up, error feedback, and how they correct momentum, only. A subclass
    implements `select` and, if it adapts, `learn`."""

    def __init__(self, sparsifiers: Sequence[Sparsifier], device: torch.device) -> None:
        super().__init__(len(sparsifiers), sparsifiers[0].workers, sparsifiers[0].dim, device)
        self._feedback = self._each([each.error_feedback for each in sparsifiers])
        self._correction = self._each([each.momentum_correction for each in sparsifiers], torch.float32)[:, None, None]
        self._residual = torch.zeros(self.runs, self.workers, self.dim, device=device)
        self._sent = torch.zeros(self.runs, self.dim, dtype=torch.bool, device=device)  # in the last step
        self._all_rows = torch.arange(self.runs, device=device)
        self._masking = self._each([each.momentum_masking for each in sparsifiers])
        corrects = any(each.momentum_correction for each in sparsifiers)
        self._momentum = torch.zeros_like(self._residual) if corrects else None
        self._last = max(getattr(each, "warm_up_steps", 0) for each in sparsifiers)  # nothing changes after this step
        self._targets = self._each(
            [[wanted(each.density_at(step), each.dim) for step in range(self._last + 1)] for each in sparsifiers]
        )

    def _each(self, values: list, dtype: torch.dtype | None = None) -> Tensor:
        """[runs, ...]"""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def now(self, table: Tensor) -> Tensor:
        """The column [runs] of this step, of what is known beforehand [runs, steps]."""
        return table.index_select(1, self.iteration.clamp(max=self._last).view(1))[:, 0]

    @property
    def targets(self) -> Tensor:
        """How many coordinates are wanted in this step, [runs]."""
        return self.now(self._targets)

    def average(self, gradients: Tensor, rows: Tensor) -> Tensor:
        if self._momentum is not None:
            forget(self._momentum, self._sent, self._masking, otherwise=False)
            gradients = self._momentum.mul_(self._correction).add_(gradients.index_select(0, rows))
            rows = self._all_rows
        sums = accumulate(self._residual, gradients, rows, self._sent, self._feedback)
        found = self.select(self._residual)
        self._sent.copy_(found.union)
        sent = how_many(found.union)
        self._record(found, sent)
        self.learn(found, sent)
        self.iteration += 1
        return finite_or_nan((sums / self.workers).masked_fill_(~found.union, 0), sums)

    def select(self, accumulated: Tensor) -> Selection:
        """accumulated [runs, workers, dim]"""
        raise NotImplementedError

    def learn(self, found: Selection, sent: Tensor) -> None:
        """Adapt to what was selected; sent [runs]: how many in all."""

    def _record(self, found: Selection, sent: Tensor) -> None:
        others, counts = self.workers - 1, found.counts
        longest, total = counts.amax(1), counts.sum(1)
        indices = others * (COUNT + INDEX * longest)
        values = 2 * others * (VALUE * sent) // self.workers
        self._add(
            density=sent.double() / self.dim,
            imbalance=(self.workers * longest / total.clamp(min=1).double() - 1).masked_fill(total == 0, 0),
            threshold=found.threshold,
            bytes=others + found.bytes + indices + values,
        )


def finite_or_nan(updates: Tensor, numbers: Tensor) -> Tensor:
    """The updates [runs, dim], with NaN for runs of which not all numbers [runs, ...] are finite."""
    largest = torch.linalg.vector_norm(numbers.flatten(1), torch.inf, dim=1, keepdim=True)
    return updates.masked_fill_(~largest.isfinite(), torch.nan)
