"""What a task is: data, model, loss, metrics. The training loop knows nothing else about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from cdgrab import streams
from cdgrab.checks import count
from cdgrab.errors import CdgrabError
from experiments.data.sources import Source
from experiments.tasks.partition import label_skewed

PARTITIONS = ("random", "contiguous", "dirichlet")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Task:
    """A task fills these in its constructor and implements `fetch`, `loss`, `totals` and `metrics`.

    Parameters travel as a dict of named tensors: `model` is used as a function and holds no state of the run. What a
    worker hands on from one unit to the next (a recurrent state) is its `carry`, a tuple of tensors, empty for most.
    """

    name: str
    config: DictConfig
    source: Source
    model: nn.Module
    train_units: int  # ordered units over all workers
    test_units: int
    train_labels: Tensor | None = None  # classes of the training units, where they have any
    rows: dict[str, int]  # counts for the manifest; "all" is the one that captions give
    counted = "rows"  # what that one counts

    def __init__(self, config: DictConfig, source: Source, workers: int) -> None:
        self.config, self.source, self.workers = config, source, workers

    def fetch(self, split: str, indices: Tensor) -> tuple[Tensor, ...]:
        """The data of units `indices` [...]: tensors whose first dimensions are those of `indices`."""
        raise NotImplementedError

    def loss(self, parameters: dict[str, Tensor], carry: tuple[Tensor, ...], *batch: Tensor) -> tuple[Tensor, tuple]:
        """Mean loss of one unit, or of a stack of units along the first dimension, and the carry after it."""
        raise NotImplementedError

    def totals(self, split: str, parameters: dict[str, Tensor], units: Tensor) -> dict[str, Tensor]:
        """Sums over `units` [n], the shares of one or more workers, at most a few at a time in memory."""
        raise NotImplementedError

    def metrics(self, train: dict[str, float], test: dict[str, float]) -> dict[str, float]:
        """`train_loss` and the test metrics by name, from the totals of both splits."""
        raise NotImplementedError

    def first_carry(self, workers: int) -> tuple[Tensor, ...]:
        """The carry of some workers at the start of an epoch, tensors [workers, ...]."""
        return ()

    @property
    def units_per_step(self) -> int:
        """How many units every worker visits in one step."""
        return self.config.batch // self.workers

    def partition(self, permutation: Tensor, seed: int = 0) -> Tensor:
        """Which units each worker owns, LongTensor [workers, units per worker]: an equal split.

        The units % workers left over are not trained on. random: dealt out by `permutation`; contiguous: in file
        order, as the published code does; dirichlet: every worker with its own mix of classes. `truncate` drops units
        until every worker has an even number of full steps.
        """
        units, workers = self.train_units, self.workers
        if self.config.truncate:
            units -= units % (2 * workers * self.units_per_step)
        per_worker = units // workers
        if per_worker < 1:
            raise CdgrabError(f"there are fewer training units ({self.train_units}) than workers ({workers}) need")
        if self.config.partition == "dirichlet":
            if self.train_labels is None:
                raise CdgrabError(f"task.partition=dirichlet needs classes, which the units of {self.name} don't have")
            return label_skewed(self.train_labels.cpu(), workers, per_worker, self.config.alpha, permutation, seed)
        owned = permutation if self.config.partition == "random" else torch.arange(units)
        return owned[: per_worker * workers].view(workers, per_worker)


def add_totals(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Sums of sums, in the order given, in float64."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value.double()
    return total


def perplexity(mean_loss: float) -> float:
    """Infinity, not an exception, for a model that has diverged."""
    return math.exp(mean_loss) if mean_loss < 700 else math.inf


def initialised(build: Callable[[], nn.Module], seed: int, dtype: str, device: torch.device) -> nn.Module:
    """A model with PyTorch's own initialisation, drawn from the run's seed on the CPU whatever the device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(streams.stream(seed, "parameters").integers(2**63)))
        return build().to(device=device, dtype=DTYPES[dtype])


def counts(config: DictConfig, least: dict[str, int], may_be_null: Iterable[str] = ()) -> None:
    """Every named key of a task's config is a whole number of at least so much, or null where that is allowed."""
    for key, smallest in least.items():
        if not (config[key] is None and key in may_be_null):
            count(f"task.{key}", config[key], smallest)
