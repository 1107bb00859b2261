"""A threshold that a wanted number of magnitudes reaches, by counting: all workers count at the same values, the counts
are summed, and everybody draws the same conclusion from whole numbers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from cdgrab.sparsify.hard_threshold import SMALLEST

LARGEST = 3e38  # of float32
NEAR = 1.25  # the threshold is looked for within this factor of the last one, then anywhere
FINE, COARSE = 65, 1025  # values at which is counted near the threshold, and anywhere
MANY = 0.1  # of the wanted number: so many between two values are looked at more closely, they may be equal
CLOSER = 2  # times; then two values differ by little more than float32 can tell


Counter = Callable[[list[float]], list[int]]  # how many magnitudes reach each of some ascending values


def grid(low: float, high: float, size: int) -> list[float]:
    """`size` values from low to high, each larger than the one before by the same factor."""
    return [low * (high / low) ** (step / (size - 1)) for step in range(size)]


def count_reaching(vectors: list[Tensor], values: list[float]) -> Tensor:
    """How many magnitudes reach each of the ascending `values`, all vectors together: whole numbers [values]."""
    edges = torch.tensor(values, dtype=vectors[0].dtype, device=vectors[0].device)
    counts = torch.zeros(len(values) + 1, dtype=torch.long, device=edges.device)
    for vector in vectors:
        magnitudes = vector.abs()
        magnitudes = magnitudes[magnitudes >= edges[0]]
        counts += torch.bincount(torch.bucketize(magnitudes, edges, right=True), minlength=len(counts))
    return counts[1:].flip(0).cumsum(0).flip(0)


def counted_threshold(count: Counter, wanted: float, last: float | None) -> float:
    """The value that `wanted` magnitudes reach, SMALLEST if there are not so many above zero.

    Equal magnitudes pass together: where one value takes the number from too few to too many, it is too many.

    count: how many reach each of some ascending values; last: a threshold that may be near.
    """
    if last is not None:
        values = grid(max(last / NEAR, SMALLEST), last * NEAR, FINE)
        counts = count(values)
        if (counts[0] >= wanted or values[0] == SMALLEST) and counts[-1] < wanted:
            return _between(count, values, counts, wanted)
    values = grid(SMALLEST, LARGEST, COARSE)
    counts = count(values)
    for (low, high), (reach_low, reach_high) in zip(pairwise(values), pairwise(counts), strict=True):
        if reach_low >= wanted > reach_high:
            values = grid(low, high, FINE)
            return _between(count, values, count(values), wanted)
    return SMALLEST


def _between(
    count: Counter,
    values: list[float],
    counts: list[int],
    wanted: float,
    closer: int = CLOSER,
) -> float:
    """As if magnitudes were spread evenly from each value to the next, unless many lie between the same two."""
    for (low, high), (reach_low, reach_high) in zip(pairwise(values), pairwise(counts), strict=True):
        if reach_low >= wanted > reach_high:
            if reach_low - reach_high <= max(1, MANY * wanted):
                return low * (high / low) ** ((reach_low - wanted) / (reach_low - reach_high))
            if not closer:
                return low
            values = grid(low, high, FINE)
            return _between(count, values, count(values), wanted, closer - 1)
    return values[0]
