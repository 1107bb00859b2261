"""One sorter for many seeds at once: the rules of `cdgrab.sorters` through the same kernels, with one call for all.

Workers that balance alone do not depend on each other, so replicas × workers are simply more workers. Coordinated
workers share one running sum per replica, so every replica is treated as a single worker that visits the rows of its
workers in rank order, position by position. Orders equal those of `make_sorter` with the same seed (tested).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cdgrab.balance import kernels
from cdgrab.balance.rules import reorder, reorder_pairs
from cdgrab.errors import CdgrabError
from cdgrab.sorters import SORTERS, make_sorter
from cdgrab.sorters.balancing import KernelHalving, MeanBalance
from cdgrab.sorters.coordinated import CoordinatedPairBalance


class ReplicatedSorter:
    """Sorter `name` with its default options, once for every seed."""

    def __init__(self, name: str, *, seeds: Sequence[int], workers: int, units: int, dim: int) -> None:
        self.kind = SORTERS.get(name)
        if self.kind in (None, KernelHalving):
            raise CdgrabError(f"sorter {name!r} has no form for many seeds at once")
        source = "shuffle_once" if self.kind.needs_gradients else name  # all balancing sorters have this first order
        self._sorters = [make_sorter(source, workers=workers, units=units, dim=dim, seed=seed) for seed in seeds]
        self._order = torch.empty(len(seeds), workers, 0, dtype=torch.long)
        self._stale_mean = torch.zeros(len(seeds) * workers, dim, dtype=torch.float64)

    def order(self, epoch: int) -> Tensor:
        """[replicas, workers, units]; epochs in sequence, after `observe` of the last."""
        if epoch == 0 or not self.kind.needs_gradients:
            self._order = torch.stack([sorter.order(epoch) for sorter in self._sorters])
        return self._order

    def observe(self, gradients: Tensor) -> None:
        """A whole epoch: gradients [replicas, units, workers, dim], float64, by position of this epoch's order."""
        if not self.kind.needs_gradients:
            return
        replicas, units, workers, dim = gradients.shape
        by_position = gradients.transpose(0, 1)  # [units, replicas, workers, dim]
        flat_order = self._order.flatten(0, 1)
        if self.kind is MeanBalance:
            signs = self._mean_signs(by_position.reshape(units, replicas * workers, dim))
            self._order = reorder(flat_order, signs.T).view_as(self._order)
            return
        pairs = units // 2
        differences = by_position[0 : 2 * pairs : 2] - by_position[1::2]
        if self.kind is CoordinatedPairBalance:
            rows = differences.transpose(1, 2).reshape(pairs * workers, replicas, dim)
            signs = _signs(rows).view(pairs, workers, replicas).permute(2, 1, 0).reshape(-1, pairs)
        else:
            signs = _signs(differences.reshape(pairs, replicas * workers, dim)).T
        self._order = reorder_pairs(flat_order, signs).view_as(self._order)

    def _mean_signs(self, rows: Tensor) -> Tensor:
        running, fresh = torch.zeros_like(self._stale_mean), torch.zeros_like(self._stale_mean)
        limits = torch.zeros(rows.shape[:2], dtype=torch.float64)
        signs = kernels.balance_centred(rows, running, self._stale_mean, fresh, limits)
        self._stale_mean = fresh / len(rows)
        return signs


def _signs(rows: Tensor) -> Tensor:
    """Greedy signs [positions, sums] of rows [positions, sums, dim]; every column has its own sum, zero at first."""
    return kernels.balance(rows, torch.zeros_like(rows[0]), torch.zeros(rows.shape[:2], dtype=torch.float64))
