"""Pieces of a bucket, and what of them belongs to whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Part = tuple[slice, slice | None]  # where coordinates lie, in a piece or in what is received, and where they are kept


@dataclass(eq=False)
class Piece:
    """Consecutive coordinates of a bucket: where they are there, their slices of the whole gradient, how many each
    process gets, one behind the other, and where this process keeps its own; None: they are divided in another way."""

    inside: slice
    slices: list[slice]
    widths: list[int]
    place: slice | None = None

    def own(self, rank: int) -> tuple[int, int, int]:
        """What this process, of this rank, gets: where it starts in the bucket, how many coordinates there are, and
        where they are kept (0 if they are not)."""
        start = self.inside.start + sum(self.widths[:rank])
        return start, self.widths[rank], self.place.start if self.place else 0

    def chunks(self, rank: int, size: int) -> Iterator[Part]:
        """The same, at most so many coordinates at a time."""
        start, width, kept = self.own(rank)
        for first in range(0, width, size):
            end = min(first + size, width)
            yield slice(start + first, start + end), self.place and slice(kept + first, kept + end)


def deal(slices: Sequence[slice], widths: Sequence[int]) -> list[list[slice]]:
    """The slices, one behind the other, dealt to processes: the first widths[0] coordinates to the first, and so on."""
    remaining, dealt = list(slices), []
    for width in widths:
        dealt.append([])
        while width:
            part = remaining.pop(0)
            end = min(part.start + width, part.stop)
            dealt[-1].append(slice(part.start, end))
            width -= end - part.start
            if end < part.stop:
                remaining.insert(0, slice(end, part.stop))
    return dealt


def by_owner(buffer: Tensor, owned: list[list[Part]]) -> tuple[Tensor, list[int]]:
    """A copy: what belongs to the first process, then what belongs to the second, …; and how much belongs to each."""
    whole = torch.cat([buffer[lies] for parts in owned for lies, _ in parts])
    return whole, [sum(map(_size, parts)) for parts in owned]


def put_back(buffer: Tensor, owned: list[list[Part]], found: Tensor) -> None:
    """Undo `by_owner`."""
    every = [part for parts in owned for part in parts]
    torch._foreach_copy_([buffer[lies] for lies, _ in every], list(found.split(list(map(_size, every)))))


def joined(parts: list[Part]) -> list[Part]:
    """The parts as their owner receives them, nothing between them. Those that it keeps side by side become one."""
    found: list[Part] = []
    for part in parts:
        start, place = found[-1][0].stop if found else 0, part[1]
        if found and found[-1][1].stop == place.start:
            before, kept = found.pop()
            found.append((slice(before.start, start + _size(part)), slice(kept.start, place.stop)))
        else:
            found.append((slice(start, start + _size(part)), place))
    return found


def clipped(parts: list[Part], start: int, end: int) -> list[Part]:
    """What lies between start and end, counted from start."""
    found: list[Part] = []
    for lies, place in parts:
        first, last = max(lies.start, start), min(lies.stop, end)
        if first < last:
            kept = place and slice(place.start + first - lies.start, place.start + last - lies.start)
            found.append((slice(first - start, last - start), kept))
    return found


def _size(part: Part) -> int:
    return part[0].stop - part[0].start
