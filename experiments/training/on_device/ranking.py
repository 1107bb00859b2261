"""The largest magnitudes of many groups of coordinates, by one sort of them all.

A key is a group's number and, below it, the bits of a magnitude, of which the largest comes first: float32 numbers that
are not negative have the order of their bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 31
LARGEST = (1 << BITS) - 1


def keys_of(groups: Tensor, magnitudes: Tensor) -> Tensor:
    return (groups << BITS) | (LARGEST - magnitudes.view(torch.int32).long())


class Ranking:
    """groups: the number of each coordinate's group; magnitudes: float32, of the same shape; starts: by group, how many
    coordinates the groups before it have."""

    def __init__(self, groups: Tensor, magnitudes: Tensor, starts: Tensor) -> None:
        self._groups, self._starts = groups, starts
        self._keys, self._order = keys_of(groups, magnitudes).flatten().sort()

    def ranks(self) -> Tensor:
        """How many of its group come before a coordinate: 0 for the largest."""
        places = torch.arange(len(self._order), device=self._order.device)
        places = torch.empty_like(places).scatter_(0, self._order, places).view_as(self._groups)
        return places - self._starts[self._groups]

    def reaching(self, groups: Tensor, values: Tensor) -> Tensor:
        """How many coordinates of these groups reach these values; shapes that broadcast."""
        wanted = keys_of(groups, values)
        return torch.searchsorted(self._keys, wanted, right=True) - self._starts[groups]
