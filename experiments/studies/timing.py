"""Timed epochs: D-RR and CD-GraB train in the same processes and take turns epoch by epoch.

`python -m experiments.studies.timing FILE epochs least_seconds settings…`, under torchrun or alone, writes the result
of `in_turn` to FILE0. Besides seconds it records the CPU seconds of all processes together, which other load on the
machine hardly changes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from cdgrab.errors import CdgrabError
from cdgrab.runtime.connection import connect, disconnect, launched_rank, pick_device
from cdgrab.runtime.group import WorkerGroup
from experiments.tasks import make_task
from experiments.tasks.base import Task
from experiments.training.clock import Clock
from experiments.training.config import Run, compose
from experiments.training.launcher import torchrun
from experiments.training.loop import Trainer, alone
from experiments.training.memory import keep_freed_memory

SORTERS = ("d_rr", "cd_grab")
MOST_EPOCHS = 100


def under_torchrun(module: str, processes: int, arguments: Sequence[object]) -> list:
    """What each process of `python -m module FILE arguments…` writes to FILE<rank> as JSON, in rank order."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "found"
        if torchrun(["-m", module, str(target), *map(str, arguments)], processes):
            raise CdgrabError(f"{module} failed on {processes} processes; its message is above")
        found = sorted(Path(scratch).glob("found*"), key=lambda path: int(path.name.removeprefix("found")))
        return [json.loads(path.read_text()) for path in found]


def finish_on(device: str) -> Callable[[], None]:
    """A function that waits for the device to finish."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def make_trainer(run: Run, task: Task | None = None) -> Trainer:
    """A trainer with its own count of traffic. Several runs may share a task, which knows nothing about runs."""
    torch.set_num_threads(run.config.threads)
    device = pick_device(run.config.device)
    task = task or make_task(run.config, run.source, device)
    return alone(run, task, connect(run.config.workers), device)


def train_epoch(
    trainer: Trainer, order: Tensor, epoch: int, wait: Callable[[], None] = lambda: None, clock: Clock | None = None
) -> tuple[Tensor, dict]:
    """One epoch as in `Trainer.fit`, without the evaluation, and including the next order: what is decided beside the
    training must not extend into the other sorter's epoch. Returns that order and the times."""
    trainer.group.barrier()
    wait()
    start, cpu_start, clock = time.perf_counter(), time.process_time(), Clock() if clock is None else clock
    trainer.position = 0
    trainer.train_epoch(order, clock)
    order = trainer.members[0].sorter.order(epoch + 1)
    wait()
    clock.lap("ordering")
    trainer.group.barrier()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return order, {"seconds": seconds, "cpu_seconds": cpu_seconds, "phases": clock.seconds}


def in_turn(epochs: int, least_seconds: float, settings: Sequence[str]) -> dict:
    """The times of at least so many epochs and seconds, by sorter, after one warm-up epoch each; `what`: what was
    trained. All processes return the same, except for the seconds."""
    runs = {sorter: compose([*settings, f"sorter={sorter}"]) for sorter in SORTERS}
    some = make_trainer(runs["d_rr"])
    trainers = {"d_rr": some, "cd_grab": make_trainer(runs["cd_grab"], some.task)}
    orders = {sorter: trainer.members[0].sorter.order(0) for sorter, trainer in trainers.items()}
    found, epoch, wait = {sorter: [] for sorter in SORTERS}, 0, finish_on(some.device.type)
    with torch.no_grad():
        while epoch <= epochs:
            for sorter, trainer in trainers.items():
                orders[sorter], times = train_epoch(trainer, orders[sorter], epoch, wait)
                found[sorter] += [times] if epoch else []
            if epoch == 1:  # the first process decides for all how many more there are
                more = torch.tensor([least_seconds / found[SORTERS[0]][0]["seconds"]], dtype=torch.float64)
                epochs = max(epochs, min(MOST_EPOCHS, int(some.group.gather(more)[0])))
            epoch += 1
    sent = {sorter: _most_sent(trainer.group) // (trainer.steps * epoch) for sorter, trainer in trainers.items()}
    for sorter in SORTERS:  # CPU time of all processes together: while one waits, another works
        of_this = torch.tensor([times["cpu_seconds"] for times in found[sorter]], dtype=torch.float64)
        for times, cpu_seconds in zip(found[sorter], some.group.all_reduce(of_this).tolist(), strict=True):
            times["cpu_seconds"] = cpu_seconds
    what = {"workers": some.config.workers, "steps": some.steps, "dim": some.flat.dim}
    return found | {"what": what | {"data": some.members[0].run.source.description, "bytes_per_step": sent}}


def _most_sent(group: WorkerGroup) -> int:
    """The bytes sent by the process that sent most."""
    return int(group.gather(torch.tensor([group.traffic.sent])).max())


def main(target: str, epochs: str, least_seconds: str, *settings: str) -> None:
    keep_freed_memory()
    found = in_turn(int(epochs), float(least_seconds), settings)
    if launched_rank() == 0:
        Path(f"{target}0").write_text(json.dumps(found))
    disconnect()


if __name__ == "__main__":
    main(*sys.argv[1:])
