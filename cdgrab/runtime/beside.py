"""What goes on beside a backward pass: jobs that stop where they have to wait, and how fast the links are."""

from __future__ import annotations

import concurrent.futures
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.futures import Future

from cdgrab.runtime.group import WorkerGroup

LANES = 2  # jobs that are under way at a time
TRIED = 2**18  # numbers that are sent to find out how fast links are,
ROUNDS, ATTEMPTS = 6, 5  # in at most so many rounds, of so many attempts
SLOW = 2e8  # bytes per second


def _in_turn(jobs: deque[Iterator[bool]]) -> None:
    """Go on with one job where another has to wait. More jobs may come meanwhile."""
    running: deque[Iterator[bool]] = deque()
    while jobs or running:
        _go_on((jobs if jobs and len(running) < LANES else running).popleft(), running)


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
    """Does jobs in a thread with a channel of its own, those of the next bucket already while others have to wait."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group, self._pool = group.new_channel(), ThreadPoolExecutor(1, "exchange")
        self._jobs: deque[Iterator[bool]] = deque()

    def run(self, jobs: Iterable[Iterator[bool]]) -> None:
        self._jobs.extend(jobs)
        self._pool.submit(_in_turn, self._jobs)

    def call(self, function: Callable[[], None]) -> concurrent.futures.Future:
        """After all jobs."""
        return self._pool.submit(function)


class OnStream:
    """Does jobs at once, on a stream of a GPU: collectives only queue there."""

    def __init__(self, group: WorkerGroup, device: torch.device) -> None:
        self.group, self._stream = group, torch.cuda.Stream(device)

    def run(self, jobs: Iterable[Iterator[bool]]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            _in_turn(deque(jobs))


def speed(group: WorkerGroup) -> float:
    """Bytes per second that a process sends at its best; those of the slowest, on all of them. Where processes share
    cores, an attempt may wait for a core instead of the link: a link is slow only if all attempts are, or if the first
    few are very slow."""
    sent, seconds, found = torch.zeros(TRIED), [], 0.0
    for _ in range(ROUNDS):
        for _ in range(ATTEMPTS):
            start = time.perf_counter()
            group.shard(sent)
            seconds.append(time.perf_counter() - start)
        slowest = float(group.gather(torch.tensor([min(seconds)], dtype=torch.float64)).max())
        found = sent.nbytes * (1 - 1 / group.world_size) / slowest
        if not SLOW / 4 < found < SLOW:
            break
    return found
