"""Signals that ask a run to end: it finishes the current block of steps, saves everything, and then ends.

Ctrl-C (SIGINT) ends with status 130. A scheduler's SIGTERM ends with status 75, "temporary failure": start me again.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

from experiments.early import STATUS

SAME = 2.0  # seconds within which a terminal and torchrun both pass on one Ctrl-C


class StopRequest:
    """The signal that has asked this run to end, or 0."""

    def __init__(self) -> None:
        self.number, self._since = 0, 0.0

    def __call__(self) -> int:
        return self.number

    def on_signal(self, number: int, frame: object) -> None:
        if not self.number:
            self.number, self._since = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since > SAME:  # asked a second time: end at once
            raise KeyboardInterrupt


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
