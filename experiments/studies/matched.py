"""Top-k as studies train with it: at the density of the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cdgrab.sparsify import SPARSIFIERS
from cdgrab.sparsify.simple import TopK
from cdgrab.sparsify.threshold import largest
from experiments.training.on_device import KINDS
from experiments.training.on_device.base import Selection
from experiments.training.on_device.peers import TopKs

MATCHED = "topk_matched"
FOLLOWING = 0.3  # how fast the number of coordinates adapts to the density that is to be matched


class MatchedTopK(TopK):
    """Top-k that holds the density of the update by adapting how many coordinates each worker selects: how much the
    workers' selections overlap varies. Otherwise methods would be compared at different densities."""

    saved = ("_residual", "_largest")

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self._largest = float(self.target)  # how many each worker selects; rounded only then, or few would stay few

    def select(self, accumulated: Tensor) -> list[Tensor]:
        return list(largest(accumulated, round(self._largest)))

    def learn(self, counts: list[int]) -> None:
        now, later = (self.density_at(self.iteration + ahead) for ahead in (0, 1))
        wanted = (now / max(self.stats.density, 1 / self.dim)) ** FOLLOWING
        self._largest = min(max(1.0, self._largest * wanted * (later / now)), float(self.dim))


class MatchedTopKs(TopKs):
    """Of several runs together."""

    def __init__(self, sparsifiers: Sequence[MatchedTopK], device: torch.device) -> None:
        super().__init__(sparsifiers, device)
        self._largest = self._each([each._largest for each in sparsifiers], torch.float64)
        steps = range(self._last + 1)
        self._densities = self._each([[each.density_at(step) for step in steps] for each in sparsifiers], torch.float64)
        later = [[each.density_at(step + 1) for step in steps] for each in sparsifiers]
        self._change = self._each(later, torch.float64) / self._densities

    def most(self) -> Tensor:
        return self._largest.round().long()

    def learn(self, found: Selection, sent: Tensor) -> None:
        density = (sent.double() / self.dim).clamp(min=1 / self.dim)
        wanted = (self.now(self._densities) / density) ** FOLLOWING
        self._largest.mul_(wanted * self.now(self._change)).clamp_(1, self.dim)


SPARSIFIERS[MATCHED] = MatchedTopK
KINDS[MatchedTopK] = MatchedTopKs
