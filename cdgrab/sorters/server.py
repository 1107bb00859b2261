"""The order server: rows in, signs out, beside the training instead of in its way.

This is the order server that the conclusion of the CD-GraB paper asks for. Orders are needed once per epoch, so signs
may be decided late. Rows are taken as they come, collected into blocks and decided strictly in order: on a GPU on a
stream of its own, on a CPU in a thread where a core is free, else at once.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from cdgrab.errors import CdgrabError
from cdgrab.sorters.balancers import Balancer

BACKGROUND = ("auto", True, False)

LOST = (
    "this epoch's signs were lost when deciding them was interrupted or failed; "
    "load the sorter's last state, or make a new sorter"
)


class OrderServer:
    """Lets a balancer decide the rows of an epoch, in order, in blocks of about the size that it wants.

    At most `buffer_bytes` of rows are handed over and not decided yet, unless a single block is larger: then that one
    alone. Beside them, at most a block is being collected. Rows are not split here: more than a block submitted at once
    makes a block of that size. A wait that is interrupted loses nothing.
    """

    def __init__(self, balancer: Balancer, buffer_bytes: float, background: bool) -> None:
        self._balancer, self._buffer_bytes, self._background = balancer, buffer_bytes, background
        self._pool: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        self.forget()

    def forget(self) -> None:
        """A new epoch begins, or another state was loaded: what was collected does not count, nor do the signs of
        blocks that are being decided. `drain` first if they still matter."""
        self._collected: list[Tensor] = []
        self._collected_bytes = 0  # counted, since tiny models collect thousands of rows before they make a block
        self._first: int | None = None  # number of the first collected row
        self._next: int | None = None  # number of the row that must come next
        self._running: deque[_Block] = deque()
        self._decided: list[_Block] = []
        self._handing_over = False

    def submit(self, first: int, rows: Tensor) -> None:
        """Take rows first, first + 1, … of the epoch, [n, ...], which belong to the server from now on; hand over what
        was collected if it makes a block: if as much again as came last would be too much."""
        if self._next not in (None, first):
            raise CdgrabError(LOST)
        self._first = first if not self._collected else self._first
        self._collected.append(rows)
        self._collected_bytes += rows.nbytes
        self._next = first + len(rows)
        if self._collected_bytes + rows.nbytes > self._balancer.block_bytes:
            self.flush()

    def flush(self) -> None:
        """Hand over everything collected, without waiting for it."""
        if self._handing_over:
            raise CdgrabError(LOST)
        if not self._collected:
            return
        rows = self._collected[0] if len(self._collected) == 1 else torch.cat(self._collected)
        while self._running and sum(block.size for block in self._running) + rows.nbytes > self._buffer_bytes:
            self._wait_for_oldest()
        self._handing_over = True  # if this is interrupted, nobody knows whether the rows were decided
        self._running.append(self._begin(self._first, rows))
        self._collected, self._collected_bytes = [], 0
        self._handing_over = False

    def result(self) -> tuple[int, Tensor] | None:
        """The signs of all rows since the last call, [n, workers], on the CPU, and the number of the first of them."""
        self.flush()
        while self._running:
            self._wait_for_oldest()
        blocks, self._decided = self._decided, []
        return (blocks[0].first, torch.cat([block.signs().cpu() for block in blocks])) if blocks else None

    def drain(self) -> None:
        """Return when nothing is being decided. What went wrong there is told by `result`."""
        for block in self._running:
            with contextlib.suppress(Exception):
                block.wait()

    def _wait_for_oldest(self) -> None:
        self._running[0].wait()
        self._decided.append(self._running.popleft())

    def _begin(self, first: int, rows: Tensor) -> _Block:
        if self._background and rows.is_cuda:
            return self._on_a_stream(first, rows)
        if self._background:
            self._pool = self._pool or ThreadPoolExecutor(1, "order server")
            future = self._pool.submit(self._balancer.decide, first, rows)
            return _Block(first, rows.nbytes, future.result, future.result)
        signs = self._balancer.decide(first, rows)
        return _Block(first, 0, lambda: None, lambda: signs)

    def _on_a_stream(self, first: int, rows: Tensor) -> _Block:
        self._stream = self._stream or torch.cuda.Stream(rows.device)
        self._stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(self._stream):
            signs = self._balancer.decide(first, rows)
        rows.record_stream(self._stream)
        done = self._stream.record_event()
        return _Block(first, rows.nbytes, done.synchronize, lambda: signs)


@dataclass(frozen=True)
class _Block:
    """Rows being decided: the first one's number, their bytes, how to wait for them, and their signs."""

    first: int
    size: int
    wait: Callable[[], object]
    signs: Callable[[], Tensor]


def in_background(wanted: str | bool, on_gpu: bool) -> bool:
    """auto: on a GPU; on a CPU when there is a core beside the one that trains."""
    return on_gpu or _cores() > 1 if wanted == "auto" else bool(wanted)


def _cores() -> int:
    """That this process may use: a job on a shared machine is often tied to some of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
