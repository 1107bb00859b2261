"""Triton kernels that count, for many groups of coordinates at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

EACH = 8192  # coordinates for one program, at most
AT_ONCE = 64  # values that they are compared with
TILE = 4096  # comparisons at a time: what stays in registers
BLOCK = 1024  # coordinates at a time, of which those are counted that are chosen


def count(
    magnitudes: Tensor,
    starts: Tensor,
    ends: Tensor,
    dim: int,
    values: Tensor,
    idle: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """See `experiments.training.on_device.counting.Groups`. [groups, values] or [groups, places]"""
    tried = values if places is None else places
    groups, each = tried.shape
    counts = torch.zeros(groups, each, dtype=torch.int32, device=magnitudes.device)
    width = min(AT_ONCE, triton.next_power_of_2(each))
    block = TILE // width
    coordinates = min(EACH, block * triton.cdiv(dim, block))
    _count[triton.cdiv(dim, coordinates), groups, triton.cdiv(each, width)](
        counts, magnitudes, starts.contiguous(), ends.contiguous(), values.contiguous(), tried.contiguous(),
        starts if idle is None else idle.contiguous(), each, coordinates, block, width,
        places is not None, idle is not None,
    )  # fmt: skip
    return counts


def counts_between(chosen: Tensor, cuts: Tensor) -> Tensor:
    """See `experiments.training.on_device.counting`."""
    runs, pieces = len(cuts), cuts.shape[1] - 1
    counts = torch.empty(runs, pieces, dtype=torch.long, device=chosen.device)
    _count_between[pieces, runs](counts, chosen.contiguous(), cuts.contiguous(), chosen.shape[1], BLOCK)
    return counts


@triton.jit
def _count(
    counts, magnitudes, starts, ends, values, tried, idle, each,
    COORDINATES: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    BY_PLACE: tl.constexpr, SOME_IDLE: tl.constexpr,
):  # fmt: skip
    """Some coordinates of one group against some of what is tried there."""
    group = tl.program_id(1)
    start, end = tl.load(starts + group), tl.load(ends + group)
    first = start + tl.program_id(0).to(tl.int64) * COORDINATES
    works = first < end
    if SOME_IDLE:
        works = works & (tl.load(idle + group) == 0)
    if works:
        column = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
        here, real = group * each + column, column < each
        wanted = tl.load(tried + here, mask=real, other=0)[None, :]
        total = tl.zeros((BLOCK, WIDTH), tl.int32)
        for begin in range(0, COORDINATES, BLOCK):
            at = first + begin + tl.arange(0, BLOCK)
            found = tl.load(magnitudes + at, mask=at < end, other=-1.0)
            if BY_PLACE:
                equal = found == tl.load(values + group)
                total += (equal[:, None] & ((at - start)[:, None] < wanted)).to(tl.int32)
            else:
                total += (found[:, None] >= wanted).to(tl.int32)
        tl.atomic_add(counts + here, tl.sum(total, axis=0), mask=real)


@triton.jit
def _count_between(counts, chosen, cuts, dim, BLOCK: tl.constexpr):
    """One piece of one run."""
    piece, pieces, run = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    start, end = tl.load(cuts + run * (pieces + 1) + piece), tl.load(cuts + run * (pieces + 1) + piece + 1)
    total = tl.zeros((BLOCK,), tl.int64)
    for first in range(start, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(chosen + run * dim + at, mask=at < end, other=0).to(tl.int64)
    tl.store(counts + run * pieces + piece, tl.sum(total, axis=0))
