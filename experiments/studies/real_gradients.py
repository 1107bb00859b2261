"""Sparsifiers in the training of real models: what every iteration selects, and what selecting costs there.

In the suite's own loop. In its course gradients may shrink tenfold, as they do for a sparsifier when the learning rate
decays and is applied before selecting; nothing is multiplied back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from cdgrab.sparsify import SparseAverager, Sparsifier
from experiments.report.names import BASELINE
from experiments.studies.sparsifiers import CLOSE, column, options_of, timed_selection
from experiments.studies.training import lone_member, overrides
from experiments.training.clock import Clock
from experiments.training.loop import Trainer

WINDOW = 5  # iterations of which one row of results is the mean
DROP = 0.1
IMAGES = 64  # of all workers in a step, as in the paper
ACCUMULATED = 4  # iterations after which the time of selecting is measured


class Watched(SparseAverager):
    """Keeps what every iteration selects."""

    def __init__(self, sparsifier: Sparsifier, drop: int | None) -> None:
        """drop: the iteration from which on gradients are a tenth of what they are; None: never."""
        super().__init__(sparsifier)
        self._drop, self.seen = drop, []
        self.last: Tensor | None = None  # gradients

    def average(self, worker_means: Tensor, want_shard: bool = False) -> tuple[Tensor, None]:
        dropped = self._drop is not None and self.sparsifier.iteration >= self._drop
        self.last = worker_means * DROP if dropped else worker_means
        update, stats = self.sparsifier.reduce(self.last), self.sparsifier.stats
        self.seen.append((stats.density / self.sparsifier.density, stats.imbalance, stats.threshold))
        return update, None


def run_of(settings: DictConfig, task: str, method: str, workers: int, density: float) -> list[str]:
    """A run of the task with this sparsifier. A worker of the LSTM reads one column of the text."""
    batch = {"cifar10": IMAGES, "lstm_wiki2": workers}[task]
    name, options = options_of(method)
    chosen = [f"sparsifier={name}", *(f"sparsifier.{key}={value}" for key, value in options.items())]
    run = overrides(settings, task, BASELINE, batch=batch, workers=workers, device="cpu")
    return [*run, *chosen, f"sparsifier.density={density}"]


def watched(run: list[str], iterations: int, seed: int, drop: int | None = None) -> tuple[Watched, list[float]]:
    """Train for so many iterations, in as many epochs as it takes; also the mean loss over the workers in each."""
    member = lone_member(run, seed)
    member.sparse_mean = mean = Watched(member.sparse_mean.sparsifier, drop)
    trainer, losses = Trainer([member]), []
    with torch.no_grad():
        for epoch in count():
            visits = trainer.owned.gather(-1, member.order(epoch))
            for start, end, microbatch in trainer.blocks:
                steps = visits[..., start:end].unflatten(-1, (-1, microbatch))[..., : iterations - len(losses), :]
                losses += trainer.loop.run(steps, Clock(), first=start == 0)[1].mean(0).tolist()
                if len(losses) == iterations:
                    return mean, losses


def density(run: list[str], iterations: int, seed: int, drop: int | None = None) -> dict[str, list]:
    """What the sparsifier of a run selects, and the loss."""
    mean, losses = watched(run, iterations, seed, drop)
    return windows(mean.seen, losses)


def windows(seen: Sequence[tuple[float, float, float | None]], losses: Sequence[float]) -> dict[str, list]:
    """Means over WINDOW iterations. `ratio`: actual density / target; `error`: its distance from 1; `near`: the share
    of iterations in which it is close."""
    ratios, imbalances, thresholds = (np.array(values, dtype=float) for values in zip(*seen, strict=True))
    error = abs(ratios - 1)
    columns = {"ratio": ratios, "error": error, "near": error <= CLOSE, "imbalance": imbalances}
    columns |= {"threshold": thresholds, "train_loss": np.array(losses)}
    starts = list(range(0, len(ratios), WINDOW))
    means = {
        name: column([values[start : start + WINDOW].mean() for start in starts]) for name, values in columns.items()
    }
    return {"iteration": starts} | means


def selection_seconds(methods: list[str], run: list[str], target: float, seed: int) -> dict[str, list]:
    """As for made-up gradients, but every worker selects from its own: what it has not sent yet, and the last one."""
    mean, _ = watched(run, ACCUMULATED, seed)
    return timed_selection(methods, mean.sparsifier.state_dict()["per_worker"]["_residual"] + mean.last, target)
