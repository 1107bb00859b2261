"""A vector of every process that is exchanged by coordinates, without waiting: first everybody gets its own coordinates
of all vectors, and later, when these have become one result, everybody gets the results of the others.

On a CPU each process writes to each other one directly. Gloo's collectives do the same through a thread of their own,
copy what a process sends to itself, and want a result once for each receiver. Messages find each other by lane, so
that processes need not begin several exchanges in the same order. On a GPU there are only collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


class Messages(Exchange):
    """The same on a CPU."""

    def begin(self) -> None:
        group, parts = self._group, self._vector.split(self._widths)
        gloo = cpu_backend(group.channel)
        if gloo is None:
            raise CdgrabError("gradients on a CPU need gloo")
        self._gloo, self._parts, first, second = gloo, parts, 2 * self._lane, 2 * self._lane + 1
        with group.traffic.collective("all-to-all"):
            self._arriving = self._receive(self._rows.unbind(), first)
            self._sending = self._send(parts, first)
            # A result takes the place of what was sent: whoever computed it has received that. Who is told early where
            # it goes needs to be told nothing later.
            self._results = self._receive(parts, second)
        self._rows[group.rank] = parts[group.rank]
        group.traffic.sent += self._vector.nbytes - self._rows[0].nbytes

    def wait_for_rows(self) -> None:
        self._wait("all-to-all", self._arriving)

    def spread(self) -> None:
        group, own = self._group, self._parts[self._group.rank]
        with group.traffic.collective("exchange"):
            self._sending += self._send([own] * group.world_size, 2 * self._lane + 1)
        group.traffic.sent += own.nbytes * (group.world_size - 1)

    def wait(self) -> None:
        self._wait("exchange", [*self._results, *self._sending])

    def _others(self) -> Iterable[int]:
        """Beginning with the next one, so that not all write to the same one first."""
        group = self._group
        return ((group.rank + i) % group.world_size for i in range(1, group.world_size))

    def _send(self, parts: Sequence[Tensor], tag: int) -> list[dist.Work]:
        return [self._gloo.send([parts[rank]], rank, tag) for rank in self._others() if len(parts[rank])]

    def _receive(self, parts: Sequence[Tensor], tag: int) -> list[dist.Work]:
        return [self._gloo.recv([parts[rank]], rank, tag) for rank in self._others() if len(parts[rank])]


def begin_exchange(group: WorkerGroup, vector: Tensor, widths: list[int], rows: Tensor, lane: int) -> Exchange:
    exchange = (Exchange if vector.is_cuda else Messages)(group, vector, widths, rows, lane)
    exchange.begin()
    return exchange
