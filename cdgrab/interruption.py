"""Ctrl-C that cannot get lost.

Python raises KeyboardInterrupt wherever the program happens to be. Now and then that is a place where exceptions are
swallowed (a finaliser, a callback from C++ as in torch.func), and the program would go on as if nothing had happened.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_heard = False


@contextmanager
def remembered() -> Iterator[None]:
    """Within this context an interruption raises KeyboardInterrupt as ever, and again at the next `raise_if_heard`."""
    global _heard
    if threading.current_thread() is not threading.main_thread():  # only that one may listen
        yield
        return
    before, _heard = signal.getsignal(signal.SIGINT), False
    if callable(before):  # else Ctrl-C is ignored, and stays so
        signal.signal(signal.SIGINT, lambda number, frame: _hear(before, number, frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _heard = False


def raise_if_heard() -> None:
    """For loops to call now and then."""
    if _heard:
        raise KeyboardInterrupt


def _hear(then, number: int, frame: object) -> None:
    global _heard
    _heard = True
    then(number, frame)
