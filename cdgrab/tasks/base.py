"""What a task is: data, model, loss, metrics. The training loop knows nothing else about it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..data.sources import Source
from ..errors import CdgrabError

PARTITIONS = ("random", "contiguous")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Task:
    """A task subclass fills these in its constructor and implements the methods below."""

    name: str
    source: Source
    model: nn.Module  # used through its parameters as a function; holds no state of the run
    train_units: int  # ordered units over all workers
    test_units: int
    rows: dict[str, int]  # row counts for the manifest

    def fetch(self, split: str, indices: Tensor) -> tuple[Tensor, ...]:
        """The data of units `indices` [...]: tensors whose first dimensions are those of `indices`."""
        raise NotImplementedError

    def loss(self, parameters: dict[str, Tensor], *batch: Tensor) -> Tensor:
        """Scalar mean loss of one unit, or of a stack of units along the first dimension."""
        raise NotImplementedError

    def totals(self, split: str, parameters: dict[str, Tensor], *batch: Tensor) -> dict[str, Tensor]:
        """Sums over a stack of units from which `metrics` is made; sums of different stacks are added."""
        raise NotImplementedError

    def metrics(self, train: dict[str, float], test: dict[str, float]) -> dict[str, float]:
        """`train_loss` and the test metrics by name, from the totals of both splits."""
        raise NotImplementedError

    def progress(self) -> Iterator[str]:
        """Optional extra lines for the log when the task is ready."""
        yield from ()


def partition(units: int, workers: int, how: str, permutation: Tensor) -> Tensor:
    """Which units each worker owns, LongTensor [workers, units per worker].

    An equal split: the units % workers left over are not trained on. random: dealt out by `permutation`;
    contiguous: in file order, as the published code does.
    """
    per_worker = units // workers
    if per_worker < 1:
        raise CdgrabError(f"there are fewer training units ({units}) than workers ({workers}); use fewer workers")
    owned = permutation if how == "random" else torch.arange(units)
    return owned[: per_worker * workers].view(workers, per_worker)
