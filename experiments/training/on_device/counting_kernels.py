"""Triton kernels that count, for many groups of coordinates at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

EACH = 16384  # coordinates for one program, at most
BLOCK = 1024  # of these at a time


def count(
    numbers: Tensor,
    starts: Tensor,
    ends: Tensor,
    dim: int,
    values: Tensor,
    idle: Tensor | None = None,
) -> Tensor:
    """See `experiments.training.on_device.counting.Groups.reaching`. [groups, values]"""
    groups, each = values.shape
    counts = torch.zeros(groups, each, dtype=torch.int32, device=numbers.device)
    coordinates = min(EACH, BLOCK * triton.cdiv(dim, BLOCK))
    _count[triton.cdiv(dim, coordinates), groups](
        counts, numbers, starts.contiguous(), ends.contiguous(), values.contiguous(),
        starts if idle is None else idle.contiguous(), each, coordinates, BLOCK, (each - 1).bit_length(),
        idle is not None,
    )  # fmt: skip
    return _and_above(counts)


def spread(
    numbers: Tensor,
    starts: Tensor,
    ends: Tensor,
    dim: int,
    found: Tensor,
    shift: int,
    digits: int,
    idle: Tensor | None = None,
    values: Tensor | None = None,
) -> Tensor:
    """See `experiments.training.on_device.counting.Groups`. [groups, digits + 1]"""
    groups = len(found)
    counts = torch.zeros(groups, digits + 1, dtype=torch.int32, device=numbers.device)
    coordinates = min(EACH, BLOCK * triton.cdiv(dim, BLOCK))
    _spread[triton.cdiv(dim, coordinates), groups](
        counts, numbers, starts.contiguous(), ends.contiguous(), found.contiguous(),
        starts if idle is None else idle.contiguous(), numbers if values is None else values.contiguous(),
        dim, shift, coordinates, BLOCK, digits, values is not None, idle is not None,
    )  # fmt: skip
    return _and_above(counts)


def _and_above(counts: Tensor) -> Tensor:
    return counts.flip(1).cumsum(1).flip(1)


def counts_between(chosen: Tensor, cuts: Tensor) -> Tensor:
    """See `experiments.training.on_device.counting`."""
    runs, pieces = len(cuts), cuts.shape[1] - 1
    counts = torch.empty(runs, pieces, dtype=torch.long, device=chosen.device)
    _count_between[pieces, runs](counts, chosen.contiguous(), cuts.contiguous(), chosen.shape[1], BLOCK)
    return counts


@triton.jit
def _stretch(starts, ends, idle, COORDINATES: tl.constexpr, SOME_IDLE: tl.constexpr):
    """This program's group, where that starts, the program's first coordinate there, where the group ends, and whether
    there is anything to do."""
    group = tl.program_id(1)
    start, end = tl.load(starts + group), tl.load(ends + group)
    first = start + tl.program_id(0).to(tl.int64) * COORDINATES
    works = first < end
    if SOME_IDLE:
        works = works & (tl.load(idle + group) == 0)
    return group, start, first, end, works


@triton.jit
def _count(
    counts, numbers, starts, ends, values, idle, each,
    COORDINATES: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, SOME_IDLE: tl.constexpr,
):  # fmt: skip
    """Some coordinates of one group, each with the highest value that it reaches: found bit by bit, for those that
    reach any. Those that reach them all, which may be many, are added up before they are written."""
    group, _, first, end, works = _stretch(starts, ends, idle, COORDINATES, SOME_IDLE)
    if works:
        its, here = values + group.to(tl.int64) * each, counts + group.to(tl.int64) * each
        lowest, highest = tl.load(its), tl.zeros((BLOCK,), tl.int32)
        for begin in range(0, COORDINATES, BLOCK):
            at = first + begin + tl.arange(0, BLOCK)
            magnitude = tl.abs(tl.load(numbers + at, mask=at < end, other=0.0))
            counted = (at < end) & (magnitude >= lowest)
            place = tl.zeros((BLOCK,), tl.int32)
            for bit in tl.static_range(BITS):
                further = place + (1 << (BITS - 1 - bit))
                there = counted & (further < each)
                value = tl.load(its + further, mask=there, other=0.0)
                place = tl.where(there & (magnitude >= value), further, place)
            highest += (counted & (place == each - 1)).to(tl.int32)
            tl.atomic_add(here + place, 1, mask=counted & (place < each - 1), sem="relaxed")
        tl.atomic_add(here + each - 1, tl.sum(highest, axis=0), sem="relaxed")


@triton.jit
def _spread(
    counts, numbers, starts, ends, found, idle, values, dim, shift,
    COORDINATES: tl.constexpr, BLOCK: tl.constexpr, DIGITS: tl.constexpr, EQUAL: tl.constexpr, SOME_IDLE: tl.constexpr,
):  # fmt: skip
    """Some coordinates of one group, by their digit. Those of the first one and above all of them, which may be many,
    are added up before they are written; those below, not at all."""
    group, start, first, end, works = _stretch(starts, ends, idle, COORDINATES, SOME_IDLE)
    if works:
        base, here = tl.load(found + group), counts + group.to(tl.int64) * (DIGITS + 1)
        lowest, above = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
        for begin in range(0, COORDINATES, BLOCK):
            at = first + begin + tl.arange(0, BLOCK)
            counted = at < end
            magnitude = tl.abs(tl.load(numbers + at, mask=counted, other=0.0))
            if EQUAL:
                counted = counted & (magnitude == tl.load(values + group))
                key = (dim - 1 - (at - start)).to(tl.int32)
            else:
                key = magnitude.to(tl.int32, bitcast=True)
            digit = (key - base) >> shift
            lowest += (counted & (digit == 0)).to(tl.int32)
            above += (counted & (digit >= DIGITS)).to(tl.int32)
            tl.atomic_add(here + digit, 1, mask=counted & (digit > 0) & (digit < DIGITS), sem="relaxed")
        tl.atomic_add(here, tl.sum(lowest, axis=0), sem="relaxed")
        tl.atomic_add(here + DIGITS, tl.sum(above, axis=0), sem="relaxed")


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
