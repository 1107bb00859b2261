"""The order server: rows in, signs out, beside the training instead of in its way.

This is the order server that the conclusion of the CD-GraB paper (arXiv 2302.00845) asks for. Orders are needed only
once per epoch, so signs may be decided late. Rows are collected into blocks as they arrive and decided strictly in
order: on a GPU in a separate stream, but for single rows of small models; on a CPU in a thread if a core is free,
otherwise at once or, with DistributedDataParallel, while the next step's gradients are on their way. On GPUs of
several processes rows are decided at once, in the training's stream, unless `background` asks for more.
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
from typing import NamedTuple

import torch
from torch import Tensor

from cdgrab.errors import CdgrabError
from cdgrab.sorters.balancers import Balancer
from cdgrab.sorters.gpu_streams import Streams

BACKGROUND = ("auto", True, False)

LOST = (
    "this epoch's signs were lost when deciding them was interrupted or failed; "
    "load the sorter's last state, or make a new sorter"
)


class OrderServer:
    """Lets a balancer decide the rows of an epoch, in order, in blocks of about the size that it prefers.

    At most `buffer_bytes` of rows wait to be decided, or a single block if that is larger. In addition, at most one
    block is being collected. Rows are not split here: a submission larger than a block becomes one block. An
    interrupted wait loses nothing. late: a block that is full waits for `flush_full`.
    """

    def __init__(self, balancer: Balancer, buffer_bytes: float, background: bool, late: bool = False) -> None:
        self._balancer, self._buffer_bytes, self._background, self._late = balancer, buffer_bytes, background, late
        self._pool: ThreadPoolExecutor | None = None
        self._streams: Streams | None = None  # of the GPU on which rows are
        self._last: torch.cuda.Stream | None = None  # in which rows were decided last
        self._seen: torch.cuda.Stream | None = None  # in which the last call came
        self._moving = False  # calls have come in several streams: memory may be used in others than it was made in
        # memory of rows, each with the stream in which they are decided, if that may not be done yet
        self._spares: list[tuple[Tensor, torch.cuda.Stream | None]] = []
        self.forget()

    def forget(self) -> None:
        """Start a new epoch, or continue from a loaded state: drop what was collected, and the signs of blocks that are
        being decided. Call `drain` first if they still matter."""
        self._collected: list[Tensor] = []
        self._collected_bytes = 0  # kept as a running count: with tiny models a block takes thousands of rows
        self._full = False  # what was collected is a block
        self._first: int | None = None  # number of the first collected row
        self._next: int | None = None  # number of the row that must come next
        self._running: deque[_Block] = deque()
        self._decided: list[_Signs | _SignsInTurn] = []
        self._in_turn: _SignsInTurn | None = None  # the last of these, if single rows were decided on a GPU
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
        self._next = first + rows.shape[0]
        self._full = self._collected_bytes + size > self._balancer.block_bytes
        if self._full and not self._late:
            self.flush()
        elif rows.is_cuda:
            self._follow_calls(rows.device)

    def room(self, like: Tensor, *shape: int, sparing: bool = True) -> Tensor:
        """Memory for rows: that of decided ones, if there is any. On a CPU getting new memory takes longer than writing
        to it. sparing: if more would exceed the buffer, wait for the memory of rows that are being decided; on a GPU
        only the stream waits."""
        size = math.prod(shape)
        if like.is_cuda:
            self._follow_calls(like.device)
        self.flush_full()
        while self._running and self._running[0].done():
            self._wait_for_oldest()
        too_much = sparing and self._waiting_bytes() + size * like.element_size() > self._buffer_bytes
        if self._running and too_much and _fits(self._running[0].rows, like, size):
            self._running[0].hand_over()
            self._retire()
        self._spares = [spare for spare in self._spares if _fits(spare[0], like, size)]
        if not self._spares:
            return like.new_empty(shape)
        memory, stream = self._spares.pop()
        if stream and self._streams.follow(current := self._streams.current(), stream):
            memory.record_stream(current)
        return memory if memory.shape == shape else memory.view(shape)

    def flush_full(self) -> None:
        """Decide a block that is full and waits."""
        if self._full:
            self.flush()

    def free(self) -> None:
        """Keep no memory for rows to come: they will have another size."""
        self._spares = []

    def flush(self) -> None:
        """Start deciding everything collected, without waiting for the result."""
        if self._handing_over:
            raise CdgrabError(LOST)
        if not self._collected:
            return
        if (one := self._collected[0]).is_cuda:
            self._follow_calls(one.device)
            for some in self._collected if self._moving else ():
                some.record_stream(self._seen)
        rows = one if len(self._collected) == 1 else torch.cat(self._collected)
        while self._running and self._waiting_bytes() + rows.nbytes > self._buffer_bytes:
            self._wait_for_oldest()
        self._handing_over = True  # stays true if interrupted: then it is unknown whether the rows were decided
        self._begin(self._first, rows)
        self._collected, self._collected_bytes, self._full = [], 0, False
        self._handing_over = False

    def result(self) -> tuple[int, Tensor] | None:
        """The signs of all rows since the last call, [n, workers], on the CPU, and the number of the first of them."""
        self.flush()
        while self._running:
            self._wait_for_oldest()
        decided, self._decided, self._in_turn = self._decided, [], None
        self._follow_decided()
        if not decided:
            return None
        return decided[0].first, torch.cat([some.signs() for some in decided]).cpu()

    def drain(self) -> None:
        """Return when nothing is being decided; what is queued on a GPU from now on comes after that. `result` raises
        the errors."""
        for block in self._running:
            with contextlib.suppress(Exception):
                block.wait()
        self._follow_decided()
        if self._moving:  # what is dropped after this is in use in no stream
            self._streams.current().synchronize()

    def _follow_calls(self, device: torch.device) -> None:
        """Whatever the caller queues from now on comes after all that is queued so far in the stream of the last call:
        an epoch may be trained in one stream and end in another."""
        if self._streams is None or self._streams.device != device:
            self._streams, self._spares = Streams(device), []
        current = self._streams.current()
        if self._seen and self._streams.follow(current, self._seen):
            self._moving = True
        self._seen = current

    def _follow_decided(self) -> None:
        if self._streams:
            self._follow_calls(self._streams.device)
        if self._last:
            self._streams.follow(self._streams.current(), self._last)

    def _waiting_bytes(self) -> int:
        return sum(block.size for block in self._running)

    def _wait_for_oldest(self) -> None:
        self._running[0].wait()
        self._retire()

    def _retire(self) -> None:
        block = self._running.popleft()
        self._decided.append(block.found)
        if block.rows is not None:
            self._spares.append((block.rows, None))
            block.rows = None

    def _begin(self, first: int, rows: Tensor) -> None:
        if not self._background:
            self._decide_here(first, rows)
        elif not rows.is_cuda:
            self._pool = self._pool or ThreadPoolExecutor(1, "order server")
            future = self._pool.submit(self._balancer.decide, first, rows)
            found = _Signs(first, future.result)
            self._running.append(_Block(found, rows, rows.nbytes, future.result, future.result, future.done))
        elif self._balancer.is_quick(rows):
            self._decide_row(first, rows)
        else:
            self._decide_block(first, rows)

    def _decide_here(self, first: int, rows: Tensor) -> None:
        """At once; on a GPU in the stream of whoever observes. Later rows may come in another."""
        decide, stream = self._balancer.decide, self._stream_for(rows, beside=False) if rows.is_cuda else None
        signs = self._streams.queue(stream, decide, first, rows) if stream else decide(first, rows)
        self._decided.append(_Signs(first, lambda: signs))
        self._spares = [(rows, stream)]

    def _decide_row(self, first: int, row: Tensor) -> None:
        """On a GPU. A brief row in the training's stream: to lead it to another one takes the host longer than the GPU
        takes for the row. Nobody has to wait but for its memory, in another stream."""
        stream = self._stream_for(row, beside=not self._balancer.is_brief(row))
        while self._running:  # this stream follows theirs now
            self._retire()
        self._streams.queue(stream, self._balancer.decide_row, first, row)
        if self._in_turn is None or self._decided[-1] is not self._in_turn:
            self._in_turn = _SignsInTurn(self._balancer, first, first)
            self._decided.append(self._in_turn)
        self._in_turn.end = first + 1
        self._spares = [(row, stream)]

    def _decide_block(self, first: int, rows: Tensor) -> None:
        """On a GPU, in a stream beside the training's."""
        stream = self._stream_for(rows, beside=True)
        signs = self._streams.queue(stream, self._balancer.decide, first, rows)
        done = stream.record_event()
        hand_over = partial(_wait_in_stream, done, rows.device)
        found = _Signs(first, lambda: signs)
        self._running.append(_Block(found, rows, rows.nbytes, done.synchronize, hand_over, done.query))

    def _stream_for(self, rows: Tensor, beside: bool) -> torch.cuda.Stream:
        """In which these rows are to be decided, after all that were decided before."""
        streams, current = self._streams, self._seen
        stream = streams.beside() if beside else current
        streams.follow(stream, current)
        last, self._last = self._last, stream
        if beside or self._moving or last is not stream:
            if last:
                streams.follow(stream, last)
            rows.record_stream(stream)  # they may have been allocated in another one
        return stream


class _Signs(NamedTuple):
    """Signs that are or will be known: the number of the first, and how to get them."""

    first: int
    signs: Callable[[], Tensor]


@dataclass(eq=False)
class _SignsInTurn:
    """The same of rows that were decided by themselves, one after the other."""

    balancer: Balancer
    first: int
    end: int

    def signs(self) -> Tensor:
        return self.balancer.found(self.first, self.end)


@dataclass
class _Block:
    """Rows that are being decided: their signs, their memory (if it may be used again) and how much of it they occupy,
    how to wait for them, how to wait until that memory may be written to, and whether they are decided."""

    found: _Signs
    rows: Tensor | None
    size: int
    wait: Callable[[], object]
    hand_over: Callable[[], object]
    done: Callable[[], bool]


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
