"""Which process owns which coordinates of a long vector, and the exchanges that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from cdgrab.runtime.group import WorkerGroup


@dataclass(frozen=True)
class Division:
    """`pieces[rank]`: slices of the vector, in the order in which that process keeps them. Together they are all
    coordinates, each once."""

    group: WorkerGroup
    pieces: tuple[tuple[slice, ...], ...]

    @classmethod
    def even(cls, group: WorkerGroup, dim: int) -> Division:
        """Consecutive parts of (almost) equal length."""
        widths = group.widths(dim)
        return cls(group, tuple((slice(sum(widths[:rank]), sum(widths[: rank + 1])),) for rank in range(len(widths))))

    @cached_property
    def widths(self) -> list[int]:
        """How many coordinates each process owns."""
        return [sum(map(_size, own)) for own in self.pieces]

    @property
    def width(self) -> int:
        """How many coordinates this process owns."""
        return self.widths[self.group.rank]

    def sizes(self) -> list[int]:
        """How many coordinates there are in each of this process's pieces."""
        return list(map(_size, self.pieces[self.group.rank]))

    def own(self, whole: Tensor) -> Tensor:
        """[..., dim] -> [..., width]: a copy of this process's coordinates."""
        return torch.cat([whole[..., :0], *(whole[..., piece] for piece in self.pieces[self.group.rank])], dim=-1)

    def shard(self, rows: Tensor) -> Tensor:
        """rows [..., dim] of every process -> [processes, ..., width]: this process's coordinates of all rows."""
        if not self._consecutive:
            rows = torch.cat([rows[..., piece] for piece in self._all], dim=-1)
        return self.group.shard(rows, self.widths)

    def unshard(self, mine: Tensor) -> Tensor:
        """[width] of every process -> [dim], on every process."""
        return self._in_order(self.group.unshard(mine, sum(self.widths), self.widths))

    def unshard_rows(self, rows: Tensor) -> Tensor:
        """Undo `shard` for one row per worker: [workers, width] -> the local workers' rows, [local, dim]."""
        return self._in_order(self.group.unshard_rows(rows, self.widths))

    def _in_order(self, by_owner: Tensor) -> Tensor:
        """[..., dim], the coordinates of the first process first, then those of the second, … -> in their own order."""
        if self._consecutive:
            return by_owner
        whole = torch.empty_like(by_owner)
        for piece, part in zip(self._all, by_owner.split(list(map(_size, self._all)), dim=-1), strict=True):
            whole[..., piece] = part
        return whole

    @cached_property
    def _all(self) -> list[slice]:
        return [piece for own in self.pieces for piece in own]

    @cached_property
    def _consecutive(self) -> bool:
        return all(one.stop == other.start for one, other in pairwise(self._all))


def _size(piece: slice) -> int:
    return piece.stop - piece.start
