"""CLT-k: the workers take turns to lead; the leader's k largest are everybody's coordinates."""

from __future__ import annotations

import torch
from torch import Tensor

from cdgrab.sparsify.base import Sparsifier
from cdgrab.sparsify.topk import largest


class CyclicLocalTopK(Sparsifier):
    label = "CLT-k"
    exclusive = True  # only one selects

    @property
    def leader(self) -> int:
        return self.iteration % self.workers

    def select(self, accumulated: Tensor) -> list[Tensor]:
        nothing = torch.empty(0, dtype=torch.long, device=accumulated.device)
        return [
            largest(row, self.target) if worker == self.leader else nothing
            for worker, row in zip(self._worker_ids(), accumulated, strict=True)
        ]

    def _share(self, mine: list[Tensor]) -> tuple[list[Tensor], int]:
        """The leader tells everybody."""
        nothing = mine[0].new_empty(0)
        message = torch.empty(self.target, dtype=self._index_type, device=nothing.device)
        if self.leader in self._worker_ids():
            message = mine[self.leader - self.group.local.start].to(self._index_type)
        chosen = self.group.from_worker(self.leader, message).long()
        sent = (self.workers - 1) * self.target * self._index_type.itemsize // self.workers
        return [chosen if worker == self.leader else nothing for worker in range(self.workers)], sent
