"""Signals that ask a run to end: it finishes the current step, saves everything, and then ends.

Ctrl-C (SIGINT) ends with status 130. A scheduler's SIGTERM ends with status 75, "temporary failure": start me again.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from cdgrab.runtime.group import WorkerGroup
from experiments.early import STATUS

T = TypeVar("T")

SAME = 2.0  # seconds within which a terminal and torchrun both pass on one Ctrl-C
PATIENCE = 0.5  # seconds between two questions whether to stop; they cost a round between the processes


class Interrupted(BaseException):
    """A signal has come."""


class StopRequest:
    """The signal that has asked this run to end, or 0."""

    def __init__(self) -> None:
        self.number, self._since = 0, 0.0
        self._attempting = False

    def __call__(self) -> int:
        return self.number

    def on_signal(self, number: int, frame: object) -> None:
        if not self.number:
            self.number, self._since = number, time.monotonic()
            if self._attempting:
                raise Interrupted
        elif number == signal.SIGINT and time.monotonic() - self._since > SAME:  # asked a second time: end at once
            raise KeyboardInterrupt

    def attempt(self, action: Callable[[], T]) -> T | None:
        """What `action` returns, which changes nothing; None if a signal comes, which ends it at once."""
        try:
            try:
                self._attempting = True
                return None if self.number else action()
            finally:
                self._attempting = False
        except Interrupted:  # comes once at most; perhaps when the inner part was over
            self._attempting = False
            return None


class Agreement:
    """To stop at the same step on all processes, if any of them has received a signal. All ask at the same times."""

    def __init__(self, stop: Callable[[], int], group: WorkerGroup) -> None:
        self._stop, self._group = stop, group
        self.number = 0  # of the signal
        self.steps, self.wanted, self._since = 0, 1, time.monotonic()  # made, until the next question

    def own(self) -> int:
        """The number of the signal that this process knows of, or 0."""
        self.number = self.number or self._stop()
        return self.number

    def after_steps(self) -> int:
        """The number of the signal, or 0. To be asked when as many `steps` as `wanted` have been made."""
        number, seconds = self._everybodys(time.monotonic() - self._since)
        self.wanted = max(1, int(PATIENCE * self.steps / max(seconds, 1e-6)))
        self.steps, self._since = 0, time.monotonic()
        return number

    def now(self) -> int:
        return self._everybodys()[0]

    def attempt(self, action: Callable[[], T]) -> tuple[T | None, int]:
        """What `action` returns, and the number of the signal that somebody has received, or 0. It is ended at once
        where one comes."""
        found = self._stop.attempt(action) if isinstance(self._stop, StopRequest) else action()
        return found, self.now()

    def _everybodys(self, seconds: float = 0.0) -> tuple[int, float]:
        mine = torch.tensor([[self.own(), seconds]], dtype=torch.float64)
        number, longest = self._group.gather(mine).amax(0).tolist()
        self.number = int(number)
        return self.number, longest


@contextlib.contextmanager
def listening() -> Iterator[StopRequest]:
    """Only the main thread can handle signals; in other threads nothing changes."""
    stop_request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop_request
        return
    before = {number: signal.signal(number, stop_request.on_signal) for number in STATUS}
    try:
        yield stop_request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
