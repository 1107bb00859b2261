"""Count sketches on a GPU: every place of a sketch is summed by one thread, coordinate by coordinate in their order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = SIGN = 2**15  # coordinates: their numbers within a chunk and their signs fit into 16 bits
PLACES = 32  # of a program
AT_ONCE = 16  # numbers of a place that are loaded before the first of them is added


def by_place(codes: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The coordinates of every chunk, sorted by their place: entries [n], below zero if the sign is minus, and where
    those of each place begin and end, ends [chunks, size + 1]. codes [n]: twice the place, and 1 if the sign is minus.
    """
    entries, ends = torch.empty(len(codes), dtype=torch.int16, device=codes.device), []
    for some, into in zip(codes.split(CHUNK), entries.split(CHUNK), strict=True):
        places = some.long() >> 1
        order = places.argsort(stable=True)
        into.copy_(order - (some[order].long() & 1) * SIGN)
        counts = torch.bincount(places, minlength=size)
        ends.append(torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int())
    return entries, torch.stack(ends)


def add_to_sketches(sums: Tensor, coordinates: tuple[Tensor, Tensor], pieces: Tensor) -> None:
    """Add pieces [rows, n] to sums [rows, size]; coordinates: see `by_place`. What is not finite counts as zero."""
    (rows, size), (entries, ends) = sums.shape, coordinates
    pieces = pieces if pieces.stride(1) == 1 else pieces.contiguous()
    _add_kernel[triton.cdiv(size, PLACES), rows](
        sums, entries, ends, pieces, pieces.stride(0), len(ends), size, CHUNK, SIGN, PLACES, AT_ONCE, num_warps=1
    )


@triton.jit
def _add_kernel(
    sums, entries, ends, pieces, row_stride, chunks, size,
    CHUNK: tl.constexpr, SIGN: tl.constexpr, PLACES: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    row, real = tl.program_id(1).to(tl.int64), place < size
    total = tl.load(sums + row * size + place, mask=real, other=0.0)
    values, begin = pieces + row * row_stride, ends + place
    for _ in range(chunks):
        first, last = tl.load(begin, mask=real, other=0), tl.load(begin + 1, mask=real, other=0)
        for done in range(0, tl.max(last - first, axis=0), AT_ONCE):
            for number in tl.static_range(AT_ONCE):
                at = first + done + number
                there = at < last
                entry = tl.load(entries + at, mask=there, other=0).to(tl.int32)
                value = tl.load(values + (entry & (SIGN - 1)), mask=there, other=0.0).to(total.dtype)
                value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
                total = tl.where(there, total + tl.where(entry < 0, -value, value), total)
        values, entries, begin = values + CHUNK, entries + CHUNK, begin + size + 1
    tl.store(sums + row * size + place, total, mask=real)
