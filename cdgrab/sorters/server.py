"""The order server: gradients' pair differences in, signs out, beside the training instead of in its way.

Orders are needed once per epoch, so signs may be decided late. Rows are taken as they come, collected into blocks and
decided strictly in order: on a GPU on a stream of its own, on a CPU in a thread where a core is free, else at once.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from cdgrab.errors import CdgrabError

BACKGROUND = ("auto", True, False)
Decide = Callable[[int, Tensor], Tensor]  # (number of the first row, rows [n, ...]) -> signs [n, workers]

LOST = (
    "this epoch's signs were lost when deciding them was interrupted or failed; "
    "load the sorter's last state, or make a new sorter"
)


class OrderServer:
    """Decides rows 0, 1, 2, … of an epoch with `decide`, in blocks of about `block_bytes`.

    At most `buffer_bytes` of rows are handed over and not decided yet, unless a single block is larger: then that one
    alone. Beside them, at most a block is being collected. Rows are not split here: who submits more than `block_bytes`
    at once gets a block of that size. A wait that is interrupted loses nothing.
    """

    def __init__(self, decide: Decide, block_bytes: float, buffer_bytes: float, background: bool) -> None:
        self._decide, self._block_bytes, self._buffer_bytes = decide, block_bytes, buffer_bytes
        self._background = background
        self._pool: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        self.start(0)

    def start(self, first: int) -> None:
        """A new epoch, or one that goes on at row `first`. What was collected is forgotten, and so are the signs of
        blocks that are being decided: `drain` first where they still matter to anybody."""
        self._collected: list[Tensor] = []
        self._collected_bytes = 0  # counted, since tiny models collect thousands of rows before they make a block
        self._next = first  # number of the first row that has not been handed to `decide`
        self._running: deque[_Block] = deque()
        self._decided: list[_Block] = []
        self._handing_over = False

    @property
    def taken(self) -> int:
        """The number of the row that comes next."""
        return self._next + sum(map(len, self._collected))

    def submit(self, rows: Tensor) -> None:
        """Take the next rows [n, ...]. They belong to the server from now on."""
        self._collected.append(rows)
        self._collected_bytes += _bytes(rows)

    def advance(self) -> None:
        """Hand over what was submitted if it makes a block: if as much again as came last would be too much."""
        if self._collected and self._collected_bytes + _bytes(self._collected[-1]) > self._block_bytes:
            self.flush()

    def flush(self) -> None:
        """Hand everything collected to `decide`, without waiting for it."""
        self._refuse_if_broken()
        if not self._collected:
            return
        rows = self._collected[0] if len(self._collected) == 1 else torch.cat(self._collected)
        while self._running and sum(block.size for block in self._running) + _bytes(rows) > self._buffer_bytes:
            self._wait_for_oldest()
        self._handing_over = True  # who is interrupted here has rows of which nobody knows whether they were decided
        self._running.append(self._begin(self._next, rows))
        self._next, self._collected, self._collected_bytes = self._next + len(rows), [], 0
        self._handing_over = False

    def result(self) -> Tensor | None:
        """Signs of all rows since the last call, on the CPU, [n, workers]; None when there are none."""
        self.flush()
        while self._running:
            self._wait_for_oldest()
        signs = torch.cat([block.result().cpu() for block in self._decided]) if self._decided else None
        self._decided = []
        return signs

    def drain(self) -> None:
        """Return when nothing is being decided. What went wrong there is told by `result`."""
        for block in self._running:
            with contextlib.suppress(Exception):
                block.wait()

    def _wait_for_oldest(self) -> None:
        self._running[0].wait()
        self._decided.append(self._running.popleft())

    def _refuse_if_broken(self) -> None:
        if self._handing_over:
            raise CdgrabError(LOST)

    def _begin(self, first: int, rows: Tensor) -> _Block:
        if self._background and rows.is_cuda:
            return self._on_a_stream(first, rows)
        if self._background:
            self._pool = self._pool or ThreadPoolExecutor(1, "order server")
            future = self._pool.submit(self._decide, first, rows)
            return _Block(_bytes(rows), future.result, future.result)
        signs = self._decide(first, rows)
        return _Block(0, lambda: None, lambda: signs)

    def _on_a_stream(self, first: int, rows: Tensor) -> _Block:
        self._stream = self._stream or torch.cuda.Stream(rows.device)
        self._stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(self._stream):
            signs = self._decide(first, rows)
        rows.record_stream(self._stream)
        done = self._stream.record_event()
        return _Block(_bytes(rows), done.synchronize, lambda: signs)


class _Block:
    """Rows being decided: their size in bytes, how to wait for them, and their signs."""

    def __init__(self, size: int, wait: Callable[[], object], result: Callable[[], Tensor]) -> None:
        self.size, self._wait, self.result = size, wait, result

    def wait(self) -> None:
        self._wait()


def in_background(wanted: str | bool, on_gpu: bool) -> bool:
    """auto: on a GPU; on a CPU when there is a core beside the one that trains."""
    return on_gpu or _cores() > 1 if wanted == "auto" else bool(wanted)


def _cores() -> int:
    """That this process may use: a job on a shared machine is often tied to some of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
