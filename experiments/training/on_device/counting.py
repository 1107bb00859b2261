"""How many coordinates reach some values, and which are the largest, for many groups of coordinates at once.

A group is a stretch of the flattened magnitudes, which are float32: not negative, they have the order of their bits.
On a GPU nothing is sorted and nothing is asked: a value is looked for four bits at a time, by counting.
"""

from __future__ import annotations

from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

BITS, DIGIT = 31, 4
PIECE = 4096  # coordinates of which one program counts those that are chosen


class Groups:
    """magnitudes [..., dim]; starts, ends [groups]: where each group begins and ends in all of them, within a row."""

    def __init__(self, magnitudes: Tensor, starts: Tensor, ends: Tensor) -> None:
        self._magnitudes, self._starts, self._ends = magnitudes.flatten(), starts, ends
        self._dim = magnitudes.shape[-1]

    def reaching(self, values: Tensor, idle: Tensor | None = None) -> Tensor:
        """How many coordinates of each group reach each of its values [groups, values]; of `idle` groups, none."""
        return self._count(values, idle)

    def largest(self, wanted: Tensor, idle: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of each group the `wanted` largest are those above a value and, of those equal to it, those up to a place in
        the row: values, places [groups]; see `among`. Of `idle` groups these are all coordinates."""
        bits = torch.zeros_like(wanted, dtype=torch.int32)
        for shift in range(BITS // DIGIT * DIGIT, -1, -DIGIT):
            tried = _digits(bits, shift, min(DIGIT, BITS - shift))
            bits += (self.reaching(tried.view(torch.float32), idle) >= wanted[:, None]).sum(1).int() << shift
        values = bits.view(torch.float32)
        reached, above = self.reaching(torch.stack([bits, bits + 1], dim=1).view(torch.float32), idle).unbind(1)
        fits = reached == wanted
        places = self._places(values, wanted - above, fits if idle is None else fits | idle)
        return values, places + self._starts % self._dim

    def _places(self, values: Tensor, room: Tensor, idle: Tensor) -> Tensor:
        """Where in each group is the coordinate that, of those equal to the value, is the last for which there is room?
        Of `idle` groups: after the last one."""
        places, length = torch.zeros_like(room), self._dim.bit_length()
        for shift in range((length - 1) // DIGIT * DIGIT, -1, -DIGIT):
            tried = _digits(places, shift, DIGIT)
            places += (self._count(values[:, None], idle, tried) < room[:, None]).sum(1) << shift
        return places

    def _count(self, values: Tensor, idle: Tensor | None, places: Tensor | None = None) -> Tensor:
        """places: of the coordinates before each of these [groups, places], those equal to the group's value."""
        if self._magnitudes.is_cuda:
            return _kernels().count(self._magnitudes, self._starts, self._ends, self._dim, values, idle, places)
        counts = torch.zeros((values if places is None else places).shape, dtype=torch.long)
        for group, some in enumerate(self._sorted):
            if idle is not None and idle[group]:
                continue
            if places is None:
                counts[group] = len(some) - torch.searchsorted(some, values[group])
            else:
                equal = self._magnitudes[self._starts[group] : self._ends[group]] == values[group]
                counts[group] = torch.searchsorted(equal.nonzero()[:, 0], places[group])
        return counts

    @cached_property
    def _sorted(self) -> list[Tensor]:
        stretches = zip(self._starts.tolist(), self._ends.tolist(), strict=True)
        return [self._magnitudes[start:end].sort().values for start, end in stretches]


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


def _digits(found: Tensor, shift: int, bits: int) -> Tensor:
    """What was found so far, with all digits but zero at the next place: [groups, digits]."""
    return found[:, None] + (torch.arange(1, 1 << bits, dtype=found.dtype, device=found.device) << shift)


def _kernels() -> ModuleType:
    from experiments.training.on_device import counting_kernels  # needs Triton

    return counting_kernels
