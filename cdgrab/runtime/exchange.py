"""A vector of every process that is exchanged by coordinates, without waiting: first everybody gets its own coordinates
of all vectors, and later, when these have become one result, everybody gets the results of the others.

On a CPU each process writes to each other one directly. Gloo's collectives do the same through a thread of their own,
copy what a process sends to itself, and want a result once for each receiver. Messages find each other by lane, so
that processes need not begin several exchanges in the same order. On a GPU there are only collectives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from cdgrab.errors import CdgrabError
from cdgrab.runtime.group import WorkerGroup, cpu_backend


class Exchange:
    """vector [dim]: overwritten by the results, this process's own part of which is written by the caller before
    `spread`. rows [processes, width]: what arrives first. lane: exchanges that are under way at once have different
    ones."""

    def __init__(self, group: WorkerGroup, vector: Tensor, widths: list[int], rows: Tensor, lane: int) -> None:
        self._group, self._vector, self._widths, self._rows, self._lane = group, vector, widths, rows, lane

    def begin(self) -> None:
        """Send the vector."""
        group, own = self._group, [self._rows.shape[1]] * self._group.world_size
        with group.traffic.collective("all-to-all"):
            flat = self._rows.view(-1)
            self._work = dist.all_to_all_single(
                flat, self._vector, own, self._widths, group=group.channel, async_op=True
            )
        group.traffic.sent += self._vector.nbytes - self._rows[0].nbytes

    def wait_for_rows(self) -> None:
        """All processes' coordinates have arrived; on a GPU its stream waits for them."""
        self._wait("all-to-all", [self._work])

    def spread(self) -> None:
        """Send this process's part of the result."""
        own = self._vector.split(self._widths)[self._group.rank]
        self._vector.copy_(self._group.unshard(own, len(self._vector), self._widths))

    def wait(self) -> None:
        """The whole result has arrived."""

    def _wait(self, name: str, works: list[dist.Work]) -> None:
        with self._group.traffic.collective(name):
            for work in works:
                work.wait()


class Gathered(Exchange):
    """For a short vector: rows [processes, dim] get everybody's, and everybody computes the result."""

    def begin(self) -> None:
        self._rows.copy_(self._group.gather(self._vector[None]))

    def wait_for_rows(self) -> None:
        """From now on the vector may be overwritten."""


class Messages(Exchange):
    """`Exchange` on a CPU."""

    def begin(self) -> None:
        group, parts = self._group, self._vector.split(self._widths)
        self._post, self._parts = _Post(group), parts
        with group.traffic.collective("all-to-all"):
            self._arriving = self._post.receive(self._rows.unbind(), 2 * self._lane)
            self._sending = self._post.send(parts, 2 * self._lane)
            # A result takes the place of what was sent: whoever computed it has received that. Who is told early where
            # it goes needs to be told nothing later.
            self._results = self._post.receive(parts, 2 * self._lane + 1)
        self._rows[group.rank] = parts[group.rank]
        group.traffic.sent += self._vector.nbytes - self._rows[0].nbytes

    def wait_for_rows(self) -> None:
        self._wait("all-to-all", self._arriving)

    def spread(self) -> None:
        group, own = self._group, self._parts[self._group.rank]
        with group.traffic.collective("exchange"):
            self._sending += self._post.send([own] * group.world_size, 2 * self._lane + 1)
        group.traffic.sent += own.nbytes * (group.world_size - 1)

    def wait(self) -> None:
        self._wait("exchange", [*self._results, *self._sending])


class Copies(Gathered):
    """`Gathered` on a CPU. Processes may begin it at different times, amid other exchanges: who waited for the others
    would keep them from what they are waiting for."""

    def begin(self) -> None:
        group, post, rows = self._group, _Post(self._group), self._rows
        with group.traffic.collective("all-gather"):
            self._works = post.receive(rows.unbind(), 2 * self._lane)
            self._works += post.send([self._vector] * group.world_size, 2 * self._lane)
        rows[group.rank] = self._vector
        group.traffic.sent += self._vector.nbytes * (group.world_size - 1)

    def wait_for_rows(self) -> None:
        self._wait("all-gather", self._works)


class _Post:
    """Messages to and from all other processes, none of which waits."""

    def __init__(self, group: WorkerGroup) -> None:
        # beginning with the next one, so that not all write to the same one first
        self._others = [(group.rank + i) % group.world_size for i in range(1, group.world_size)]
        self._gloo = cpu_backend(group.channel) if self._others else None
        if self._others and self._gloo is None:
            raise CdgrabError("gradients on a CPU need gloo")

    def send(self, parts: Sequence[Tensor], tag: int) -> list[dist.Work]:
        return [self._gloo.send([parts[rank]], rank, tag) for rank in self._others if len(parts[rank])]

    def receive(self, parts: Sequence[Tensor], tag: int) -> list[dist.Work]:
        return [self._gloo.recv([parts[rank]], rank, tag) for rank in self._others if len(parts[rank])]


def begin_exchange(group: WorkerGroup, vector: Tensor, widths: list[int], rows: Tensor, lane: int) -> Exchange:
    exchange = (Exchange if vector.is_cuda else Messages)(group, vector, widths, rows, lane)
    exchange.begin()
    return exchange


def begin_copies(group: WorkerGroup, vector: Tensor, rows: Tensor, lane: int) -> Exchange:
    """rows [processes, dim] get everybody's vector, which is too short to be divided."""
    exchange = (Gathered if vector.is_cuda else Copies)(group, vector, [], rows, lane)
    exchange.begin()
    return exchange


def traffic_of(group: WorkerGroup, widths: list[int], size: int) -> int:
    """The bytes that this process sends in such an exchange, of numbers of this size."""
    dim, others = sum(widths), group.world_size - 1
    numbers = dim + widths[group.rank] * (others - 1) if group.divides(dim) else dim * others
    return numbers * size
