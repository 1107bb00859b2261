"""SIDCo (Abdelmoniem et al. 2021, arXiv 2101.10761): every worker fits an exponential distribution to its magnitudes,
and takes its threshold from the fit.

A single fit misses the tail, so it is refined in stages: each stage keeps a quarter and fits again what exceeds the
threshold so far. Every few iterations the number of stages adapts to the density that the worker reached.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cdgrab.runtime.fields import FLOAT64, INT64, Field
from cdgrab.sparsify.base import Sparsifier
from cdgrab.sparsify.threshold import SMALLEST, reaching

KEPT = 0.25  # the fraction that every stage but the last keeps
EVERY = 5  # iterations between adaptations
OFF = 0.2  # relative error of the density above which the stages adapt


def fitted_threshold(values: Tensor, density: float, stages: int) -> float:
    """The value that a fraction `density` of the magnitudes is expected to reach."""
    tail, threshold = values.abs(), 0.0
    for stage in range(stages):
        ratio = density / KEPT ** (stages - 1) if stage == stages - 1 else KEPT
        threshold -= float((tail - threshold).mean()) * math.log(ratio)
        tail = tail[tail >= threshold]
        if not len(tail):
            break
    return max(threshold, SMALLEST)


def most_stages(density: float) -> int:
    """More would leave nothing for the last one to do."""
    return max(1, math.ceil(math.log(density) / math.log(KEPT)))


class SIDCo(Sparsifier):
    label = "SIDCo"
    per_worker = ("_stages", "_direction", "_ratios", "_last")
    saved = ("_residual", *per_worker)

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self._stages = torch.ones(self.local_workers, dtype=torch.long)
        # Whether more stages raise or lower the density depends on the tail: a change for the worse reverses this.
        self._direction = torch.ones(self.local_workers, dtype=torch.long)  # change of stages if too little is selected
        self._ratios = torch.zeros(self.local_workers, dtype=torch.float64)  # selected / target, summed
        self._last = torch.full((self.local_workers,), math.inf, dtype=torch.float64)  # error at the last adaptation
        self._thresholds: list[float] = []

    def select(self, accumulated: Tensor) -> list[Tensor]:
        density = self.density_at(self.iteration)
        self._thresholds = [
            fitted_threshold(row, density, stages)
            for row, stages in zip(accumulated, self._stages.tolist(), strict=True)
        ]
        return [reaching(row, threshold) for row, threshold in zip(accumulated, self._thresholds, strict=True)]

    def learn(self, counts: list[int]) -> None:
        self._ratios += torch.tensor(counts[self.group.local], dtype=torch.float64) / self.target
        if (self.iteration + 1) % EVERY:
            return
        error = self._ratios / EVERY - 1
        off, worse = error.abs() > OFF, error.abs() > self._last
        self._direction = torch.where(off & worse, -self._direction, self._direction)
        step = torch.where(error < 0, self._direction, -self._direction) * off
        moved = (self._stages + step).clamp(1, most_stages(self.density_at(self.iteration)))
        stuck = off & (moved == self._stages)
        self._direction = torch.where(stuck, -self._direction, self._direction)
        self._stages, self._last = moved, error.abs()
        self._ratios.zero_()

    def fields(self, *, iteration: int) -> dict[str, Field]:
        return super().fields(iteration=iteration) | {
            "_stages": Field(INT64, (), 1, most_stages(self.density)),
            "_direction": Field(INT64, (), -1, 1, torch.all, "none of them 0"),
            "_ratios": Field(FLOAT64, (), least=0.0),
            "_last": Field(FLOAT64, (), 0.0, math.inf),
        }

    def _threshold(self) -> float:
        """The mean over this process's workers."""
        return sum(self._thresholds) / self.local_workers
