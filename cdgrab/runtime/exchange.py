"""A vector of every process that is exchanged by coordinates, by collectives: first everybody gets its own coordinates
of all vectors, and later, when these have become one result, everybody gets the results of the others.

On a GPU they only queue there. On a CPU this is for processes that `pipes` cannot connect.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from cdgrab.runtime.group import WorkerGroup


class Exchange:
    """vector [dim]: overwritten by the results, this process's own part of which is written by the caller before
    `spread`. widths: how many coordinates belong to each process."""

    def __init__(self, group: WorkerGroup, vector: Tensor, widths: list[int]) -> None:
        self._group, self._vector, self._widths = group, vector, widths
        count, width = group.world_size, widths[group.rank]
        self._room = vector.new_empty(count, max(widths))  # of the stream in which it is used
        self._rows = self._room.view(-1)[: count * width].view(count, width)
        self._own, self._parts = [width] * count, vector.split(widths)
        with group.traffic.collective("all-to-all"):
            flat = self._rows.view(-1)
            self._work = dist.all_to_all_single(flat, vector, self._own, widths, group=group.channel, async_op=True)
        group.traffic.sent += vector.nbytes - self._rows[0].nbytes

    def rows(self) -> Tensor:
        """[processes, width], once they have arrived; on a GPU its stream waits for them."""
        with self._group.traffic.collective("all-to-all"):
            self._work.wait()
        return self._rows

    def spread(self) -> None:
        """Send this process's part of the result, and get those of the others. The rows are overwritten."""
        self.gather() if self._vector.is_cuda else self.in_one_round()

    def in_one_round(self) -> None:
        """From everybody to everybody, as `WorkerGroup.unshard` does on a CPU."""
        self._rows.copy_(self._parts[self._group.rank])
        self._group.exchange(self._rows.view(-1), self._own, self._widths, out=self._vector)

    def gather(self) -> None:
        """In place: in the vector, if all parts are of equal length, otherwise in the room, where they are padded."""
        longest = max(self._widths)
        if min(self._widths) == longest:
            return self._group.gather_in_place(self._vector.view(-1, longest))
        own = self._parts[self._group.rank]
        self._room[self._group.rank, : len(own)] = own
        self._group.gather_in_place(self._room)
        parts = [row[:width] for row, width in zip(self._room, self._widths, strict=True)]
        torch._foreach_copy_(list(self._parts), parts)


def gathered(group: WorkerGroup, vector: Tensor) -> Tensor:
    """For a short vector: everybody's, [processes, dim]. Everybody computes the result, which may take the place of the
    vector."""
    rows = group.gather(vector[None])
    return rows if group.world_size > 1 else rows.clone()


def traffic_of(group: WorkerGroup, widths: list[int], size: int) -> int:
    """The bytes that this process sends in such an exchange, of numbers of this size."""
    dim, others = sum(widths), group.world_size - 1
    numbers = dim + widths[group.rank] * (others - 1) if group.divides(dim) else dim * others
    return numbers * size
