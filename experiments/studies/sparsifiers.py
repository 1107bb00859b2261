"""Sparsifiers in a study: names with options, measurements on synthetic gradients, and training."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field

import numpy as np
import torch
import yaml
from torch import Tensor

from cdgrab.runtime.group import WorkerGroup
from cdgrab.sparsify import SPARSIFIERS, Sparsifier, make_sparsifier
from experiments.report.names import readable, task_name
from experiments.store.records import significant
from experiments.studies.matched import MATCHED
from experiments.studies.synthetic import LayeredGradients, SparseModel

OURS, PUBLISHED, TOPK, DENSE = "exdyna", "exdyna,rule=paper,threshold=paper", "topk", "dense"
STATIC, FIXED, FORGETFUL = "exdyna,rule=static", "exdyna,threshold=fixed", "exdyna,error_feedback=false"
RULES = (STATIC, "exdyna,rule=paper", "exdyna,rule=relative", OURS)
# thresholds are compared without a limit per worker, which would hide a threshold that is too low
THRESHOLDS = tuple(f"exdyna,rule=relative,threshold={t}" for t in ("counted", "proportional", "paper", "fixed"))
ABLATED = (DENSE, OURS, STATIC, FIXED, FORGETFUL, TOPK)
RESNET = "cifar10, ResNet-18"
MODELS = {"cifar10": "LeNet-CIFAR-10", RESNET: "ResNet-18-CIFAR-10"}  # tasks that this study has with two models
TRAINED_DENSITY = 0.01
CLOSE, FAR = 0.1, 0.3  # relative errors of the density
SAME_DENSITY = 0.15  # densities that differ by less, relatively, count as the same

REDUCTIONS, REPEATS = 3, 7  # reductions before times are measured, and how many times they are measured
TOO_LARGE = 3.0  # where settling is measured, gradients are too large for the paper's first threshold by this factor
SPARSE = {"words": 20_000, "width": 8, "length": 20}
SPARSE_TRAINING = {"batch": 8, "rate": 1.0}
SHORT = {
    "error_feedback=false": "no error feedback",
    "faithful=true": "faithful",
    "momentum=0": "no momentum",
    "momentum_correction=0.9": "momentum correction",
    "momentum_masking=false": "not masked",
    "rate=0.5": "half the rate",
    "threshold=fixed": "fixed threshold",
    "warm_up=true": "warm-up",
}


def options_of(method: str) -> tuple[str, dict]:
    """exdyna,rule=paper -> ("exdyna", {"rule": "paper"})"""
    name, *options = method.split(",")
    return name, {key: yaml.safe_load(value) for key, value in (option.split("=") for option in options)}


def method_label(method: str) -> str:
    """The name in figures, tables and verdicts."""
    name, *options = method.split(",")
    if method == PUBLISHED:
        return "ExDyna as published"
    plain = getattr(SPARSIFIERS[name], "label", None) or readable(name)
    return ", ".join([plain, *(SHORT.get(option, option.replace("=", " ")) for option in options)])


def variant(method: str) -> str:
    """Its last option, which distinguishes it from the others of RULES or THRESHOLDS."""
    return method.rpartition("=")[2] if "=" in method else "balanced"


def task_label(task: str) -> str:
    return MODELS.get(task) or task_name(task)


def part_key(
    measure: str, method: str, workers: int, density: float, seed: int, task: str = "", sorter: str = ""
) -> dict:
    """What names a part of the study."""
    key = {"measure": measure, "method": method, "workers": workers, "target": density, "task": task, "sorter": sorter}
    return key | {"seed": seed}


def build(method: str, workers: int, dim: int, density: float, **more: object) -> Sparsifier:
    name, options = options_of(method)
    return make_sparsifier(name, workers=workers, dim=dim, density=density, **options, **more)


# -- synthetic gradients ----------------------------------------------------------------------------------------------


def layered(
    method: str, workers: int, density: float, dim: int, iterations: int, seed: int, shrinks: bool = False, **shape
) -> dict[str, list]:
    """What a method does to layered gradients, by iteration; `ratio` is actual density / target.

    shrinks: gradients are too large for the paper's first threshold; after a third of the iterations they shrink
    tenfold.
    """
    sparsifier, kept = build(method, workers, dim, density), []
    gradients = LayeredGradients(workers, dim, seed, **shape)
    scale = _right_scale(dim, density, seed, **shape) * (TOO_LARGE if shrinks else 1.0)
    for iteration in range(iterations):
        later = 0.1 if shrinks and iteration >= iterations // 3 else 1.0
        sparsifier.reduce(gradients().mul_(scale * later))
        kept.append(sparsifier.stats | {"ratio": sparsifier.stats.density / sparsifier.density})
    columns = {name: column([stats[name] for stats in kept]) for name in ("ratio", "imbalance", "threshold", "bytes")}
    return {"iteration": list(range(iterations))} | columns


def sparse_model(method: str, workers: int, density: float, steps: int, seed: int) -> dict[str, list]:
    """Ten losses during training, and means over all steps; `nonzero`: the share of a worker's gradient that is not
    zero."""
    model = SparseModel(**SPARSE, seed=seed)
    sparsifier, seen = build(method, workers, model.dim, density), []

    def reduce(gradients: Tensor) -> Tensor:
        update, stats = sparsifier.reduce(gradients), sparsifier.stats
        seen.append((stats.density, stats.imbalance, float((gradients != 0).double().mean())))
        return update

    losses = model.train(reduce, workers, steps=steps, **SPARSE_TRAINING)
    means = dict(zip(("density", "imbalance", "nonzero"), np.mean(seen, axis=0), strict=True))
    columns = {name: significant([value] * len(losses), 4) for name, value in means.items()}
    return {"epoch": list(range(1, len(losses) + 1)), "train_loss": significant(losses)} | columns


def selection_seconds(methods: list[str], workers: int, density: float, dim: int, seed: int) -> dict[str, list]:
    """Seconds that workers take to select, on one core, with the methods taking turns; medians of repetitions.

    The workers select one after the other from the same gradient. `selection`: the mean over those that select
    anything; `slowest`: the time of the slowest worker, for which the others wait. `longest`: the length of the longest
    partition, as a multiple of the mean, if there are partitions. `ratio`: actual density over the wanted one.
    """
    return timed_selection(methods, LayeredGradients(1, dim, seed)().expand(workers, dim), density)


def timed_selection(methods: list[str], rows: Tensor, density: float) -> dict[str, list]:
    """The same for what each worker selects from, rows [workers, dim]."""
    workers, dim = rows.shape
    ready = [
        build(method, workers, dim, density, error_feedback=False, group=RecordingGroup(workers)) for method in methods
    ]
    for sparsifier in ready:
        for _ in range(REDUCTIONS):
            sparsifier.reduce(rows)
    seconds = [[_seconds_by_worker(sparsifier, rows) for sparsifier in ready] for _ in range(REPEATS)]
    medians = np.median(seconds, axis=0)  # [methods, workers]
    selecting = [sum(len(indices) > 0 for indices in sparsifier.selected) for sparsifier in ready]
    return {
        "timed": methods,
        "selection": significant(medians.sum(1) / selecting, 4),
        "slowest": significant(medians.max(1), 4),
        "longest": [_longest_partition(sparsifier) for sparsifier in ready],
        "ratio": significant([len(torch.cat(s.selected).unique()) / (density * dim) for s in ready], 4),
    }


@dataclass(frozen=True)
class RecordingGroup(WorkerGroup):
    """All workers in one process. Records the results of their collectives."""

    answers: list[Tensor] = field(default_factory=list)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.answers.append(super().all_reduce(tensor))
        return self.answers[-1]

    def from_worker(self, worker: int, tensor: Tensor) -> Tensor:
        self.answers.append(super().from_worker(worker, tensor))
        return self.answers[-1]


@dataclass(frozen=True)
class ReplayingGroup(WorkerGroup):
    """One of these workers on its own, with the recorded results of the collectives."""

    answers: Iterator[Tensor] = field(kw_only=True)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return next(self.answers)

    def from_worker(self, worker: int, tensor: Tensor) -> Tensor:
        return next(self.answers)


def _seconds_by_worker(sparsifier: Sparsifier, rows: Tensor) -> list[float]:
    sparsifier.group.answers.clear()
    copy(sparsifier).prepare(rows)
    of_workers, seconds = sparsifier.state_dict()["per_worker"], []
    for worker, row in enumerate(rows.split(1)):
        alone = copy(sparsifier)
        alone.group = ReplayingGroup(len(rows), worker, len(rows), answers=iter(sparsifier.group.answers))
        for name, values in of_workers.items():
            setattr(alone, name, values[worker : worker + 1])
        start = time.perf_counter()
        alone.prepare(row)
        alone.select(row)
        seconds.append(time.perf_counter() - start)
    return seconds


def _right_scale(dim: int, density: float, seed: int, **shape: float) -> float:
    """The scale at which as many coordinates as wanted of a worker's first gradient reach the threshold of
    `hard_threshold`, where the paper's rule starts. Methods that measure the scale do not need this help."""
    fixed = build("hard_threshold", 1, dim, density)
    return fixed.value / float(LayeredGradients(1, dim, seed, **shape)().abs().flatten().topk(fixed.target).values[-1])


