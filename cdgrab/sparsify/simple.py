"""Simple sparsifiers that adapt to nothing: dense, Top-k, CLT-k and a hard threshold."""

from __future__ import annotations

import torch
from torch import Tensor

from cdgrab.checks import number
from cdgrab.errors import CdgrabError
from cdgrab.sparsify.base import Sparsifier, wanted
from cdgrab.sparsify.threshold import first_guess, largest, reaching


class Dense(Sparsifier):
    """No sparsification: every worker sends everything; `density` is ignored and nothing is fed back."""

    label = "dense"
    options = ()

    def __init__(self, **settings) -> None:
        super().__init__(**settings, error_feedback=False)

    def select(self, accumulated: Tensor) -> list[Tensor]:
        return [torch.arange(self.dim, device=accumulated.device)] * self.local_workers

    def _share(self, mine: list[Tensor]) -> tuple[list[Tensor], int]:
        return mine[:1] * self.workers, 0  # everybody knows: nothing is sent

    def _union(self, selected: list[Tensor]) -> Tensor:
        return selected[0]


class TopK(Sparsifier):
    """Top-k (Aji, Heafield 2017, arXiv 1704.05021): every worker selects its k largest. The union grows with the number
    of workers, which is called gradient build-up."""

    label = "Top-k"

    def select(self, accumulated: Tensor) -> list[Tensor]:
        return list(largest(accumulated, self.target))


class CyclicLocalTopK(Sparsifier):
    """CLT-k (ScaleCom, Chen et al. 2020, arXiv 2104.11125): the workers take turns as leader; all send the coordinates
    of the leader's k largest."""

    label = "CLT-k"
    exclusive = True  # only one selects

    @property
    def leader(self) -> int:
        return self.iteration % self.workers

    def select(self, accumulated: Tensor) -> list[Tensor]:
        nothing = torch.empty(0, dtype=torch.long, device=accumulated.device)
        return [
            largest(row, self.target) if worker == self.leader else nothing
            for worker, row in zip(self.worker_ids(), accumulated, strict=True)
        ]

    def _share(self, mine: list[Tensor]) -> tuple[list[Tensor], int]:
        """The leader broadcasts its coordinates."""
        nothing = mine[0].new_empty(0)
        message = torch.empty(self.target, dtype=self._index_type, device=nothing.device)
        if self.leader in self.worker_ids():
            message = mine[self.leader - self.group.local.start].to(self._index_type)
        chosen = self.group.from_worker(self.leader, message).long()
        sent = (self.workers - 1) * self.target * self._index_type.itemsize // self.workers
        return [chosen if worker == self.leader else nothing for worker in range(self.workers)], sent


class HardThreshold(Sparsifier):
    """Every worker sends whatever reaches a fixed value. How much that is depends on the gradients' scale."""

    label = "hard threshold"
    options = (*Sparsifier.options, "value")
    saved = ("_residual",)

    def __init__(self, *, value: float | None = None, **settings) -> None:
        """value: the threshold; by default 1 / (2 √k)."""
        super().__init__(**settings)
        self._given = value is not None
        if self._given and self.warm_up_steps:
            raise CdgrabError("value fixes the threshold, and no density warms up: leave out value or warm_up_steps")
        usual = first_guess(wanted(self.density, self.dim))
        self.value = number("value", value, above=0) if self._given else usual

    def select(self, accumulated: Tensor) -> list[Tensor]:
        return [reaching(row, self._threshold()) for row in accumulated]

    def _threshold(self) -> float:
        return self.value if self._given else first_guess(self.target)
