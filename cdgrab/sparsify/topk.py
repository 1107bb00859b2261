"""Top-k: every worker its k largest. The union grows with the number of workers (gradient build-up)."""

from __future__ import annotations

from torch import Tensor

from cdgrab.sparsify.base import Sparsifier


def largest(values: Tensor, k: int) -> Tensor:
    """Where the k largest magnitudes of a vector are, in no particular order."""
    return values.abs().topk(k, sorted=False).indices


class TopK(Sparsifier):
    label = "Top-k"

    def select(self, accumulated: Tensor) -> list[Tensor]:
        return [largest(row, self.target) for row in accumulated]
