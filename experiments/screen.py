"""What a person sees while a command runs: lines that stay and, on a terminal, a last one that changes.

Nobody looks at a blank screen: the last line says what is going on, and for how long. In a pipe or a file there are
only plain lines: it is written there after some seconds, and then every minute. Nothing is shown before `begin`.

This module imports nothing that takes long, since what is shown first is that packages are being loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

TICK, PATIENCE, PAUSE = 0.2, 5.0, 60.0  # seconds: between drawings; before and between plain lines
ERASE = "\r\x1b[K"
PLAIN = "CDGRAB_PLAIN"

Status = Callable[[int | None], str]  # of so many columns, or a plain line


class _Screen:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.stream: TextIO | None = None  # where the last line goes
        self.terminal = False
        self.status: Status | None = None
        self.due = 0.0  # when the next plain line is
        self.drawn = False
        self.free = True  # nobody else has begun a line

    def draw(self) -> None:
        with self.lock:
            if self.status is None or self.stream is None:
                return
            if self.terminal and self.free:
                columns = shutil.get_terminal_size().columns - 1
                self.stream.write(ERASE + self.status(columns)[:columns] + "\r")  # others write over it
                self.stream.flush()
                self.drawn = True
            elif not self.terminal and time.monotonic() >= self.due:
                over = ERASE if self.stream.isatty() else ""
                print(over + self.status(None), file=self.stream, flush=True)
                self.due = time.monotonic() + PAUSE

    def erase(self) -> None:
        with self.lock:
            if self.drawn:
                self.stream.write(ERASE)
                self.stream.flush()
                self.drawn = False

    def tick(self) -> None:
        while True:
            time.sleep(TICK)
            with contextlib.suppress(OSError, ValueError):  # the terminal is gone
                self.draw()


class _Above:
    """A terminal's stream: what is written there erases the last line, which is drawn again below it."""

    def __init__(self, stream: TextIO, screen: _Screen) -> None:
        self._stream, self._screen = stream, screen

    def write(self, text: str) -> int:
        with self._screen.lock:
            self._screen.erase()
            self._screen.free = text.endswith("\n") if text else self._screen.free
            return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_screen = _Screen()


def begin(what: str = "starting") -> None:
    """Show `what` from now on. Of several processes of a run only the first one shows anything; if another process
    has the last line of the terminal (CDGRAB_PLAIN), plain lines."""
    if os.environ.get("RANK", "0") != "0":
        return
    if _screen.stream is None:
        _screen.stream = sys.stderr
        _screen.terminal = sys.stderr.isatty() and not os.environ.get(PLAIN)
        if _screen.terminal:
            sys.stdout = _Above(sys.stdout, _screen) if sys.stdout.isatty() else sys.stdout
            sys.stderr = _Above(sys.stderr, _screen)
        atexit.register(show, None)
        os.register_at_fork(before=_screen.lock.acquire, after_in_parent=_screen.lock.release, after_in_child=_leave)
        threading.Thread(target=_screen.tick, daemon=True).start()
    show(_waiting(what))


def show(status: Status | None) -> None:
    """What the last line says from now on; None: there is none."""
    with _screen.lock:
        _screen.status, _screen.due = status, time.monotonic() + PATIENCE
        _screen.erase()
        _screen.draw()


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Show `what` and for how long; nothing afterwards."""
    show(_waiting(what))
    try:
        yield
    finally:
        show(None)


def has_status_line() -> bool:
    """Whether there is a terminal on which the last line changes."""
    return _screen.terminal


def _waiting(what: str) -> Status:
    since = time.monotonic()

    def text(columns: int | None) -> str:
        seconds = int(time.monotonic() - since)
        return f"{what} …" + (f" {seconds} s" if seconds else "")

    return text


def _leave() -> None:
    """In a process that was forked: the screen is its parent's."""
    _screen.lock.release()
    _screen.__init__()
