"""Sketches: random linear maps to short vectors that keep inner products, for models too long to balance exactly.

Signs only need inner products (Johnson–Lindenstrauss), and a sum of sketches is the sketch of the sum. All workers use
the same map, drawn from the run's seed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import streams
from .errors import CdgrabError

SKETCHES = ("none", "gaussian", "countsketch")
CHUNK_ENTRIES = 2**22  # of a Gaussian map in memory at once


class CountSketch:
    """Every coordinate goes with a random sign to one random place. Held: one number per coordinate."""

    name = "countsketch"

    def __init__(self, size: int, dim: int, seed: int) -> None:
        self.size = size
        generator = streams.stream(seed, "sketch")
        self._places = torch.from_numpy(generator.integers(size, size=dim))
        self._signs = torch.from_numpy(generator.integers(2, size=dim).astype("int8") * 2 - 1)

    def __call__(self, rows: Tensor) -> Tensor:
        """[..., dim] -> [..., size]"""
        self._places, self._signs = self._places.to(rows.device), self._signs.to(rows.device)
        flat = (rows * self._signs).flatten(0, -2)
        return flat.new_zeros(len(flat), self.size).index_add_(1, self._places, flat).view(*rows.shape[:-1], self.size)


class Gaussian:
    """Independent normal entries of variance 1/size, made again chunk by chunk whenever they are needed."""

    name = "gaussian"

    def __init__(self, size: int, dim: int, seed: int) -> None:
        self.size, self._seed = size, int(streams.stream(seed, "sketch").integers(2**62))
        self._chunk = max(1, CHUNK_ENTRIES // size)
        self._whole: Tensor | None = None  # kept when it is a single chunk
        self._single = dim <= self._chunk

    def __call__(self, rows: Tensor) -> Tensor:
        """[..., dim] -> [..., size]"""
        sketched = rows.new_zeros(*rows.shape[:-1], self.size)
        for number, part in enumerate(rows.split(self._chunk, dim=-1)):
            sketched += part @ self._entries(number, part)
        return sketched

    def _entries(self, number: int, part: Tensor) -> Tensor:
        if self._single and self._whole is not None:
            return self._whole.to(part)
        generator = torch.Generator().manual_seed(self._seed + number)  # on the CPU: the same map on every device
        entries = torch.randn(part.shape[-1], self.size, generator=generator) / math.sqrt(self.size)
        if self._single:
            self._whole = entries
        return entries.to(part)


def make_sketch(name: str, size: int, dim: int, seed: int) -> CountSketch | Gaussian | None:
    """None for `none`."""
    if name not in SKETCHES:
        raise CdgrabError(f"sketch must be one of {', '.join(SKETCHES)}, got {name!r}")
    if name == "none":
        return None
    return {"gaussian": Gaussian, "countsketch": CountSketch}[name](size, dim, seed)
