"""Sketches: random linear maps to short vectors that keep inner products, for models too long to balance exactly.

Signs only need inner products, which such maps keep approximately (Johnson and Lindenstrauss 1984), and a sum of
sketches is the sketch of the sum. All workers use the same map, drawn from the run's seed.
"""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from cdgrab import streams
from cdgrab.balance import optional
from cdgrab.checks import one_of

CHUNK_ENTRIES = 2**22  # entries of a Gaussian map that are in memory at once


class CountSketch:
    """CountSketch (Charikar, Chen, Farach-Colton 2002) with one hash function. Every coordinate is added, with a random
    sign, to one random place of the sketch.

    Coordinates are added in a fixed order: the same row gives the same sketch to the last bit, on every device, however
    many rows come together and in whatever pieces. Memory: two bytes per coordinate for its place and sign (four if the
    sketch has more than 16,384 places; on a GPU always two, and four for every 2¹⁵ coordinates and place).
    """

    name = "countsketch"

    def __init__(self, size: int, dim: int, seed: int) -> None:
        self.size, self._chunk = size, max(2**18, dim // 32)
        generator = streams.stream(seed, "sketch")
        codes = np.empty(dim, np.int16 if size <= 2**14 else np.int32)  # twice the place, and 1 if the sign is minus
        for some in np.split(codes, range(self._chunk, dim, self._chunk)):  # in parts, which draws the same numbers
            some[:] = 2 * generator.integers(size, size=len(some))
        for some in np.split(codes, range(self._chunk, dim, self._chunk)):
            some += generator.integers(2, size=len(some)) == 0
        self._codes = torch.from_numpy(codes)
        self._sorted: dict[tuple, tuple] = {}  # for a GPU: by first coordinate, number and device

    def __call__(self, rows: Tensor) -> Tensor:
        """[..., dim] -> [..., size]"""
        sums = rows.new_zeros(*rows.shape[:-1], self.size)
        self.add(sums.view(-1, self.size), 0, rows.flatten(0, -2))
        return sums

    def add(self, sums: Tensor, start: int, pieces: Tensor) -> None:
        """Add the coordinates from `start` on, pieces [rows, n], to sums [rows, size]. On a GPU, where nobody waits to
        see whether they are finite, what is not counts as zero."""
        codes = self._codes[start : start + pieces.shape[1]]
        if compiled := optional("sketched" if sums.is_cuda else "cpu"):
            coordinates = self._sort(compiled, start, codes, sums.device) if sums.is_cuda else codes
            return compiled.add_to_sketches(sums, coordinates, pieces)
        codes = codes.to(sums.device)
        for some, its in zip(pieces.split(self._chunk, 1), codes.split(self._chunk), strict=True):
            signed, places = some.to(sums.dtype) * (1 - 2 * (its & 1)), its >> 1
            if sums.is_cuda:
                sums.copy_(self._in_segments(sums, places, signed.nan_to_num_(0.0, 0.0, 0.0)))
            else:
                self._one_by_one(sums, places, signed)

    def _sort(self, compiled: ModuleType, start: int, codes: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Once for every piece: they are the same in every step, until DDP divides its buckets anew."""
        key = (start, len(codes), device)
        if key not in self._sorted:
            if sum(length for _, length, _ in self._sorted) + len(codes) > len(self._codes):
                self._sorted.clear()
            self._sorted[key] = compiled.by_place(codes.to(device), self.size)
        return self._sorted[key]

    def _one_by_one(self, sums: Tensor, places: Tensor, signed: Tensor) -> None:
        for its, row in zip(sums, signed, strict=True):
            its.index_add_(0, places.long(), row)

    def _in_segments(self, sums: Tensor, places: Tensor, signed: Tensor) -> Tensor:
        """The same on a GPU, where index_add_ would add in no fixed order."""
        every = torch.arange(self.size, dtype=places.dtype, device=places.device)
        order = torch.cat([every, places]).argsort(stable=True)  # each sum comes before what is added to it
        lengths = torch.ones(self.size, dtype=torch.long, device=places.device)
        lengths.scatter_add_(0, places.long(), lengths.new_ones(1).expand(len(places)))
        values, lengths = torch.cat([sums, signed], 1)[:, order], lengths.repeat(len(sums), 1)
        return torch.segment_reduce(values, "sum", lengths=lengths, axis=1, unsafe=True)


class Gaussian:
    """Independent normal entries of variance 1/size, generated again chunk by chunk whenever they are needed.

    One vector-matrix product per row: the last bits of a matrix product depend on the number of rows.
    """

    name = "gaussian"

    def __init__(self, size: int, dim: int, seed: int) -> None:
        self.size, self._seed = size, int(streams.stream(seed, "sketch").integers(2**62))
        self._chunk = max(1, CHUNK_ENTRIES // size)
        self._whole: Tensor | None = None  # kept when it is a single chunk
        self._single = dim <= self._chunk

    def __call__(self, rows: Tensor) -> Tensor:
        """[..., dim] -> [..., size]"""
        flat = rows.flatten(0, -2)
        sketched = rows.new_zeros(len(flat), self.size)
        for number, part in enumerate(flat.split(self._chunk, dim=-1)):
            entries = self._entries(number, part).expand(len(flat), -1, -1)
            sketched += torch.bmm(part[:, None], entries)[:, 0]
        return sketched.view(*rows.shape[:-1], self.size)

    def _entries(self, number: int, part: Tensor) -> Tensor:
        if self._single and self._whole is not None:
            return self._whole.to(part)
        generator = torch.Generator().manual_seed(self._seed + number)  # on the CPU: the same map on every device
        entries = torch.randn(part.shape[-1], self.size, generator=generator) / math.sqrt(self.size)
        if self._single:
            self._whole = entries
        return entries.to(part)


SKETCHES = {"none": None, "gaussian": Gaussian, "countsketch": CountSketch}


def make_sketch(name: str, size: int, dim: int, seed: int) -> CountSketch | Gaussian | None:
    """The sketch of this name; None for `none`."""
    one_of("sketch", name, SKETCHES)
    return SKETCHES[name](size, dim, seed) if SKETCHES[name] else None
