"""DDP's buckets in memory that all processes of a host can read and write.

Each process computes the mean of its own coordinates straight from everybody's bucket, and writes it to everybody's:
nothing is sent but notices, and nothing is received that would need room.

DDP keeps a bucket's memory from step to step, so this memory itself becomes shared memory, between two steps. All
processes decide together whether it does: no bucket ever goes one way here and another way there. The memory has no
name, and is gone with the last process or model that uses it, however that ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from cdgrab.runtime.group import WorkerGroup
from cdgrab.runtime.links import DONE, READY, Links, Notice, agreed

MEMORY = "/dev/shm"
FREE = 0.5  # of that memory, and of the files that may be open, stays free for others, such as loader processes
SETTLED = 1  # steps without a change before buckets are shared: DDP may rebuild them, of the same parameters, in one
PATIENT = 100  # steps after which buckets that cannot be shared yet are left where they are


class SharedBucket:
    """rows: the memory of all processes, by rank."""

    def __init__(self, number: int, rows: list[Tensor], group: WorkerGroup, links: Links) -> None:
        self._number, self.rows, self._group, self._links = number, rows, group, links
        self._steps = 0
        self.moved = False  # since it is shared, DDP has put this bucket elsewhere, on one process at least

    def average(self, buffer: Tensor, compute: Callable[[], None]) -> Iterator[bool]:
        """compute: writes the mean of this process's coordinates to all rows. Stops where there is something to wait
        for. A buffer that is elsewhere is copied there and back: whatever happens on one process, all exchange in the
        same way."""
        mine, elsewhere = self.rows[self._group.rank], not self._lies_in(buffer)
        self._steps += 1
        ready, done = (Notice(kind, self._number, self._steps) for kind in (READY, DONE))
        if elsewhere:
            mine.copy_(buffer)
        with self._collective():
            self._links.tell(ready, mark=elsewhere)
        yield True
        with self._collective():
            self.moved = self._links.wait(ready) or elsewhere
        compute()
        with self._collective():
            self._links.tell(done)
        yield True
        with self._collective():
            self._links.wait(done)
        if elsewhere:
            buffer.copy_(mine)

    def _lies_in(self, buffer: Tensor) -> bool:
        return buffer.data_ptr() == self.rows[self._group.rank].data_ptr()

    def _collective(self) -> AbstractContextManager:
        return self._group.traffic.collective("exchange in shared memory")


class Sharing:
    """The buckets of a model, from the step on in which they are shared. All processes call all of this together, so
    that each finds the same."""

    def __init__(self, group: WorkerGroup, links: Links) -> None:
        self._group, self._links, self.close = group, links, links.close
        self._buffers: list[Tensor] = []  # of this step
        self._shared: list[SharedBucket] = []
        self._same = 0  # steps since buckets changed
        self._waited = 0  # steps in which they were not shared
        self._ready = False  # they may be shared now

    def begin(self) -> None:
        """A step begins."""
        self._buffers, self._same = [], self._same + 1

    def forget(self) -> None:
        """Buckets have changed."""
        self._shared, self._same = [], 0

    def bucket(self, index: int, buffer: Tensor) -> SharedBucket | None:
        """DDP hands over this bucket."""
        self._buffers.append(buffer)
        return self._shared[index] if self._shared else None

    def after_step(self, divided: bool) -> bool:
        """The step is complete. Returns whether it is time to `settle`. divided: coordinates are as buckets want it."""
        if any(bucket.moved for bucket in self._shared):
            self.forget()
        self._ready = divided and self._same >= SETTLED
        self._waited += not self._shared
        due = not self._shared and (self._ready or self._waited >= PATIENT)
        self._buffers = self._buffers if due else []  # whose memory DDP may give up
        return due

    def settle(self) -> bool:
        """Returns whether buckets are shared from now on; if not, they never are."""
        buffers, self._buffers = self._buffers, []
        if self._ready:
            self._shared = self._tried(buffers)
        if not self._shared:
            self.close()
        return bool(self._shared)

    def _tried(self, buffers: list[Tensor]) -> list[SharedBucket]:
        try:
            found = share(buffers, self._group, self._links)
        except BaseException:  # amid an exchange of descriptors: nobody may take one for another
            self.close()
            raise
        self._waited = 0
        return found or []


def share(buffers: Sequence[Tensor], group: WorkerGroup, links: Links) -> list[SharedBucket] | None:
    """All processes call this together, between two steps. What is in the buffers is lost: DDP has copied it. None, on
    all of them, if memory of one cannot be shared."""
    size = sum(buffer.nbytes for buffer in buffers) * group.world_size
    if not agreed(group, _has_room(size) and _may_open(len(buffers) + group.world_size)):
        return None
    found: list[list[Tensor]] = []
    with group.traffic.collective("shared memory"):
        for buffer in buffers:  # when one has failed, the others are still told that nothing comes
            possible = len(found[-1]) == group.world_size if found else True
            _give_back_pages(buffer)
            found.append(_with_others(buffer, possible, group, links))
    if not agreed(group, all(len(rows) == group.world_size for rows in found)):
        return None
    return [SharedBucket(number, rows, group, links) for number, rows in enumerate(found)]


def _has_room(size: int) -> bool:
    """For so many bytes. The system would find out only when they are written to, and end the process."""
    try:
        there = os.statvfs(MEMORY)
    except OSError:
        return False
    return there.f_bavail * there.f_frsize - size >= FREE * there.f_blocks * there.f_frsize


def _may_open(files: int) -> bool:
    """So many more. Every shared bucket has an open file."""
    from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit  # not on every system

    limit = getrlimit(RLIMIT_NOFILE)[0]
    return limit == RLIM_INFINITY or len(os.listdir("/proc/self/fd")) + files <= (1 - FREE) * limit


def _with_others(buffer: Tensor, possible: bool, group: WorkerGroup, links: Links) -> list[Tensor]:
    """Everybody's memory, by rank; fewer if something is missing."""
    if not buffer.nbytes:  # of parameters without coordinates
        return [buffer] * group.world_size
    numbers = links.swap(_placed(buffer) if possible else None)
    try:
        rows = {group.rank: buffer}
        for rank, number in numbers.items():
            if number is not None and os.fstat(number).st_size == buffer.nbytes:
                there = f"/proc/self/fd/{number}"
                rows[rank] = torch.from_file(there, shared=True, size=len(buffer), dtype=buffer.dtype)
    except (OSError, RuntimeError):  # no room for one more
        rows = {}
    finally:
        for number in numbers.values():
            if number is not None:
                os.close(number)
    return [rows[rank] for rank in sorted(rows)]


def _give_back_pages(buffer: Tensor) -> None:
    """What is there becomes zero, and takes no memory: while it moves, there would be twice as much."""
    start, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
    start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _placed(buffer: Tensor) -> int | None:
    """The descriptor of its memory, which has become shared memory: all tensors that lie there, DDP's own among them,
    have moved along."""
    storage = buffer.untyped_storage()
    if storage.nbytes() != buffer.nbytes:
        return None
    try:
        return storage._share_fd_cpu_()[0]
    except (OSError, RuntimeError):  # too many open files
        return None
