"""Seconds per epoch of CD-GraB and D-RR, both trained in the same processes, epoch by epoch in turn.

Beside them CPU seconds, of all processes together: what else runs on the machine hardly changes these.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from cdgrab.runtime import group as workers
from experiments.tasks import make_task
from experiments.tasks.base import Task
from experiments.training.clock import Clock
from experiments.training.config import Run, compose
from experiments.training.loop import Trainer
from experiments.training.memory import keep_freed_memory
from scripts.bench.measure import finish_on, summary, under_torchrun

PROCESSES = {"cpu": 4, "cuda": 1}
SORTERS = ("d_rr", "cd_grab")
# by task: the paper's experiment, and what makes the epochs of its files short (embedded data is short)
SHORTER = {
    "lr_hmda": ("fig3a_lr_hmda", {"smoke": "task.train_share=0.01", "quick": "task.train_share=0.05"}),
    "lstm_wiki2": ("fig3b_lstm_wiki2", {"smoke": "task.limit=4", "quick": "task.limit=30", "full": "task.limit=100"}),
    "mlp_m4": ("fig3c_mlp_m4", {"smoke": "task.limit=640", "quick": "task.limit=16384"}),
}
EPOCHS = {"smoke": 2, "quick": 5, "full": 15}
LEAST_SECONDS = {"smoke": 0.0, "quick": 2.0, "full": 20.0}  # of a sorter's epochs together: short ones are repeated


def measure(device: str, size: str) -> list[dict]:
    rows = []
    for task, (experiment, shorter) in SHORTER.items():
        settings = [f"experiment={experiment}", "size=paper", f"device={device}"]
        if size in shorter and not (compose(settings).source.embedded and task == "lr_hmda"):
            settings.append(shorter[size])
        arguments = (EPOCHS[size], LEAST_SECONDS[size], *settings)
        found = under_torchrun("scripts.bench.epoch", PROCESSES[device], arguments)[0]
        rows.append({"device": device, "task": task, "processes": PROCESSES[device]} | _row(found))
        print("  {task}: D-RR {d_rr_s} s, CD-GraB {cd_grab_s} s, ratio {ratio}; of CPU time {cpu_ratio}".format(
              **rows[-1]), flush=True)  # fmt: skip
    return rows


def _row(found: dict) -> dict:
    """Ratios are medians of the ratios of neighbours in time: what slows the machine down slows both."""
    row = {}
    for prefix in ("", "cpu_"):
        seconds = {sorter: [epoch[f"{prefix}seconds"] for epoch in found[sorter]] for sorter in SORTERS}
        ratios = [cd_grab / d_rr for d_rr, cd_grab in zip(*seconds.values(), strict=True)]
        for sorter in SORTERS:
            row |= summary(f"{sorter}_{prefix}s", seconds[sorter])
        row |= summary(f"{prefix}ratio", ratios)
    for sorter in SORTERS:
        phases = {phase: [epoch["phases"][phase] for epoch in found[sorter]] for phase in found[sorter][0]["phases"]}
        row[f"{sorter}_phases"] = {phase: summary("s", values)["s"] for phase, values in phases.items()}
    return row | found["what"] | {"epochs": len(ratios)}


# -- in every process --------------------------------------------------------------------------------------------------


def make_trainer(run: Run, task: Task | None = None) -> Trainer:
    """Its traffic is counted apart from that of others. A task knows nothing of runs: several may share it."""
    torch.set_num_threads(run.config.threads)
    device = workers.pick_device(run.config.device)
    task = task or make_task(run.config, run.source, device)
    return Trainer(run, task, workers.connect(run.config.workers), device)


def train_epoch(trainer: Trainer, order: Tensor, epoch: int, wait=lambda: None) -> tuple[Tensor, dict]:
    """One epoch as `Trainer.fit` has it, without the evaluation, and with the next order at its end: whatever is
    decided beside the training must not reach into the other sorter's epoch. Returns that order and the times."""
    trainer.group.barrier()
    wait()
    start, cpu_start, clock = time.perf_counter(), time.process_time(), Clock()
    trainer.position = 0
    trainer.train_epoch(order, clock, tqdm(disable=True))
    order = trainer.sorter.order(epoch + 1)
    wait()
    clock.lap("ordering")
    trainer.group.barrier()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return order, {"seconds": seconds, "cpu_seconds": cpu_seconds, "phases": clock.seconds}


def _most_sent(group: workers.WorkerGroup) -> int:
    """Bytes, by the process that sent most."""
    return int(group.gather(torch.tensor([group.traffic.sent])).max())


def main(target: str, epochs: str, least_seconds: str, *settings: str) -> None:
    keep_freed_memory()
    runs = {sorter: compose([*settings, f"sorter={sorter}"]) for sorter in SORTERS}
    some = make_trainer(runs["d_rr"])
    trainers = {"d_rr": some, "cd_grab": make_trainer(runs["cd_grab"], some.task)}
    orders = {sorter: trainer.sorter.order(0) for sorter, trainer in trainers.items()}
    found, epoch, wanted, wait = {sorter: [] for sorter in SORTERS}, 0, int(epochs), finish_on(some.device.type)
    with torch.no_grad():
        while epoch <= wanted:
            for sorter, trainer in trainers.items():
                orders[sorter], times = train_epoch(trainer, orders[sorter], epoch, wait)
                if epoch:  # the first one warms up
                    found[sorter].append(times)
            if epoch == 1:  # how many more: the first process decides for all
                more = torch.tensor([float(least_seconds) / found[SORTERS[0]][0]["seconds"]], dtype=torch.float64)
                wanted = max(wanted, min(100, int(some.group.gather(more)[0])))
            epoch += 1
    found["what"] = {
        "workers": some.config.workers,
        "steps": some.steps,
        "dim": some.flat.dim,
        "data": some.run.source.description,
        "bytes_per_step": {s: _most_sent(t.group) // (t.steps * epoch) for s, t in trainers.items()},
    }
    for sorter in SORTERS:  # one's wait is another's work: CPU time of all processes together
        of_this = torch.tensor([times["cpu_seconds"] for times in found[sorter]], dtype=torch.float64)
        for times, cpu_seconds in zip(found[sorter], some.group.all_reduce(of_this).tolist(), strict=True):
            times["cpu_seconds"] = cpu_seconds
    if some.group.rank == 0:
        Path(f"{target}0").write_text(json.dumps(found))
    workers.disconnect()


if __name__ == "__main__":
    main(*sys.argv[1:])
