"""Which process owns which coordinates of a long vector, and the exchanges that follow from it."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from cdgrab.runtime.group import WorkerGroup

AT_ONCE = 2**18  # numbers that are on their way when coordinates move to other owners
PART = 2**14  # coordinates that a process gets at a time, if they are dealt


@dataclass(frozen=True)
class Division:
    """`pieces[rank]`: slices of the vector, in the order in which that process keeps them. Together they are all
    coordinates, each once."""

    group: WorkerGroup
    pieces: tuple[tuple[slice, ...], ...]

    @classmethod
    def even(cls, group: WorkerGroup, dim: int) -> Division:
        """Consecutive parts of (almost) equal length."""
        return cls._in_runs(group, dim, dim)

    @classmethod
    def dealt(cls, group: WorkerGroup, dim: int) -> Division:
        """In turn to all processes, so that every one has as much of any long slice."""
        return cls._in_runs(group, dim, PART * group.world_size)

    @classmethod
    def _in_runs(cls, group: WorkerGroup, dim: int, run: int) -> Division:
        """Of every run of so many coordinates, each process has a consecutive part of (almost) equal length."""
        pieces = [[] for _ in range(group.world_size)]
        for start in range(0, dim, run):
            widths = group.widths(min(run, dim - start))
            for own, end, width in zip(pieces, accumulate(widths), widths, strict=True):
                own.append(slice(start + end - width, start + end))
        return cls(group, tuple(map(tuple, pieces)))

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

    def owned(self, slices: Sequence[slice]) -> list[list[tuple[slice, slice]]]:
        """Of slices of the vector that lie one behind the other: what belongs to each process, where it lies there, and
        where its owner keeps it."""
        found, lies = [[] for _ in self.pieces], 0
        for wanted in slices:
            place = bisect_right(self._in_turn, wanted.start, key=lambda one: one[0].stop)
            while place < len(self._in_turn) and (piece := self._in_turn[place][0]).start < wanted.stop:
                _, rank, kept = self._in_turn[place]
                start = max(piece.start, wanted.start)
                size = min(piece.stop, wanted.stop) - start
                here, there = lies + start - wanted.start, kept + start - piece.start
                found[rank].append((slice(here, here + size), slice(there, there + size)))
                place += 1
            lies += _size(wanted)
        return found

    def moved(self, rows: Tensor, other: Division) -> Tensor:
        """rows [n, width], of which every process has its coordinates -> [n, other's width], divided as in `other`.
        Some coordinates go after others, straight to their new owners, so that little memory is needed besides."""
        rank, ranks, n = self.group.rank, range(self.group.world_size), len(rows)
        found = rows.new_empty(n, other.width)
        for some in self._rounds(other, max(1, AT_ONCE // n)):
            leaving = sorted((move for move in some if move.sender == rank), key=lambda move: move.receiver)
            arriving = sorted((move for move in some if move.receiver == rank), key=lambda move: move.sender)
            sent = torch.cat([rows[:, :0].flatten(), *(rows[:, move.leaves].flatten() for move in leaving)])
            sizes = [n * sum(move.size for move in leaving if move.receiver == to) for to in ranks]
            coming = [n * sum(move.size for move in arriving if move.sender == by) for by in ranks]
            arrived = self.group.exchange(sent, sizes, coming)
            for move, part in zip(arriving, arrived.split([n * move.size for move in arriving]), strict=True):
                found[:, move.arrives] = part.view(n, -1)
        return found

    def _rounds(self, other: Division, size: int) -> Iterator[list[Move]]:
        """All coordinates, at most `size` of them at a time, as pieces that each have one owner before and after."""
        before, after, some, room = deque(self._in_turn), deque(other._in_turn), [], size
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

    @cached_property
    def _in_turn(self) -> list[tuple[slice, int, int]]:
        """All pieces in the order of the vector: their owner, and where that keeps them."""
        each = [
            (piece, rank, end - _size(piece))
            for rank, own in enumerate(self.pieces)
            for piece, end in zip(own, accumulate(map(_size, own)), strict=True)
            if _size(piece)
        ]
        return sorted(each, key=lambda one: one[0].start)

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
