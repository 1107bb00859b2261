"""A communication hook for DistributedDataParallel that averages gradients by a sparsifier.

A threshold and partitions make sense for the whole gradient only, so the hook collects it (see `cdgrab.runtime.ddp`).
Residuals belong to places in that vector, so DDP's regrouping of buckets does not touch them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from cdgrab.runtime.ddp import BucketHook
from cdgrab.sparsify.base import Sparsifier, Stats


class Hook(BucketHook):
    """State of the hook: see `cdgrab.sparsify.ddp_hook`, which makes and registers it."""

    def __init__(self, parameters: Sequence[nn.Parameter], sparsifier: Sparsifier) -> None:
        super().__init__(parameters, lambda gradient: sparsifier.reduce(gradient[None]))
        self.sparsifier = sparsifier

    @property
    def stats(self) -> Stats:
        """Of the last backward pass that was not under `no_sync`."""
        return self.sparsifier.stats

    def state_dict(self) -> dict:
        """This rank's residuals and what all ranks share."""
        return self.sparsifier.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.sparsifier.load_state_dict(state)
