"""Runs that train together against the same runs alone: whole epochs, evaluation included, in turn.

`speedup` is the throughput of the group over that of its runs one after the other. Half of the runs are CD-GraB's, half
D-RR's, each with a seed of its own; one of either is measured alone.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator

import torch
from tqdm import tqdm

from cdgrab.runtime.group import WorkerGroup
from experiments.training.clock import Clock
from experiments.training.config import compose
from experiments.training.loop import Trainer, stacked
from experiments.training.memory import keep_freed_memory
from experiments.training.session import make_member
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
        ("cifar10", ["experiment=fig4_cifar10_workers", "task.herding_every=0"], 24),
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
        with torch.no_grad():
            trainer.train_epoch(stacked(orders), Clock(), tqdm(disable=True))
            for member, parameters in trainer.going():
                member.evaluate(parameters)


describe = "{task}: {replicas} runs together {speedup} times as fast as alone".format_map


def measure(device: str, size: str) -> Iterator[dict]:
    keep_freed_memory()
    for task, settings, replicas in CASES[device]:
        shorter = SHORTER.get((size, device), {}).get(task)
        settings = [*settings, "size=paper", f"device={device}", *([shorter] if shorter else [])]
        yield {"task": task, "device": device, "replicas": replicas} | _row(settings, replicas, device, size)
        gc.collect()


def _row(settings: list[str], replicas: int, device: str, size: str) -> dict:
    where, wait = torch.device(device), torch.cuda.synchronize if device == "cuda" else lambda: None
    runs = [compose([*settings, f"sorter={SORTERS[i % 2]}", f"seed={i // 2}"]) for i in range(replicas)]
    torch.set_num_threads(runs[0].config.threads)
    contenders, memory = {}, {}
    for name, members in ((SORTERS[0], runs[:1]), (SORTERS[1], runs[1:2]), ("together", runs)):
        before = _memory(device)
        contenders[name] = Epochs(members, where)
        contenders[name]()
        memory[name] = (_memory(device) - before) // len(members)
    seconds = alternately(contenders, REPEATS[size], wait)
    alone = [sum(pair) * replicas / 2 for pair in zip(*(seconds[sorter] for sorter in SORTERS), strict=True)]
    ratios = [one / other for one, other in zip(alone, seconds["together"], strict=True)]
    row = summary("speedup", ratios) | {f"{name}_s": summary("s", values)["s"] for name, values in seconds.items()}
    trainer = contenders["together"].trainer
    what = {"workers": trainer.config.workers, "dim": trainer.flat.dim, "steps": trainer.steps}
    return row | what | {"bytes_per_run": memory["together"], "data": runs[0].source.description}


def _memory(device: str) -> int:
    """Bytes: those held on a GPU, or the peak of this process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
