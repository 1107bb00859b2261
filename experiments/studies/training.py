"""Training runs as parts of a study: with the tasks, sorters and loop of all other runs, but without files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from cdgrab import streams
from cdgrab.errors import DivergedError
from cdgrab.runtime.connection import pick_device
from cdgrab.runtime.group import WorkerGroup
from experiments.store.records import significant
from experiments.tasks import make_task
from experiments.training.config import Run, compose, flatten
from experiments.training.grouping import first_members, groups, make_member
from experiments.training.loop import Trainer
from experiments.training.member import Member, evaluated

OF_THE_RUN = ("workers", "epochs", "device")  # settings that belong to a run and not to its task
AT_ONCE = {"cpu": 32, "cuda": 96}  # runs: more gain little, and a group leaves its results when all of it is done
PORTIONS = 4  # for every process
METRICS = ("train_", "test_", "herding_per_step")  # prefixes of the metrics that are kept
Columns = Callable[[list[dict]], dict[str, list]]  # from a run's metrics by epoch, the untrained model's first
TEST_METRICS = {"lr_hmda": "test_accuracy", "mlp_m4": "test_smape", "cifar10": "test_accuracy"}


def overrides(settings: DictConfig, task: str, sorter: str, **changes: object) -> list[str]:
    """The run of one task as given under `tasks` in configs/study/<name>.yaml, with some of its settings changed.

    A sorter may have options, as in the folder names of runs: "cd_grab,sketch=countsketch,sketch_size=64".
    """
    name, *options = sorter.split(",")
    chosen = {"device": "cpu"} | flatten(OmegaConf.to_container(settings.tasks[task])) | changes
    chosen = {key if key in OF_THE_RUN else f"task.{key}": value for key, value in chosen.items()}
    data = "embedded" if settings.sources[task] == "embedded" else "auto"
    return [
        *(f"task={task}", f"sorter={name}", f"data={data}", "size=paper"),
        f"compile={settings.compile}",
        *(f"{key}={'null' if value is None else value}" for key, value in chosen.items()),
        *(f"sorter.{option}" for option in options),
    ]


def outcome(epochs: list[dict]) -> dict[str, list]:
    """The results of a run as columns of one row: every metric's mean over the last half of its epochs.

    Single epochs vary more than sorters differ. `start_loss` is the loss of the untrained model. Metrics that are not
    measured in every epoch are averaged over those in which they are.
    """
    last_half = epochs[1 + (len(epochs) - 1) // 2 :]
    names = [name for name in dict.fromkeys(key for line in epochs for key in line) if name.startswith(METRICS)]
    means = {name: float(np.mean([line[name] for line in last_half if name in line] or [np.nan])) for name in names}
    row = {"start_loss": epochs[0]["train_loss"], **means}
    return {key: significant([value]) for key, value in row.items()} | {"epochs_done": [len(epochs) - 1]}


@dataclass(frozen=True)
class TrainingRun:
    """A run as part of a study; `columns` gives its results."""

    overrides: tuple[str, ...]
    seed: int
    columns: Columns = outcome


def outcomes(runs: Sequence[TrainingRun]) -> list[dict[str, list]]:
    """The results of runs that are `alike`. They train together, as many at a time as memory has room for."""
    return [run.columns(epochs) for run, epochs in zip(runs, train(runs), strict=True)]


def alike(runs: Sequence[TrainingRun], processes: int) -> list[list[int]]:
    """The numbers of runs that train together, for so many processes. On a CPU they share all runs in small portions,
    so that nobody waits long for the last; a GPU, which they share, needs large ones."""
    composed = [_with_seed(_composed(run.overrides), run.seed, Path()) for run in runs]
    share = len(runs) if processes == 1 else -(-len(runs) // (PORTIONS * processes))
    portions = []
    for group in groups(composed, [False] * len(runs), most=AT_ONCE["cuda"]):
        if pick_device(composed[group[0]].config.device).type == "cuda":
            portions.append(group)
            continue
        for start in range(0, len(group), AT_ONCE["cpu"]):
            some = group[start : start + AT_ONCE["cpu"]]
            count = -(-len(some) // min(AT_ONCE["cpu"], share))
            portions += [some[first::count] for first in range(count)]
    return portions


def train(runs: Sequence[TrainingRun]) -> list[list[dict]]:
    """Metrics by epoch of each run, starting with the untrained model; a run that diverges ends early."""
    results: list[list[dict]] = []
    while len(results) < len(runs):
        results += _train_first(runs[len(results) :])
    return results


def _train_first(runs: Sequence[TrainingRun]) -> list[list[dict]]:
    """The same of as many of these runs, from the first one on, as fit into memory."""
    composed = [_with_seed(_composed(run.overrides), run.seed, Path()) for run in runs]
    device, group = pick_device(composed[0].config.device), WorkerGroup(composed[0].config.workers)
    members = first_members(composed, group, device)
    trainer = Trainer(members, saved=False)
    for member, metrics in evaluated(trainer.going()):
        member.log = _Epochs(metrics, member.sizes)
    with contextlib.suppress(DivergedError):
        trainer.fit()
    return [member.log.epochs for member in members]


def lone_member(run_overrides: list[str], seed: int) -> Member:
    """Such a run on its own."""
    run = _with_seed(_composed(tuple(run_overrides)), seed, Path())
    return make_member(run, WorkerGroup(run.config.workers), pick_device(run.config.device))


def partition(run_overrides: list[str], seed: int) -> tuple[Tensor, Tensor]:
    """The units of each worker of such a run, [workers, units], and the classes of all units."""
    run = _with_seed(_composed(tuple(run_overrides)), seed, Path())
    task = make_task(run.config, run.source, torch.device("cpu"))
    return task.partition(streams.permutation(task.train_units, seed, "partition"), seed), task.train_labels


@lru_cache(maxsize=256)
def _composed(run_overrides: tuple[str, ...]) -> Run:
    """Composed once for all seeds: it takes as long as a small run."""
    return compose(list(run_overrides))


def _with_seed(run: Run, seed: int, folder: Path) -> Run:
    config = deepcopy(run.config)
    config.seed = seed
    return replace(run, config=config, directory=folder)


def test_metric(task: str) -> str:
    """The test metric that tables and verdicts show."""
    return TEST_METRICS.get(task, "test_loss")


class _Epochs:
    """Replaces a run's log, and keeps the metrics in memory."""

    def __init__(self, untrained: dict[str, float], sizes: dict[str, int]) -> None:
        self.epochs, self._sizes = [untrained], sizes

    def record(self, metrics: dict) -> None:
        self.epochs.append(metrics | self._sizes)

    def finish(self, status: str, reason: str | None = None) -> None:
        pass
