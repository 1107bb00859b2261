"""Hard threshold: every worker whatever reaches one fixed value. How much that is depends on the gradients' scale."""

from __future__ import annotations

import math

from torch import Tensor

from cdgrab.checks import number
from cdgrab.sparsify.base import Sparsifier

SMALLEST = 1.2e-38  # the smallest normal float32: a threshold below would let zeros pass


def reaching(values: Tensor, threshold: float) -> Tensor:
    """Where the magnitudes of a vector are at least `threshold`, in ascending order."""
    return (values.abs() >= threshold).nonzero().squeeze(1)


def first_guess(k: int) -> float:
    """The threshold of the ExDyna paper's experiments: right for gradients of one scale."""
    return 1 / (2 * math.sqrt(k))


class HardThreshold(Sparsifier):
    label = "hard threshold"
    options = (*Sparsifier.options, "value")

    def __init__(self, *, value: float | None = None, **settings) -> None:
        """value: the threshold; by default 1 / (2 √k)."""
        super().__init__(**settings)
        self.value = first_guess(self.target) if value is None else number("value", value, above=0)

    def select(self, accumulated: Tensor) -> list[Tensor]:
        return [reaching(row, self.value) for row in accumulated]

    def _threshold(self) -> float:
        return self.value

    def _options(self) -> dict:
        return {"value": self.value}
