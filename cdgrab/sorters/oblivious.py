"""Sorters that never look at gradients. The training loop computes no per-unit gradients for them."""

from __future__ import annotations

import torch
from torch import Tensor

from cdgrab import streams
from cdgrab.balance.rules import reorder_pairs
from cdgrab.checks import one_of
from cdgrab.sorters.base import Sorter


class DistributedRandomReshuffling(Sorter):
    """D-RR: a fresh permutation for every worker and epoch.

    `shared` gives all workers the same permutation, as the published code does (its ranks share one seed): the
    baseline that published curves were measured against.
    """

    label = "D-RR"
    options = ("shared",)

    def __init__(self, *, shared: bool = False, **common) -> None:
        super().__init__(**common)
        one_of("shared", shared, (True, False))
        self.shared = shared

    def next_order(self, epoch: int) -> Tensor:
        if self.shared:
            return streams.permutation(self.units, self.seed, "order", 0, epoch).repeat(self.local_workers, 1)
        return self.random_order(epoch)


class ShuffleOnce(Sorter):
    """SO: one random permutation per worker, kept for all epochs."""

    label = "Shuffle once"
    options = ("initial",)

    def next_order(self, epoch: int) -> Tensor:
        return self.first_order() if epoch == 0 else self.current


class FlipFlop(Sorter):
    """FlipFlop (Rajput, Lee, Papailiopoulos 2022, arXiv 2102.09718): a fresh order in even epochs, the last one
    reversed in odd epochs."""

    label = "FlipFlop"

    def next_order(self, epoch: int) -> Tensor:
        return self.current.flip(1) if epoch % 2 else self.random_order(epoch)


class Riffle(Sorter):
    """Even positions, then odd positions reversed: what pair balancing does if every sign is +1.

    This is the order that the published code really produces on M4 and WikiText-2, where it subtracts a reused buffer
    from itself. It is kept for comparison with the published curves.
    """

    label = "Riffle"
    options = ("initial",)

    def next_order(self, epoch: int) -> Tensor:
        if epoch == 0:
            return self.first_order()
        return reorder_pairs(self.current, torch.ones(self.local_workers, self.units // 2, dtype=torch.int8))
