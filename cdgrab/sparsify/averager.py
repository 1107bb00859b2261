"""A sparsifier in place of the training loop's plain mean, with statistics for each epoch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cdgrab.checks import is_dense
from cdgrab.errors import CdgrabError
from cdgrab.runtime.fields import FLOAT64, Field
from cdgrab.sparsify.compressor import Compressor

LOGGED = ("density", "imbalance", "threshold", "bytes")


class SparseAverager:
    """Averages like `cdgrab.runtime.mean.Averager`, but with a sparsifier, and keeps statistics for each epoch."""

    def __init__(self, sparsifier: Compressor) -> None:
        self.sparsifier = sparsifier
        self._start()

    def average(self, worker_means: Tensor, want_shard: bool = False) -> tuple[Tensor, None]:
        """The update [dim] from the mean gradients of this process's workers [local workers, dim]. There is no shard:
        the second value is always None."""
        update = self.sparsifier.reduce(worker_means)
        for name in LOGGED:
            self._sums[name] += self.sparsifier.stats[name] or 0.0  # the threshold may be None
        self._steps += 1
        self._thresholds += self.sparsifier.stats.threshold is not None
        return update, None

    def add(self, iteration: int, sums: Sequence[float]) -> None:
        """Sums of the statistics of steps that were made elsewhere, up to this iteration."""
        steps, self.sparsifier.iteration = iteration - self.sparsifier.iteration, iteration
        for name, value in zip(LOGGED, sums, strict=True):
            self._sums[name] += value
        self._steps += steps
        self._thresholds += steps * (self._sums["threshold"] > 0)

    def epoch_means(self) -> dict[str, float]:
        """Means since the last call, over all processes, since some thresholds differ from process to process.

        build_up: the actual density, divided by the wanted one, both means over the steps.
        """
        means = torch.tensor([[self._sums[name] / max(1, self._steps) for name in LOGGED]], dtype=torch.float64)
        found = dict(zip(LOGGED, self.sparsifier.group.gather(means).mean(0).tolist(), strict=True))
        if not self._thresholds:
            del found["threshold"]
        wanted = self.sparsifier.mean_density(self._steps)
        self._start()
        return found | {"build_up": found["density"] / wanted}

    def running_sums(self) -> Tensor:
        """The sums behind `epoch_means`, a row for each process, on every process."""
        row = [self._steps, self._thresholds, *self._sums.values()]
        return self.sparsifier.group.gather(torch.tensor([row], dtype=torch.float64))

    def load_running_sums(self, rows: Tensor) -> None:
        """With another number of processes than before, each continues from the mean of the rows."""
        self.check_running_sums(rows)
        group = self.sparsifier.group
        steps, thresholds, *sums = (rows[group.rank] if len(rows) == group.world_size else rows.mean(0)).tolist()
        self._steps, self._thresholds, self._sums = round(steps), thresholds, dict(zip(LOGGED, sums, strict=True))

    def check_running_sums(self, rows: Tensor) -> None:
        """Refuse what `load_running_sums` cannot continue from."""
        found = len(rows) if is_dense(rows) and rows.dim() else 0
        if not found or not Field(FLOAT64, (found, 2 + len(LOGGED)), least=-1.0).fits(rows):
            raise CdgrabError("these are not the running sums of a sparsifier")

    def _start(self) -> None:
        self._steps, self._thresholds, self._sums = 0, 0, dict.fromkeys(LOGGED, 0.0)
