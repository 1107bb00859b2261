"""A vector of every process that is exchanged by coordinates, by collectives: first everybody gets its own coordinates
of all vectors, and later, when these have become one result, everybody gets the results of the others.

On a GPU they only queue there. On a CPU this is for processes that `pipes` cannot connect.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from cdgrab.runtime.group import WorkerGroup


class Exchange:
    """vector [dim]: overwritten by the results, this process's own part of which is written by the caller before
    `spread`. widths: how many coordinates belong to each process."""

    def __init__(self, group: WorkerGroup, vector: Tensor, widths: list[int]) -> None:
        self._group, self._vector, self._widths = group, vector, widths
        own = [widths[group.rank]] * group.world_size
        self._rows = vector.new_empty(group.world_size, own[0])  # of the stream in which it is used
        with group.traffic.collective("all-to-all"):
            flat = self._rows.view(-1)
            self._work = dist.all_to_all_single(flat, vector, own, widths, group=group.channel, async_op=True)
        group.traffic.sent += vector.nbytes - self._rows[0].nbytes

    def rows(self) -> Tensor:
        """[processes, width], once they have arrived; on a GPU its stream waits for them."""
        with self._group.traffic.collective("all-to-all"):
            self._work.wait()
        return self._rows

    def spread(self) -> None:
        """Send this process's part of the result, and get those of the others."""
        own = self._vector.split(self._widths)[self._group.rank]
        self._vector.copy_(self._group.unshard(own, len(self._vector), self._widths))


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
