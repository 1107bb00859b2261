"""What goes on beside a backward pass: jobs that stop where they have to wait."""

from __future__ import annotations

import concurrent.futures
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.futures import Future

from cdgrab.runtime.group import WorkerGroup

LANES = 2  # jobs that are under way at a time


def _in_turn(jobs: deque[Iterator[bool]], running: deque[Iterator[bool]], most: int) -> None:
    """Go on with one job where another has to wait. More jobs may come meanwhile. running: those that have begun."""
    while jobs or running:
        _go_on((jobs if jobs and len(running) < most else running).popleft(), running)


def _go_on(job: Iterator[bool], running: deque[Iterator[bool]]) -> None:
    if next(job, False):
        running.append(job)


class Handed:
    """A bucket that DDP has handed over, and what is promised to it: the mean."""

    def __init__(self, buffer: Tensor, jobs: int) -> None:
        self.buffer, self._left = buffer, jobs
        self.promise = Future(devices=[buffer.device] if buffer.is_cuda else None)
        if not jobs:  # of parameters without coordinates
            self.promise.set_result(buffer)

    def finish_one(self) -> None:
        self._left -= 1
        if not self._left:
            self.promise.set_result(self.buffer)


class InThread:
    """Does jobs in a thread with a channel of its own: collectives one after the other, since processes would begin
    them in different orders; if gradients flow, those of the next bucket already while others have to wait."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group, self._pool = group.new_channel(), ThreadPoolExecutor(1, "exchange")
        self._jobs: deque[Iterator[bool]] = deque()
        self._running: deque[Iterator[bool]] = deque()
        self._last: concurrent.futures.Future | None = None
        self._at_once, self._wake = 1, _nobody

    def flows(self, wake: Callable[[], None]) -> None:
        """wake: ends the waiting of a job, since there are others."""
        self._at_once, self._wake = LANES, wake

    def run(self, jobs: Iterable[Iterator[bool]]) -> None:
        """If the thread has nothing to do and gradients flow, the first job begins here: it would take a while to get
        a core. (A collective would keep this thread waiting for other processes.)"""
        idle = self._last is None or self._last.done()  # asked before: the thread takes what it sees
        self._jobs.extend(jobs)
        if idle and self._jobs and self._at_once > 1:
            _go_on(self._jobs.popleft(), self._running)
        self._last = self._pool.submit(_in_turn, self._jobs, self._running, self._at_once)
        if not idle:
            self._wake()

    def call(self, function: Callable[[], None]) -> concurrent.futures.Future:
        """After all jobs."""
        self._last = self._pool.submit(function)
        return self._last


def _nobody() -> None:
    """Waits for anything but a collective."""


class OnStream:
    """Does jobs at once, on a stream of a GPU: collectives only queue there."""

    def __init__(self, group: WorkerGroup, device: torch.device) -> None:
        self.group, self._stream = group, torch.cuda.Stream(device)

    def run(self, jobs: Iterable[Iterator[bool]]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            _in_turn(deque(jobs), deque(), LANES)
