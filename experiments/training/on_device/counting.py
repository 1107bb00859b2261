"""How many coordinates reach some values, and which are the largest, for many groups of coordinates at once.

A group is a stretch of flattened numbers in float32. Their magnitudes are what counts: these have the order of their
bits. On a GPU nothing is sorted and nothing is asked: a value is found by counting, ten of its bits at a time.
The first ones are looked for from a little below a value that is said to be near, since few magnitudes are above that.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

WIDE = 10  # bits of a digit
HALF = 1 << 3 * WIDE  # of the bits that are not a sign, the highest
BELOW = 3  # values are tried from so many eighths of a factor of two below one that is said to be near
HIGHEST = 0x7F8  # leading bits of what is infinite
PIECE = 4096  # coordinates of which one program counts those that are chosen


class Groups:
    """numbers [..., dim]; starts, ends [groups]: where each group begins and ends in all of them, within a row."""

    def __init__(self, numbers: Tensor, starts: Tensor, ends: Tensor) -> None:
        self._numbers, self._starts, self._ends = numbers.flatten(), starts, ends
        self._dim = numbers.shape[-1]

    def reaching(self, values: Tensor, idle: Tensor | None = None) -> Tensor:
        """How many coordinates of each group reach each of its values [groups, values], which rise; of `idle` groups,
        none."""
        if self._numbers.is_cuda:
            return _kernels().count(self._numbers, self._starts, self._ends, self._dim, values, idle)
        counts = torch.zeros(values.shape, dtype=torch.long)
        for group, some in self._busy(idle):
            counts[group] = len(some) - torch.searchsorted(some, values[group])
        return counts

    def largest(self, wanted: Tensor, idle: Tensor | None = None, near: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of each group the `wanted` largest are those above a value and, of those equal to it, those up to a place in
        the row: values, places [groups]; see `among`. Of `idle` groups these are all coordinates, if any are
        wanted. near: guesses of these values; bad ones only cost time."""
        bits, known = self._leading(near, wanted, idle)
        half = torch.full_like(bits, HALF).view(torch.float32)[:, None]
        bits += (self.reaching(half, known) >= wanted[:, None])[:, 0] * HALF
        bits, _, _ = self._following(bits, 2 * WIDE, wanted, known)
        for shift in (WIDE, 0):
            bits, reached, above = self._following(bits, shift, wanted, idle)
        values, fits = bits.view(torch.float32), reached == wanted
        fits, left = fits if idle is None else fits | idle, torch.zeros_like(bits)
        for shift in range((self._dim.bit_length() - 1) // WIDE * WIDE, -1, -WIDE):
            left, _, _ = self._following(left, shift, wanted - above, fits, values)
        return values, self._dim - 1 - left + self._starts % self._dim

    def _leading(self, near: Tensor | None, wanted: Tensor, idle: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The leading bits of values that `wanted` coordinates reach, zero where the values `near` were too far
        off; and where nothing is to be looked for any more."""
        if near is None:
            return torch.zeros_like(wanted, dtype=torch.int32), idle
        lowest = ((near.view(torch.int32) >> 2 * WIDE).clamp(max=HIGHEST) - BELOW).clamp(min=0) << 2 * WIDE
        reached = self._spread(lowest, 2 * WIDE, idle, None) >= wanted[:, None]
        found = reached[:, 0] & ~reached[:, -1]
        bits = (lowest + ((reached.sum(1) - 1) << 2 * WIDE).int()).masked_fill(~found, 0)
        return bits, found if idle is None else found | idle

    def _following(
        self, found: Tensor, shift: int, wanted: Tensor, idle: Tensor | None, values: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What was `found`, with the largest digit at this place that at least `wanted` keys of each group reach; how
        many do, and how many reach the next one. Keys: see `_spread`."""
        reached = self._spread(found, shift, idle, values)
        digit = (reached[:, 1:-1] >= wanted[:, None]).sum(1, keepdim=True)
        return found + (digit[:, 0] << shift).int(), *(reached.gather(1, digit + more)[:, 0] for more in (0, 1))

    def _spread(self, found: Tensor, shift: int, idle: Tensor | None, values: Tensor | None) -> Tensor:
        """How many keys of each group reach `found` with each digit at this place, and how many are beyond all of them:
        [groups, digits + 1]. Keys are the bits of the magnitudes; or, of the coordinates equal to the group's value,
        how far they are from the end of a row that begins with the group."""
        if self._numbers.is_cuda:
            where = self._starts, self._ends, self._dim
            return _kernels().spread(self._numbers, *where, found, shift, 1 << WIDE, idle, values)
        tried = found.long()[:, None] + (torch.arange((1 << WIDE) + 1) << shift)
        counts = torch.zeros(tried.shape, dtype=torch.long)
        for group, some in self._busy(idle):
            keys = some.view(torch.int32)
            if values is not None:
                magnitudes = self._numbers[self._starts[group] : self._ends[group]].abs()
                keys = self._dim - 1 - (magnitudes == values[group]).nonzero()[:, 0].flip(0)
            counts[group] = len(keys) - torch.searchsorted(keys.long(), tried[group])
        return counts

    def _busy(self, idle: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        return (each for each in enumerate(self._sorted) if idle is None or not idle[each[0]])

    @cached_property
    def _sorted(self) -> list[Tensor]:
        stretches = zip(self._starts.tolist(), self._ends.tolist(), strict=True)
        return [self._numbers[start:end].abs().sort().values for start, end in stretches]


def counts_between(chosen: Tensor, cuts: Tensor) -> Tensor:
    """How many are chosen between neighbouring cuts: [runs, dim], [runs, cuts] -> [runs, cuts - 1]."""
    if chosen.is_cuda:
        return _kernels().counts_between(chosen, cuts)
    return pad(chosen.cumsum(1), (1, 0)).gather(1, cuts).diff(dim=1)


def how_many(chosen: Tensor) -> Tensor:
    """Of each run [runs, dim] are chosen; in pieces, which many programs of a GPU count."""
    cuts = torch.arange(0, chosen.shape[1] + PIECE, PIECE, device=chosen.device).clamp(max=chosen.shape[1])
    return counts_between(chosen, cuts.expand(len(chosen), -1)).sum(1)


def among(magnitudes: Tensor, values: Tensor, places: Tensor) -> Tensor:
    """Which of the magnitudes [..., dim] are among the largest of their groups, whose values and places these are."""
    before = torch.arange(magnitudes.shape[-1], device=magnitudes.device) <= places
    return (magnitudes > values) | ((magnitudes == values) & before)


def _kernels() -> ModuleType:
    from experiments.training.on_device import counting_kernels  # needs Triton

    return counting_kernels