def _longest_partition(sparsifier: Sparsifier) -> float | None:
    if not hasattr(sparsifier, "partitions"):
        return None
    return round(float(np.diff(sparsifier.partitions()).max()) * sparsifier.workers / sparsifier.dim, 3)


def column(values: list[float | None]) -> list[float | None]:
    return [None if value is None or math.isnan(value) else float(f"{value:.4g}") for value in values]


# -- training ---------------------------------------------------------------------------------------------------------


def sparsified(run_overrides: list[str], method: str, density: float | None = TRAINED_DENSITY) -> list[str]:
    """The run with this method, at the density at which methods are compared; None: it has none."""
    name, options = options_of(method)
    trained = MATCHED if name == TOPK else name
    chosen = [f"sparsifier={trained}", *(f"sparsifier.{key}={value}" for key, value in options.items())]
    if name != DENSE and density:
        chosen.append(f"sparsifier.density={density}")
    return [*run_overrides, *chosen]


def by_epoch(epochs: list[dict]) -> dict[str, list]:
    """Train loss, metrics of the test set, and what the sparsifier did; epoch 0 is the untrained model."""
    columns = {key: significant([line[key] for line in epochs]) for key in epochs[0]}
    for key in ("density", "imbalance", "bytes"):
        columns[key] = column([line.get("sparsifier", {}).get(key) for line in epochs])
    return {"epoch": list(range(len(epochs)))} | columns
