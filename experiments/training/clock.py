"""How a run's time is divided among its phases."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter

PHASES = ("data", "gradients", "communication", "ordering", "optimiser", "evaluation")


class Clock(list):
    """Marks (phase, time at which it ended), in order. On a GPU this is the host's time: kernels may still be running.

    Training steps append their marks directly: one more call per phase and step would slow small models down.
    """

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        """seconds: by phase, from before an interruption."""
        super().__init__([("start", perf_counter())])
        self._before = dict.fromkeys(PHASES, 0.0) | (seconds or {})

    def lap(self, phase: str) -> None:
        """Assign all time since the last mark to this phase."""
        self.append((phase, perf_counter()))

    @property
    def seconds(self) -> dict[str, float]:
        """By phase."""
        total = dict(self._before)
        for (_, start), (phase, end) in pairwise(self):
            total[phase] += end - start
        return total
