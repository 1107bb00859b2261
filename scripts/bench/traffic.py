"""Bytes that a process sends per step, counted at the collectives of a real training epoch.

Beside them stand what a plain all-reduce of the mean gradient sends, and what the published code sends: everybody's
unit gradients to everybody.

The last row has several workers per process and short gradients: MLP-M4's. Those are not divided by coordinates but
gathered whole (up to `workers.WHOLE` numbers of all processes): that sends processes / 2 times the bytes of an
all-reduce, but they are few, and one collective is faster than two with less traffic. Pair differences go to one
process, in blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from cdgrab.runtime import group as workers
from cdgrab.runtime.connection import connect
from experiments.studies.timing import SORTERS, train_epoch, under_torchrun
from experiments.tasks.base import Task
from experiments.training.config import Run, compose
from experiments.training.loop import alone
from scripts.bench.measure import report

DIM = {"smoke": 40_000, "quick": 1_080_000, "full": 1_080_000}  # the LSTM's
PROCESSES = {"smoke": (2,), "quick": (2, 4, 8), "full": (2, 4, 8)}
UNITS_PER_STEP = (1, 4)
SHORT = {"smoke": (2, 4, 19), "quick": (4, 32, 5_569), "full": (4, 32, 5_569)}  # processes, workers, dim
STEPS = 8
FLOAT = 4  # bytes
describe = (
    "{workers} workers on {processes} processes, {units_per_step} units per step, dim {dim}: {bytes:,} bytes, "
    "all-reduce {allreduce_bytes:,}, author-style {author_bytes:,}"
).format_map


def measure(device: str, size: str) -> Iterator[dict]:
    """The same on every device: what is sent does not depend on it. The row of short gradients comes last."""
    last = []
    for processes in PROCESSES[size]:
        cases = [(processes, units, DIM[size]) for units in UNITS_PER_STEP]
        if processes == SHORT[size][0]:
            cases.append((SHORT[size][1], 1, SHORT[size][2]))
        found = under_torchrun("scripts.bench.traffic", processes, ["/".join(map(str, case)) for case in cases])
        for number, case in enumerate(cases):
            row = {"device": device} | _row(processes, *case, [by_rank[number] for by_rank in found])
            if case[0] > processes:
                last.append(row)
            else:
                yield row
    yield from last


def _row(processes: int, count: int, units: int, dim: int, counted: list[dict[str, float]]) -> dict:
    """Of the process that sends most."""
    allreduce = round(2 * (processes - 1) / processes * dim * FLOAT)
    most = max(by_sorter["cd_grab"] for by_sorter in counted)
    return {
        "processes": processes,
        "workers": count,
        "units_per_step": units,
        "bytes": round(most),
        "allreduce_bytes": allreduce,
        "author_bytes": (processes - 1) * (count // processes) * units * dim * FLOAT,
        "d_rr_bytes": round(max(by_sorter["d_rr"] for by_sorter in counted)),
        "ratio": round(most / allreduce, 5),
        "dim": dim,
        "divided": dim * processes > workers.WHOLE,
    }


# -- in every process --------------------------------------------------------------------------------------------------


class Pull(Task):
    """Any number of parameters, each pulled towards its unit's value: nothing to compute, all the bytes to send."""

    name = "pull"

    def __init__(self, run: Run, dim: int, units: int) -> None:
        super().__init__(run.config.task, run.source, run.config.workers)
        self.model = nn.Linear(dim, 1, bias=False)
        self.data = {"train": (torch.randn(units, generator=torch.Generator().manual_seed(0)),)}

    def loss(self, parameters: dict[str, Tensor], carry: tuple, *batch: Tensor) -> tuple[Tensor, tuple]:
        return 0.5 * (parameters["weight"][0] - batch[0][..., None]).square().mean(0).sum(), carry


def bytes_per_step(sorter: str, count: int, units_per_step: int, dim: int) -> float:
    per_step = units_per_step * count
    run = compose(
        [f"sorter={sorter}", f"workers={count}", f"task.batch={per_step}", "task.dtype=float32", "data=embedded"]
    )
    group = connect(count)
    trainer = alone(run, Pull(run, dim, per_step * STEPS), group, torch.device("cpu"))
    before = group.traffic.sent
    with torch.no_grad():
        train_epoch(trainer, trainer.members[0].sorter.order(0), 0)
    return (group.traffic.sent - before) / trainer.steps


def main(target: str, *cases: str) -> None:
    """cases: workers/units per step/dim"""
    torch.set_num_threads(1)
    numbers = [tuple(map(int, case.split("/"))) for case in cases]
    report(target, [{sorter: bytes_per_step(sorter, *case) for sorter in SORTERS} for case in numbers])


if __name__ == "__main__":
    main(*sys.argv[1:])
