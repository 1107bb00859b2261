"""Thresholds: selecting by them, rules that adapt them, and finding one by counting.

The paper's rule is that of ExDyna (Yoon, Oh 2024, arXiv 2402.13781); the other rules are our own. Counting: all workers
count how many magnitudes reach each of the same values, and the counts are summed. They are whole numbers, so everybody
draws the same conclusion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

SMALLEST = 1.2e-38  # the smallest normal float32: a threshold below would let zeros pass
LARGEST = 3e38  # of float32
NEAR = 1.25  # the threshold is searched for within this factor of the last one, then anywhere
FINE, COARSE = 65, 1025  # how many values are tried near the last threshold, and anywhere
MANY = 0.1  # fraction of the wanted number; if more lie between two values, the search is refined: they may be equal
CLOSER = 2  # refinements at most: after that, two values differ by little more than float32 resolves
GAIN = 0.1  # of the proportional rule
TOGETHER = 1 << 20  # coordinates of all workers that are counted at once; more would take memory, and no less time

Counter = Callable[[list[float]], list[int]]  # how many magnitudes reach each of some ascending values


def largest(values: Tensor, k: int) -> Tensor:
    """Where the k largest magnitudes of a vector are, or of every row, in no particular order."""
    return values.abs().topk(k, sorted=False).indices


def reaching(values: Tensor, threshold: float) -> Tensor:
    """Where the magnitudes of a vector are at least `threshold`, in ascending order."""
    if values.is_cuda:
        return (values.abs() >= threshold).nonzero().squeeze(1)
    return torch.from_numpy(np.flatnonzero(np.abs(values.numpy()) >= threshold))  # a fifth of torch's time


def reaching_each(vectors: Sequence[Tensor], threshold: float) -> list[Tensor]:
    """`reaching`, of each of several vectors. Short ones are looked at together: a GPU is then asked only once."""
    if not _few(vectors):
        return [reaching(vector, threshold) for vector in vectors]
    ends = torch.tensor([len(vector) for vector in vectors]).cumsum(0)
    found = reaching(torch.cat(list(vectors)), threshold)
    cuts = torch.searchsorted(found, ends[:-1].to(found.device)).tolist()
    starts = [0, *ends[:-1].tolist()]
    return [part - start if start else part for part, start in zip(found.tensor_split(cuts), starts, strict=True)]


def first_guess(k: int) -> float:
    """The threshold of the ExDyna paper's experiments: right for gradients of one scale."""
    return 1 / (2 * math.sqrt(k))


def paper_rule(threshold: float, ratio: float, faithful: bool = False) -> float:
    """The online threshold scaling of ExDyna; ratio: selected / wanted in the last iteration. faithful: as in the
    published code, which near the wanted number compares with 0, so that the threshold always rises there."""
    if ratio > 1.1:
        return threshold * 1.005
    if ratio <= (0.909 if faithful else 1 / 1.1):
        return threshold * 0.995
    return threshold * (1.00125 if faithful or ratio > 1 else 0.9987)


def proportional_rule(threshold: float, ratio: float) -> float:
    return threshold * min(max(ratio**GAIN, 0.95), 1.05)


def grid(low: float, high: float, size: int) -> list[float]:
    """`size` values from low to high in geometric progression."""
    return [low * (high / low) ** (step / (size - 1)) for step in range(size)]


def count_reaching(vectors: list[Tensor], values: list[float]) -> Tensor:
    """How many magnitudes of all vectors together reach each of the ascending `values`: whole numbers [values]."""
    edges = torch.tensor(values, dtype=vectors[0].dtype, device=vectors[0].device)
    return sum(_reached(vector.abs(), edges) for vector in ([torch.cat(vectors)] if _few(vectors) else vectors))


def _few(vectors: Sequence[Tensor]) -> bool:
    return len(vectors) > 1 and sum(map(len, vectors)) <= TOGETHER


def _reached(magnitudes: Tensor, edges: Tensor) -> Tensor:
    if not magnitudes.is_cuda:  # a GPU would be waited for
        magnitudes = magnitudes[reaching(magnitudes, float(edges[0]))]
    counts = torch.bincount(torch.bucketize(magnitudes, edges, right=True), minlength=len(edges) + 1)
    return len(magnitudes) - counts.cumsum(0)[:-1]


def counted_threshold(count: Counter, wanted: float, last: float | None) -> float:
    """The value that `wanted` magnitudes reach; SMALLEST if fewer are above zero.

    Equal magnitudes pass together: if the choice is between too few and too many, it is too many.

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


def _between(count: Counter, values: list[float], counts: list[int], wanted: float, closer: int = CLOSER) -> float:
    """Interpolates as if magnitudes were spread evenly between two values, unless very many lie between them."""
    for (low, high), (reach_low, reach_high) in zip(pairwise(values), pairwise(counts), strict=True):
        if reach_low >= wanted > reach_high:
            if reach_low - reach_high <= max(1, MANY * wanted):
                return low * (high / low) ** ((reach_low - wanted) / (reach_low - reach_high))
            if not closer:
                return low
            values = grid(low, high, FINE)
            return _between(count, values, count(values), wanted, closer - 1)
    return values[0]
