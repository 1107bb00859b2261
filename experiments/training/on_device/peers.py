"""Top-k and DEFT of several runs together. See `cdgrab.sparsify` for what they do."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cdgrab.sparsify.deft import DEFT
from cdgrab.sparsify.simple import TopK
from experiments.training.on_device.base import Selection, Sparse
from experiments.training.on_device.counting import Groups, among
from experiments.training.on_device.partitions import among_anyones


class TopKs(Sparse):
    def __init__(self, sparsifiers: Sequence[TopK], device: torch.device) -> None:
        super().__init__(sparsifiers, device)
        self._last_values = torch.zeros(self.runs * self.workers, device=device)  # the next ones will be near these

    def most(self) -> Tensor:
        """How many coordinates each worker selects, [runs]."""
        return self.targets

    def select(self, accumulated: Tensor) -> Selection:
        starts = self.dim * torch.arange(self.runs * self.workers, device=self.device)
        most = self.most()[:, None].expand(-1, self.workers)
        groups = Groups(accumulated, starts, starts + self.dim)
        values, places = groups.largest(most.flatten(), near=self._last_values)
        self._last_values.copy_(values)
        return Selection(among_anyones(accumulated, values.view_as(most), places.view_as(most)), most)


class Defts(Sparse):
    def __init__(self, sparsifiers: Sequence[DEFT], device: torch.device) -> None:
        super().__init__(sparsifiers, device)
        self._pieces = sparsifiers[0].pieces
        self._sizes = torch.tensor([end - start for start, end in self._pieces], device=device)
        self._piece = torch.repeat_interleave(torch.arange(len(self._pieces), device=device), self._sizes)  # [dim]
        runs = torch.arange(self.runs, device=device)[:, None, None]
        self._starts, self._ends = (torch.tensor(self._pieces, device=device) + self.dim * runs).flatten(0, 1).unbind(1)
        self._last_values = torch.zeros(len(self._starts), device=device)  # the next ones will be near these
        self._norms_bytes = math.ceil((self.workers - 1) * 8 * len(self._pieces) / self.workers)

    def select(self, accumulated: Tensor) -> Selection:
        leader = accumulated.index_select(1, (self.iteration % self.workers).view(1))[:, 0]
        norms = [leader[:, start:end].norm(dim=1, dtype=torch.float64) for start, end in self._pieces]
        counts = allotted(self.targets, torch.stack(norms, dim=1), self._sizes)
        costs = self._sizes * counts.clamp(min=2).double().log2() * (counts > 0)
        owners = dealt(costs, self.workers)
        magnitudes = accumulated.gather(1, owners[:, None, self._piece])[:, 0].abs()
        found = Groups(magnitudes, self._starts, self._ends).largest(counts.flatten(), near=self._last_values)
        self._last_values.copy_(found[0])
        values, places = (each.view_as(counts)[:, self._piece] for each in found)
        union = among(magnitudes, values, places)
        by_worker = counts.new_zeros(self.runs, self.workers).scatter_add_(1, owners, counts)
        return Selection(union, by_worker, self._norms_bytes)


def allotted(totals: Tensor, weights: Tensor, sizes: Tensor) -> Tensor:
    """As `cdgrab.sparsify.deft.allot`, for each run: totals [runs], weights [runs, pieces], sizes [pieces]."""
    exact, full = torch.zeros_like(weights), torch.zeros_like(weights, dtype=torch.bool)
    for _ in sizes:  # in each round at least one more is full, or nothing changes any more
        left = totals - (sizes * full).sum(1)
        open_weights = weights.masked_fill(full, 0)
        by_size = ~open_weights.any(1, keepdim=True)
        open_weights = torch.where(by_size, sizes.double().masked_fill(full, 0), open_weights)
        tiny = torch.finfo(torch.float64).tiny
        parts = open_weights / open_weights.sum(1, keepdim=True).clamp(min=tiny)
        exact = torch.where(full, sizes.double(), left[:, None] * parts)
        full = full | (exact >= sizes)
    whole = exact.floor()
    order = (whole - exact).argsort(dim=1, stable=True)
    ranks = torch.empty_like(order).scatter_(1, order, torch.arange(len(sizes), device=order.device).expand_as(order))
    whole = whole.long()
    return whole + (ranks < (totals - whole.sum(1))[:, None])


def dealt(costs: Tensor, workers: int) -> Tensor:
    """As `cdgrab.sparsify.deft.deal`, for each run: the owners [runs, pieces] of pieces with these costs."""
    order, burden = (-costs).argsort(dim=1, stable=True), costs.new_zeros(len(costs), workers)
    owners = torch.zeros_like(order)
    for piece in order.split(1, dim=1):
        owner = burden.argmin(1, keepdim=True)
        owners.scatter_(1, piece, owner)
        burden.scatter_add_(1, owner, costs.gather(1, piece))
    return owners
