"""Runs that train together against the same runs alone: whole epochs, evaluation included, in turn.

`speedup` is the throughput of the group over that of its runs one after the other. Half of the runs are CD-GraB's, half
D-RR's, each with a seed of its own; one of either is measured alone.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from cdgrab.runtime.group import WorkerGroup
from experiments.training.clock import Clock
from experiments.training.config import compose
from experiments.training.grouping import make_member
from experiments.training.loop import Trainer, stacked
from experiments.training.member import evaluated
from experiments.training.memory import keep_freed_memory
from experiments.training.parts import products
from scripts.bench import solo
from scripts.bench.measure import alternately, summary

SORTERS = ("cd_grab", "d_rr")
# task, settings, runs together; by device
CASES = {
    "cpu": [
        ("lr_hmda", ["experiment=fig3a_lr_hmda"], 10),
        ("mlp_m4", ["experiment=fig3c_mlp_m4"], 8),
    ],
    "cuda": [
        ("mlp_m4", ["experiment=fig3c_mlp_m4"], 16),
        ("cifar10", ["experiment=fig4_cifar10_workers", "task.herding_every=0", "task.herding_replays=[]"], 24),
        ("lstm_wiki2", ["experiment=fig3b_lstm_wiki2"], 8),
    ],
}
SMOKE = {"lr_hmda": "task.train_share=0.02", "mlp_m4": "task.limit=640", "cifar10": "task.limit=640"}
SHORTER = {("smoke", "cpu"): SMOKE, ("smoke", "cuda"): SMOKE, ("quick", "cpu"): {"mlp_m4": "task.limit=6400"}}
REPEATS = {"smoke": 1, "quick": 2, "full": 5}


class Epochs:
    """Call it for one more epoch, as `Trainer.fit` has it but for the files."""

    def __init__(self, runs: list, device: torch.device) -> None:
        group = WorkerGroup(runs[0].config.workers)
        self.trainer, self.epoch = Trainer([make_member(run, group, device) for run in runs]), 0

    def __call__(self) -> None:
        trainer = self.trainer
        orders = [member.sorter.order(self.epoch) for member in trainer.members]
        trainer.position, self.epoch = 0, self.epoch + 1
        with torch.no_grad(), products(trainer.replicas, trainer.device, trainer.config.task.gradients):
            trainer.train_epoch(stacked(orders), Clock())
            evaluated(trainer.going())


def describe(row: dict) -> str:
    if "ratio" in row:
        return "{task}: a run alone takes {ratio} times as long as in {against}".format_map(row)
    if "command" in row:
        return "{command}: {s} s".format_map(row)
    return "{task}: {replicas} runs together {speedup} times as fast as alone".format_map(row)


def measure(device: str, size: str) -> Iterator[dict]:
    keep_freed_memory()
    for task, settings, replicas in CASES[device]:
        shorter = SHORTER.get((size, device), {}).get(task)
        settings = [*settings, "size=paper", f"device={device}", *([shorter] if shorter else [])]
        yield {"task": task, "device": device, "replicas": replicas} | _row(settings, replicas, device, size)
        gc.collect()
    if (device, size) == ("cpu", "full"):
        yield from solo.rows(repeats=3)


def _row(settings: list[str], replicas: int, device: str, size: str) -> dict:
    where, wait = torch.device(device), torch.cuda.synchronize if device == "cuda" else lambda: None
    runs = [compose([*settings, f"sorter={SORTERS[i % 2]}", f"seed={i // 2}"]) for i in range(replicas)]
    torch.set_num_threads(runs[0].config.threads)
    contenders = {SORTERS[0]: Epochs(runs[:1], where), SORTERS[1]: Epochs(runs[1:2], where)}
    contenders["together"], memory = _measuring_memory(lambda: Epochs(runs, where), device)
    seconds = alternately(contenders, REPEATS[size], wait)
    alone = [sum(pair) * replicas / 2 for pair in zip(*(seconds[sorter] for sorter in SORTERS), strict=True)]
    ratios = [one / other for one, other in zip(alone, seconds["together"], strict=True)]
    row = summary("speedup", ratios) | {f"{name}_s": summary("s", values)["s"] for name, values in seconds.items()}
    trainer = contenders["together"].trainer
    what = {"workers": trainer.config.workers, "dim": trainer.flat.dim, "steps": trainer.steps}
    memory = {"bytes_per_run": memory // replicas} if memory else {}
    return row | what | memory | {"data": runs[0].source.description}


def _measuring_memory(make: Callable[[], Epochs], device: str) -> tuple[Epochs, int]:
    """What `make` makes, and the most bytes that its first epoch takes; 0 where nobody counts."""
    if device != "cuda":
        before = _resident("VmRSS")
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        made = make()
        made()
        return made, max(0, _resident("VmHWM") - before)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made = make()
    made()
    return made, torch.cuda.max_memory_allocated() - before


def _resident(name: str) -> int:
    """Bytes of this process, now (VmRSS) or at most (VmHWM)."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)
