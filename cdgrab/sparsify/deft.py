"""DEFT (Yoon, Oh 2023, arXiv 2307.03500): layers are assigned to workers, and each selects the largest values of its
own layers only.

A layer's share of the coordinates is proportional to its norm, and layers are assigned by the cost of selecting in
them. So that all workers agree, both come from the norms that one worker sees; the workers take turns at that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cdgrab.checks import count, shown
from cdgrab.errors import CdgrabError
from cdgrab.sparsify.base import Sparsifier
from cdgrab.sparsify.partitions import whole_numbers
from cdgrab.sparsify.threshold import largest


def pieces(layers: Sequence[int], workers: int) -> list[tuple[int, int]]:
    """Where layers start and end; layers longer than a worker's share of the vector are split evenly."""
    found, start, dim = [], 0, sum(layers)
    for size in layers:
        parts = min(size, -(-size * workers // dim))  # none is empty, however many workers there are
        edges = [start + part * size // parts for part in range(parts + 1)]
        found += zip(edges, edges[1:], strict=False)
        start += size
    return found


def allot(total: int, weights: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """`total` coordinates in proportion to `weights`, at most its size for each piece; by largest remainders."""
    shares = np.zeros(len(sizes))
    full = np.zeros(len(sizes), dtype=bool)
    while True:
        left = total - sizes[full].sum()
        open_weights = np.where(full, 0.0, weights)
        if not open_weights.any():  # all norms are zero: use sizes
            open_weights = np.where(full, 0.0, sizes)
        shares = np.where(full, sizes, left * (open_weights / max(open_weights.sum(), np.finfo(float).tiny)))
        over = ~full & (shares >= sizes)
        if not over.any():
            break
        full |= over
    return whole_numbers(shares, total)


def deal(costs: np.ndarray, workers: int) -> list[int]:
    """An owner for every piece: the most expensive first, each to the worker with the lowest cost so far."""
    owners, burden = [0] * len(costs), [0.0] * workers
    for piece in np.argsort(-costs, kind="stable").tolist():
        owners[piece] = min(range(workers), key=burden.__getitem__)
        burden[owners[piece]] += costs[piece]
    return owners


class DEFT(Sparsifier):
    label = "DEFT"
    options = (*Sparsifier.options, "layers")
    exclusive = True
    saved = ("_residual",)

    def __init__(self, *, layers: Sequence[int] | None = None, **settings) -> None:
        """layers: sizes of the parameter tensors, in their order in the vector; by default one layer."""
        super().__init__(**settings)
        if not isinstance(layers, Sequence | None):
            raise CdgrabError(f"layers must be a list of sizes, got {shown(layers)}")
        self.layers = [count("a layer's size", size, 1) for size in ([self.dim] if layers is None else layers)]
        if sum(self.layers) != self.dim:
            raise CdgrabError(f"layers must sum to dim = {self.dim}, got {sum(self.layers)}")
        self.pieces = pieces(self.layers, self.workers)
        self._sizes = np.array([end - start for start, end in self.pieces])
        self._counts: list[int] = []  # of each piece in this iteration
        self._owners: list[int] = []

    def prepare(self, accumulated: Tensor) -> int:
        leader = self.iteration % self.workers
        norms = torch.zeros(len(self.pieces), dtype=torch.float64, device=accumulated.device)
        if leader in self.worker_ids():
            row = accumulated[leader - self.group.local.start]
            norms = torch.stack([row[start:end].norm(dtype=torch.float64) for start, end in self.pieces])
        counts = allot(self.target, self.group.from_worker(leader, norms).cpu().numpy(), self._sizes)
        costs = self._sizes * np.log2(np.maximum(counts, 2)) * (counts > 0)  # every piece is read at least once
        self._counts, self._owners = counts.tolist(), deal(costs, self.workers)
        return math.ceil((self.workers - 1) * 8 * len(self.pieces) / self.workers)

    def select(self, accumulated: Tensor) -> list[Tensor]:
        nothing = torch.empty(0, dtype=torch.long, device=accumulated.device)
        found = {worker: [nothing] for worker in self.worker_ids()}
        for (start, end), k, owner in zip(self.pieces, self._counts, self._owners, strict=True):
            if owner in found and k:
                found[owner].append(start + largest(accumulated[owner - self.group.local.start, start:end], k))
        return [torch.cat(parts) for parts in found.values()]
