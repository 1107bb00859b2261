"""The order server: rows in, signs out, beside the training instead of in its way.

This is the order server that the conclusion of the CD-GraB paper (arXiv 2302.00845) asks for. Orders are needed only
once per epoch, so signs may be decided late. Rows are collected into blocks as they arrive and decided strictly in
order: on a GPU in a separate stream, but for single rows of small models; on a CPU in a thread if a core is free,
otherwise at once.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

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
    """Lets a balancer decide the rows of an epoch, in order, in blocks of about the size that it prefers.

    At most `buffer_bytes` of rows wait to be decided, or a single block if that is larger. In addition, at most one
    block is being collected. Rows are not split here: a submission larger than a block becomes one block. An
    interrupted wait loses nothing.
    """

    def __init__(self, balancer: Balancer, buffer_bytes: float, background: bool) -> None:
        self._balancer, self._buffer_bytes, self._background = balancer, buffer_bytes, background
        self._pool: ThreadPoolExecutor | None = None
        self._side: torch.cuda.Stream | None = None  # one beside the training's
        self._last: torch.cuda.Stream | None = None  # in which rows were decided last
        self._spares: list[Tensor] = []  # memory of rows that were decided
        self.forget()

    def forget(self) -> None:
        """Start a new epoch, or continue from a loaded state: drop what was collected, and the signs of blocks that are
        being decided. Call `drain` first if they still matter."""
        self._collected: list[Tensor] = []
        self._collected_bytes = 0  # kept as a running count: with tiny models a block takes thousands of rows
        self._first: int | None = None  # number of the first collected row
        self._next: int | None = None  # number of the row that must come next
        self._running: deque[_Block] = deque()
        self._decided: list[_Block] = []
        self._handing_over = False

    def submit(self, first: int, rows: Tensor) -> None:
        """Take rows first, first + 1, … of the epoch, [n, ...], which belong to the server from now on. Start deciding
        once another submission of this size would exceed a block."""
        if self._next not in (None, first):
            raise CdgrabError(LOST)
        self._first = first if not self._collected else self._first
        self._collected.append(rows)
        whole = rows.shape[-1] == self._balancer.dim
        size = rows.nbytes if whole else self._balancer.size(rows)
        self._collected_bytes += size
        self._next = first + len(rows)
        if self._collected_bytes + size > self._balancer.block_bytes:
            self.flush()

    def room(self, like: Tensor, *shape: int, sparing: bool = True) -> Tensor:
        """Memory for rows: that of decided ones, if there is any. On a CPU getting new memory takes longer than writing
        to it. sparing: if more would exceed the buffer, wait for the memory of rows that are being decided; on a GPU
        only the stream waits."""
        size = math.prod(shape)
        while self._running and self._running[0].done():
            self._wait_for_oldest()
        too_much = sparing and self._waiting_bytes() + size * like.element_size() > self._buffer_bytes
        if self._running and too_much and _fits(self._running[0].rows, like, size):
            self._running[0].hand_over()
            self._retire()
        self._spares = [spare for spare in self._spares if _fits(spare, like, size)]
        return self._spares.pop().view(shape) if self._spares else like.new_empty(shape)

    def free(self) -> None:
        """Keep no memory for rows to come: they will have another size."""
        self._spares = []

    def flush(self) -> None:
        """Start deciding everything collected, without waiting for the result."""
        if self._handing_over:
            raise CdgrabError(LOST)
        if not self._collected:
            return
        rows = self._collected[0] if len(self._collected) == 1 else torch.cat(self._collected)
        while self._running and self._waiting_bytes() + rows.nbytes > self._buffer_bytes:
            self._wait_for_oldest()
        self._handing_over = True  # stays true if interrupted: then it is unknown whether the rows were decided
        self._running.append(self._begin(self._first, rows))
        self._collected, self._collected_bytes = [], 0
        self._handing_over = False

    def result(self) -> tuple[int, Tensor] | None:
        """The signs of all rows since the last call, [n, workers], on the CPU, and the number of the first of them."""
        self.flush()
        while self._running:
            self._wait_for_oldest()
        blocks, self._decided = self._decided, []
        if not blocks:
            return None
        if self._last:
            _follow(self._last)
        return blocks[0].first, torch.cat([block.signs() for block in blocks]).cpu()

    def drain(self) -> None:
        """Return when nothing is being decided. Errors are raised by `result`."""
        for block in self._running:
            with contextlib.suppress(Exception):
                block.wait()

    def _waiting_bytes(self) -> int:
        return sum(block.size for block in self._running)

    def _wait_for_oldest(self) -> None:
        self._running[0].wait()
        self._retire()

    def _retire(self) -> None:
        block = self._running.popleft()
        self._decided.append(block)
        if block.rows is not None:
            self._spares.append(block.rows)
            block.rows = None

    def _begin(self, first: int, rows: Tensor) -> _Block:
        if self._background and rows.is_cuda:
            return self._on_a_stream(first, rows)
        if self._background:
            self._pool = self._pool or ThreadPoolExecutor(1, "order server")
            future = self._pool.submit(self._balancer.decide, first, rows)
            return _Block(first, rows, rows.nbytes, future.result, future.result, future.done, future.result)
        signs = self._balancer.decide(first, rows)
        self._spares = [rows]
        return _Block(first, None, 0, _at_once, _at_once, lambda: True, lambda: signs)

    def _on_a_stream(self, first: int, rows: Tensor) -> _Block:
        """One beside the training's, unless that takes the host longer than the GPU takes for the rows. Whatever was
        decided in another one comes first."""
        current = torch.cuda.current_stream(rows.device)
        brief = self._balancer.is_brief(rows)
        if not brief:
            self._side = self._side or torch.cuda.Stream(rows.device)
            self._side.wait_stream(current)
        stream = current if brief else self._side
        if self._last not in (None, stream):
            stream.wait_stream(self._last)
        self._last = stream
        with torch.cuda.device(rows.device) if brief else torch.cuda.stream(stream):
            signs = self._balancer.decide(first, rows)
        if brief:  # there is nothing to wait for but in another stream
            follow = partial(_follow, stream)
            return _Block(first, rows, 0, follow, follow, lambda: True, lambda: signs)
        rows.record_stream(stream)
        done = stream.record_event()
        hand_over = partial(_wait_in_stream, done, rows.device)
        return _Block(first, rows, rows.nbytes, done.synchronize, hand_over, done.query, lambda: signs)


@dataclass
class _Block:
    """Rows that are being decided: the number of the first, their memory (if it may be used again) and how much of it
    they occupy, how to wait for them, how to wait until that memory may be written to, whether they are decided, and
    their signs."""

    first: int
    rows: Tensor | None
    size: int
    wait: Callable[[], object]
    hand_over: Callable[[], object]
    done: Callable[[], bool]
    signs: Callable[[], Tensor]


def _at_once() -> None:
    """Nothing to wait for."""


def _follow(stream: torch.cuda.Stream) -> None:
    """Whatever is queued on this GPU from now on comes after what is queued in this stream."""
    current = torch.cuda.current_stream(stream.device)
    if current != stream:
        current.wait_stream(stream)


def _wait_in_stream(event: torch.cuda.Event, device: torch.device) -> None:
    """Whatever is queued on the GPU from now on comes after the event."""
    torch.cuda.current_stream(device).wait_event(event)


def _fits(memory: Tensor | None, like: Tensor, size: int) -> bool:
    return memory is not None and (memory.dtype, memory.device, memory.numel()) == (like.dtype, like.device, size)


def in_background(wanted: str | bool, on_gpu: bool) -> bool:
    """auto: on a GPU always; on a CPU if there is a core besides the one that trains."""
    return on_gpu or _cores() > 1 if wanted == "auto" else bool(wanted)


def _cores() -> int:
    """The number of cores that this process may use: on a shared machine often only some of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
