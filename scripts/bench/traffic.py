"""Bytes that a process sends per step, counted at the collectives of a real training epoch.

Beside them stand what a plain all-reduce of the mean gradient sends, and what the published code sends: everybody's
unit gradients to everybody.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from cdgrab import workers
from cdgrab.config import Run, compose
from cdgrab.tasks.base import Task
from cdgrab.train import Trainer

from .epoch import train_epoch
from .measure import under_torchrun

DIM = {"smoke": 40_000, "quick": 1_080_000, "full": 1_080_000}  # the LSTM's
PROCESSES = {"smoke": (2,), "quick": (2, 4, 8), "full": (2, 4, 8)}
UNITS_PER_STEP = (1, 4)
STEPS = 8
FLOAT = 4  # bytes


def measure(device: str, size: str) -> list[dict]:
    """The same on every device: what is sent does not depend on it."""
    rows = []
    for processes in PROCESSES[size]:
        found = under_torchrun("scripts.bench.traffic", processes, (DIM[size],))
        for units in UNITS_PER_STEP:
            counted = [by_rank[str(units)] for by_rank in found]
            rows.append({"device": device} | _row(processes, units, DIM[size], counted))
            print("  {processes} processes, {units_per_step} units per step: {bytes:,} bytes, all-reduce "
                  "{allreduce_bytes:,}, author-style {author_bytes:,}".format(**rows[-1]), flush=True)  # fmt: skip
    return rows


def _row(processes: int, units: int, dim: int, counted: list[dict[str, float]]) -> dict:
    """Of the process that sends most."""
    allreduce = round(2 * (processes - 1) / processes * dim * FLOAT)
    most = max(by_sorter["cd_grab"] for by_sorter in counted)
    return {
        "processes": processes,
        "units_per_step": units,
        "bytes": round(most),
        "allreduce_bytes": allreduce,
        "author_bytes": (processes - 1) * units * dim * FLOAT,
        "d_rr_bytes": round(max(by_sorter["d_rr"] for by_sorter in counted)),
        "ratio": round(most / allreduce, 5),
        "dim": dim,
    }


# -- in every process --------------------------------------------------------------------------------------------------


class Pull(Task):
    """Any number of parameters, each pulled towards its unit's value: nothing to compute, all the bytes to send."""

    name = "pull"

    def __init__(self, run: Run, dim: int, units: int) -> None:
        super().__init__(run.config.task, run.source, run.config.workers)
        self.model = nn.Linear(dim, 1, bias=False)
        self.train_units, self.test_units = units, 0
        self._values = torch.randn(units, generator=torch.Generator().manual_seed(0))

    def fetch(self, split: str, indices: Tensor) -> tuple[Tensor, ...]:
        return (self._values[indices],)

    def loss(self, parameters: dict[str, Tensor], carry: tuple, *batch: Tensor) -> tuple[Tensor, tuple]:
        return 0.5 * (parameters["weight"][0] - batch[0][..., None]).square().mean(0).sum(), carry


def bytes_per_step(sorter: str, units_per_step: int, dim: int) -> float:
    processes = workers.launched_world_size()
    per_step = units_per_step * processes
    run = compose(
        [f"sorter={sorter}", f"workers={processes}", f"task.batch={per_step}", "task.dtype=float32", "data=embedded"]
    )
    group = workers.connect(processes)
    trainer = Trainer(run, Pull(run, dim, per_step * STEPS), group, torch.device("cpu"))
    before = group.traffic.sent
    with torch.no_grad():
        train_epoch(trainer, trainer.sorter.order(0), 0)
    return (group.traffic.sent - before) / trainer.steps


def main(target: str, dim: str) -> None:
    torch.set_num_threads(1)
    found = {
        units: {sorter: bytes_per_step(sorter, units, int(dim)) for sorter in ("d_rr", "cd_grab")}
        for units in UNITS_PER_STEP
    }
    Path(f"{target}{workers.launched_rank()}").write_text(json.dumps(found))
    workers.disconnect()


if __name__ == "__main__":
    main(*sys.argv[1:])
