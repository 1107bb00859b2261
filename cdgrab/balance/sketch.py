"""Sketches: random linear maps to short vectors that keep inner products, for models too long to balance exactly.

Signs only need inner products, which such maps keep approximately (Johnson and Lindenstrauss 1984), and a sum of
sketches is the sketch of the sum. All workers use the same map, drawn from the run's seed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cdgrab import streams
from cdgrab.checks import one_of

CHUNK_ENTRIES = 2**22  # entries of a Gaussian map that are in memory at once


class CountSketch:
    """CountSketch (Charikar, Chen, Farach-Colton 2002) with one hash function. Every coordinate is added, with a random
    sign, to one random place of the sketch.

    Coordinates are added in a fixed order: the same row gives the same sketch to the last bit, on every device and
    however many rows come together. Memory: a place and a sign per coordinate (nine bytes); on a GPU also which
    coordinates belong to the same place.
    """

    name = "countsketch"

    def __init__(self, size: int, dim: int, seed: int) -> None:
        self.size = size
        generator = streams.stream(seed, "sketch")
        self._places = torch.from_numpy(generator.integers(size, size=dim))
        self._signs = torch.from_numpy(generator.integers(2, size=dim).astype("int8") * 2 - 1)
        self._by_place: tuple[Tensor, Tensor] | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        """[..., dim] -> [..., size]"""
        self._signs = self._signs.to(rows.device)
        signed = (rows * self._signs).flatten(0, -2)
        sums = self._in_segments(signed) if rows.is_cuda else self._one_by_one(signed)
        return sums.view(*rows.shape[:-1], self.size)

    def _one_by_one(self, signed: Tensor) -> Tensor:
        return signed.new_zeros(len(signed), self.size).index_add_(1, self._places, signed)

    def _in_segments(self, signed: Tensor) -> Tensor:
        """The same on a GPU, where index_add_ would add in no fixed order."""
        if self._by_place is None:
            counts = self._places.bincount(minlength=self.size)
            self._by_place = self._places.argsort(stable=True).to(signed.device), counts.to(signed.device)
        order, counts = self._by_place
        lengths = counts.repeat(len(signed), 1)
        return torch.segment_reduce(signed[:, order], "sum", lengths=lengths, axis=1, unsafe=True)


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
