"""Where a run's time goes."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter

PHASES = ("data", "gradients", "communication", "ordering", "optimiser", "evaluation")


class Clock(list):
    """Marks (phase, time at which it ended), in order. On a GPU that is the time of the host: kernels run on.

    Training steps append their marks themselves: a call per phase and step is what small models would notice.
    """

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        """seconds: what was counted before."""
        super().__init__([("start", perf_counter())])
        self._before = dict.fromkeys(PHASES, 0.0) | (seconds or {})

    def lap(self, phase: str) -> None:
        """All time since the last mark belongs to this phase."""
        self.append((phase, perf_counter()))

    @property
    def seconds(self) -> dict[str, float]:
        """By phase."""
        total = dict(self._before)
        for (_, start), (phase, end) in pairwise(self):
            total[phase] += end - start
        return total
