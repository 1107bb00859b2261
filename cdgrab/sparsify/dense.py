"""No sparsification: the plain average, in the same interface."""

from __future__ import annotations

import torch
from torch import Tensor

from cdgrab.sparsify.base import Sparsifier


class Dense(Sparsifier):
    """Every worker sends everything; `density` is ignored and nothing is fed back."""

    label = "dense"
    options = ()

    def __init__(self, **settings) -> None:
        super().__init__(**settings, error_feedback=False)

    def select(self, accumulated: Tensor) -> list[Tensor]:
        return [torch.arange(self.dim, device=accumulated.device)] * self.local_workers

    def _share(self, mine: list[Tensor]) -> tuple[list[Tensor], int]:
        return mine[:1] * self.workers, 0  # nobody needs to be told

    def _union(self, selected: list[Tensor]) -> Tensor:
        return selected[0]
