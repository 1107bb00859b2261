"""What a task is: data, model, loss, metrics. The training loop knows nothing else about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property, partial
from types import ModuleType

import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.func import functional_call, vmap

from cdgrab import streams
from cdgrab.errors import CdgrabError
from experiments.data.sources import Source
from experiments.tasks.partition import label_skewed
from experiments.tasks.settings import Check, complaints, refuse

PARTITIONS = ("random", "contiguous", "dirichlet")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Task:
    """A task has a `dataset` or its own `locate`, and a constructor that sets `data`, `model`, and other attributes
    below if their defaults do not fit. It implements `loss`, `measure` and `metrics`, or is a `Classification`.

    Parameters are passed as a dict of named tensors: `model` is used as a function and holds no state of the run. What
    a worker passes on from one unit to the next (a recurrent state) is its `carry`, a tuple of tensors, mostly empty.
    """

    name: str
    dataset: ModuleType  # with `locate(data, root)` and `load(source)`, as in `experiments.data`
    settings: Mapping[str, Check] = {}  # the settings of its yaml beyond those of every task, and what they must be
    one_unit_per_step = False  # of every worker, however large a batch is
    evaluated_at_once: int | None = None  # units; None: all of a worker's
    evaluated_together = False  # whether a GPU evaluates several runs at once: for small models

    data: dict[str, tuple[Tensor, ...]]  # by split (train, test): the tensors [units, ...] that `fetch` reads
    model: nn.Module
    # (parameters [runs, ...], carry, *batch [runs, workers, ...], into): `loss` of all workers of several runs at once;
    # writes the gradients into tensors [runs, workers, ...]. For tasks on which backward passes are too slow.
    write_gradients: Callable[..., tuple[Tensor, tuple]] | None = None
    # (parameters [runs, ...], *batch [runs, workers, ...]): losses [runs, workers] and, for every linear layer, slopes
    # [runs, workers, n, outputs] and inputs [runs, workers, n, inputs], whose products are the gradients of its weight.
    factors: Callable[..., tuple[Tensor, list[tuple[Tensor, Tensor]]]] | None = None
    train_labels: Tensor | None = None  # classes of the training units, if they have any

    def __init__(self, config: DictConfig, source: Source, workers: int) -> None:
        refuse(list(complaints(OmegaConf.create({"task": config}), self.checks()).values()))
        self.config, self.source, self.workers = config, source, workers

    @classmethod
    def checks(cls) -> dict[str, Check]:
        """Checks of its own settings, by their full names."""
        return {f"task.{key}": check for key, check in cls.settings.items()}

    @classmethod
    def locate(cls, config: DictConfig, data: str, root: str | None) -> Source:
        """Where its data is: `data` is auto or embedded, `root` a folder or None."""
        return cls.dataset.locate(data, root)

    @staticmethod
    def refuse_missing(config: DictConfig, source: Source) -> None:
        """Files that only some settings need, such as a tokenizer's; those of the data are looked for anyway."""

    def load(self, *options: object) -> object:
        """What the dataset reads from the source. Stores the files' checksums in the source."""
        loaded, checksums = self.dataset.load(self.source, *options)
        self.source.checksums.update(checksums)
        return loaded

    @cached_property
    def train_units(self) -> int:
        """Units to be ordered, over all workers."""
        return len(self.data["train"][0])

    @cached_property
    def test_units(self) -> int:
        return len(self.data["test"][0])

    @cached_property
    def rows(self) -> dict[str, int]:
        """Counts for the manifest; captions show "all"."""
        return {"all": self.train_units + self.test_units, "train": self.train_units, "test": self.test_units}

    def fetch(self, split: str, indices: Tensor) -> tuple[Tensor, ...]:
        """The data of units `indices` [...]: tensors whose first dimensions are those of `indices`."""
        return tuple(tensor[indices] for tensor in self.data[split])

    def apply(self, parameters: dict[str, Tensor], *inputs: object) -> Tensor | tuple:
        """The model's output for these inputs, with these parameters."""
        return functional_call(self.model, parameters, inputs)

    def loss(self, parameters: dict[str, Tensor], carry: tuple[Tensor, ...], *batch: Tensor) -> tuple[Tensor, tuple]:
        """Mean loss of one unit, or of a stack of units along the first dimension, and the carry after it."""
        raise NotImplementedError

    def measure(self, split: str, parameters: dict[str, Tensor], units: Tensor) -> dict[str, Tensor]:
        """Sums over `units` [n] by name, from which `metrics` are computed."""
        raise NotImplementedError

    def metrics(self, train: dict[str, float], test: dict[str, float]) -> dict[str, float]:
        """`train_loss` and the test metrics by name, from what was measured on both splits."""
        raise NotImplementedError

    def totals(self, split: str, parameters: dict[str, Tensor], units: Tensor) -> dict[str, Tensor]:
        """What is measured on `units` [n] of one or more workers, with a few units in memory at a time."""
        at_once = self.evaluated_at_once or max(1, len(units))
        return add_totals([self.measure(split, parameters, some) for some in units.split(at_once)])

    def totals_together(self, split: str, parameters: dict[str, Tensor], units: Tensor) -> dict[str, Tensor]:
        """The same of several runs, parameters [runs, ...] and units [runs, n], or [n] for all: sums [runs]."""
        return vmap(partial(self.totals, split), in_dims=(0, 0 if units.dim() > 1 else None))(parameters, units)

    def first_carry(self, workers: int) -> tuple[Tensor, ...]:
        """The carry of some workers at the start of an epoch, tensors [workers, ...]."""
        return ()

    @property
    def units_per_step(self) -> int:
        """How many units every worker visits in one step."""
        return 1 if self.one_unit_per_step else self.config.batch // self.workers

    def partition(self, permutation: Tensor, seed: int = 0) -> Tensor:
        """Which units each worker owns, LongTensor [workers, units per worker]: an equal split.

        The units % workers left over are not trained on. random: distributed by `permutation`; contiguous: in file
        order, as in the published code; dirichlet: every worker has its own mix of classes. `truncate` drops units
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


class Classification(Task):
    """The last tensor of `data` holds the classes; `model` maps the others to logits [..., classes]."""

    def loss(self, parameters: dict[str, Tensor], carry: tuple, *batch: Tensor) -> tuple[Tensor, tuple]:
        *inputs, labels = batch
        return F.cross_entropy(self.apply(parameters, *inputs), labels), carry

    def measure(self, split: str, parameters: dict[str, Tensor], units: Tensor) -> dict[str, Tensor]:
        *inputs, labels = self.fetch(split, units)
        logits = self.apply(parameters, *inputs)
        losses = F.cross_entropy(logits, labels, reduction="sum")
        return {"loss": losses, "correct": (logits.argmax(-1) == labels).sum(), "count": torch.tensor(len(labels))}

    def metrics(self, train: dict[str, float], test: dict[str, float]) -> dict[str, float]:
        return {
            "train_loss": train["loss"] / train["count"],
            "train_accuracy": 100.0 * train["correct"] / train["count"],
            "test_loss": test["loss"] / test["count"],
            "test_accuracy": 100.0 * test["correct"] / test["count"],
        }


def joined(tasks: Sequence[Task]) -> tuple[Task, list[int]]:
    """One task that fetches the training units of all, and the offset of each task's units in it.

    Seeds may split the data differently. If they don't, all share the data of the first."""
    first = tasks[0]
    columns = [task.data["train"] for task in tasks] if len(tasks) > 1 else [()]
    if all(same_tensors(column, columns[0]) for column in columns[1:]):
        for task in tasks[1:]:
            task.data = first.data
        return first, [0] * len(tasks)
    everything = copy(first)
    everything.data = {"train": tuple(map(torch.cat, zip(*columns, strict=True)))}
    offsets = [number * first.train_units for number in range(len(tasks))]
    for task, offset in zip(tasks, offsets, strict=True):  # held once
        part = tuple(tensor[offset : offset + first.train_units] for tensor in everything.data["train"])
        task.data = task.data | {"train": part}
    return everything, offsets


def same_tensors(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(one is other or torch.equal(one, other) for one, other in zip(some, others, strict=True))


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


def initialised(
    build: Callable[[], nn.Module], seed: int, dtype: str, device: torch.device, draws: int | None = None
) -> nn.Module:
    """A model with PyTorch's own initialisation, drawn from the run's seed on the CPU whatever the device.
    draws: a seed of PyTorch's generator to draw from instead."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(streams.stream(seed, "parameters").integers(2**63)) if draws is None else draws)
        return build().to(device=device, dtype=DTYPES[dtype])
