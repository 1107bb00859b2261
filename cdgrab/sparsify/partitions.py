"""ExDyna's partitions (Yoon, Oh 2024, arXiv 2402.13781): runs of consecutive blocks of coordinates, one run per worker,
resized block by block. Also rounding by largest remainders, which every apportionment needs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate

import numpy as np

ALIGNMENT = 32  # coordinates: in long vectors, blocks start on a memory boundary
TOLERANCE = 1.05  # loads closer than this count as equal
RULES = ("balanced", "paper", "relative", "static")


def block_edges(dim: int, blocks: int) -> list[int]:
    """The edges of the blocks, [blocks + 1]. Blocks are equal up to alignment; short vectors are not aligned.

    The paper makes all blocks equally long, which leaves up to half of a short vector to the last partition.
    """
    unit = ALIGNMENT if dim >= 2 * ALIGNMENT * blocks else 1
    return [block * dim // blocks // unit * unit for block in range(blocks)] + [dim]


def published_edges(dim: int, blocks: int) -> list[int]:
    """Those of the published code: all blocks equally long, with what is left over as a part of the last one."""
    size = dim // blocks // ALIGNMENT * ALIGNMENT
    return [block * size for block in range(blocks)] + [dim]


def equal_runs(blocks: int, workers: int) -> list[int]:
    """How many blocks each partition starts with."""
    return [blocks // workers + (partition < blocks % workers) for partition in range(workers)]


def partition_edges(edges: list[int], runs: list[int]) -> list[int]:
    """The edges of the partitions, [workers + 1], from the edges of the blocks and the blocks per partition."""
    return [edges[block] for block in accumulate(runs, initial=0)]


def rebalance(runs: list[int], loads: list[float], rule: str) -> list[int]:
    """New blocks per partition from the loads of the last iteration: at most one block moves between neighbours.

    paper: from a partition above the average to one below it; stalls when both are on the same side.
    relative: from the heavier of the two to the lighter.
    """
    blocks, partitions, total = sum(runs), len(runs), sum(loads)
    if rule == "static" or partitions == 1 or not total:
        return list(runs)
    least = max(1, blocks // (4 * partitions))
    if rule == "paper":
        return _moved(runs, loads, _across(total / partitions, 1 / TOLERANCE), least, total // blocks)
    return _moved(runs, loads, lambda one, other: one > TOLERANCE * other, least, total / blocks)


def published_rebalance(runs: list[int], loads: list[int], edges: list[int]) -> list[int]:
    """The paper's rule with the numbers of the published code. edges: `published_edges`."""
    blocks, partitions, total = sum(runs), len(runs), sum(loads)
    if partitions == 1:
        return list(runs)
    heavier = _across(total // partitions, 0.95238)
    return _moved(runs, loads, heavier, blocks / (4 * partitions), int(edges[1] * (total / edges[-1])))


def _across(average: float, low: float) -> Callable[[float, float], bool]:
    """Whether one load is above the average, and the other below it."""
    return lambda one, other: one / average > TOLERANCE and other / average < low


def _moved(
    runs: list[int], loads: list[float], heavier: Callable[[float, float], bool], least: float, load: float
) -> list[int]:
    """From left to right: of two neighbours the heavier gives a block, with this load, unless fewer than `least` would
    be left."""
    runs, loads = list(runs), list(loads)
    for left in range(len(runs) - 1):
        right = left + 1
        giver, taker = (left, right) if heavier(loads[left], loads[right]) else (right, left)
        if heavier(loads[giver], loads[taker]) and runs[giver] - 1 >= least:
            runs[giver], runs[taker] = runs[giver] - 1, runs[taker] + 1
            loads[giver], loads[taker] = loads[giver] - load, loads[taker] + load
    return runs


def balanced(loads: list[float], workers: int) -> list[int]:
    """Blocks per partition that divide the blocks' loads evenly: every cut is as near to its share of the total as the
    blocks allow. If only neighbours were compared, small tolerated differences would add up along the vector."""
    blocks = len(loads)
    if blocks < workers or not sum(loads):
        return equal_runs(blocks, workers)
    before = list(accumulate(loads, initial=0.0))
    cuts = [0]
    for partition in range(1, workers):
        share = before[-1] * partition / workers
        cut = bisect_left(before, share)
        if cut > 0 and share - before[cut - 1] < before[cut] - share:
            cut -= 1
        cuts.append(min(max(cut, cuts[-1] + 1), blocks - workers + partition))  # at least one block per partition
    return [end - start for start, end in zip(cuts, [*cuts[1:], blocks], strict=True)]


def whole_numbers(exact: np.ndarray, total: int) -> np.ndarray:
    """`exact` rounded to whole numbers that sum to `total`: those with the largest remainders are rounded up."""
    whole = np.floor(exact).astype(np.int64)
    whole[np.argsort(whole - exact, kind="stable")[: total - whole.sum()]] += 1
    return whole
