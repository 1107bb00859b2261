"""Which process owns which coordinates of a long vector, and the exchanges that follow from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from cdgrab.runtime.group import WorkerGroup

AT_ONCE = 2**20  # numbers that are on their way when coordinates move to other owners


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

    def moved(self, rows: Tensor, other: Division, into: Tensor) -> Tensor:
        """Adds rows [n, width], of which every process has its coordinates, `into` [n, other's width], where they are
        divided as in `other`. Some coordinates go after others, straight to their new owners, so that little memory is
        needed besides."""
        rank, ranks, n = self.group.rank, range(self.group.world_size), len(rows)
        for some in self._rounds(other, max(1, AT_ONCE // n)):
            leaving = sorted((move for move in some if move.sender == rank), key=lambda move: move.receiver)
            arriving = sorted((move for move in some if move.receiver == rank), key=lambda move: move.sender)
            sent = torch.cat([rows[:, :0].flatten(), *(rows[:, move.leaves].flatten() for move in leaving)])
            sizes = [n * sum(move.size for move in leaving if move.receiver == to) for to in ranks]
            coming = [n * sum(move.size for move in arriving if move.sender == by) for by in ranks]
            found = self.group.exchange(sent, sizes, coming)
            for move, part in zip(arriving, found.split([n * move.size for move in arriving]), strict=True):
                into[:, move.arrives] += part.view(n, -1)
        return into

    def _rounds(self, other: Division, size: int) -> Iterator[list[Move]]:
        """All coordinates, at most `size` of them at a time, as pieces that each have one owner before and after."""
        before, after, some, room = self._owned(), other._owned(), [], size
        start, dim = 0, sum(self.widths)
        while start < dim:
            (old, sender, leaves), (new, receiver, arrives) = before[0], after[0]
            end = min(old.stop, new.stop, start + room)
            some.append(Move(sender, receiver, leaves + start - old.start, arrives + start - new.start, end - start))
            room -= end - start
            for pieces in (before, after):
                if pieces[0][0].stop == end:
                    pieces.popleft()
            if not room or end == dim:
                yield some
                some, room = [], size
            start = end

    def _owned(self) -> deque[tuple[slice, int, int]]:
        """All pieces in the order of the vector: their owner, and where that keeps them."""
        each = [
            (piece, rank, end - _size(piece))
            for rank, own in enumerate(self.pieces)
            for piece, end in zip(own, accumulate(map(_size, own)), strict=True)
            if _size(piece)
        ]
        return deque(sorted(each, key=lambda one: one[0].start))

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


@dataclass(frozen=True)
class Move:
    """Coordinates that go from one process to another, or stay, and where each of the two keeps them."""

    sender: int
    receiver: int
    sender_at: int
    receiver_at: int
    size: int

    @property
    def leaves(self) -> slice:
        return slice(self.sender_at, self.sender_at + self.size)

    @property
    def arrives(self) -> slice:
        return slice(self.receiver_at, self.receiver_at + self.size)


def _size(piece: slice) -> int:
    return piece.stop - piece.start
