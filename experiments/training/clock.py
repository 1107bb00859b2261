"""Where a run's time goes."""

from __future__ import annotations

import time

PHASES = ("data", "gradients", "communication", "ordering", "optimiser", "evaluation")


class Clock:
    """Adds the time since the last lap to a phase. On a GPU that is the time the host spends there: kernels run on."""

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        """seconds: what has been counted before."""
        self.seconds = dict.fromkeys(PHASES, 0.0) | (seconds or {})
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now
