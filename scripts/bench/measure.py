"""Contenders measured in turn, medians with quartiles, and the files under results/bench."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from cdgrab.errors import CdgrabError
from experiments.store.bench import folder, read_meta, read_rows
from experiments.store.files import write_atomically
from experiments.store.records import cpu_name, git_commit
from experiments.training.launcher import torchrun

SIZES = ("smoke", "quick", "full")


def alternately(
    contenders: dict[str, Callable[[], object]], repeats: int, wait: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of every contender's calls: A B C, A B C, …, after one call of each that does not count.

    What disturbs the machine for a while then disturbs all of them alike. `wait` returns when a call's work is done.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, call in contenders.items():
            wait()
            start = time.perf_counter()
            call()
            wait()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def finish_on(device: str) -> Callable[[], None]:
    """Waits for what was started on a device."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def summary(key: str, values: Sequence[float]) -> dict[str, float | list[float]]:
    """The median under `key`, the quartiles beside it."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    first, median, third = (_rounded(value) for value in quartiles)
    return {key: median, f"{key}_quartiles": [first, third]}


def under_torchrun(module: str, processes: int, arguments: Sequence[object]) -> list:
    """What each process of `python -m module FILE arguments…` writes to FILE<rank> as JSON, in rank order."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "found"
        if torchrun(["-m", module, str(target), *map(str, arguments)], processes):
            raise CdgrabError(f"{module} failed on {processes} processes; its message is above")
        found = sorted(Path(scratch).glob("found*"), key=lambda path: int(path.name.removeprefix("found")))
        return [json.loads(path.read_text()) for path in found]


def store(name: str, device: str, rows: list[dict], size: str, began: str) -> Path:
    """Replace this device's rows in results/bench/<name>.json; those of other devices stay. Beside it, <name>.meta.json
    says on what machine, when and from which code each device's rows come."""
    folder().mkdir(parents=True, exist_ok=True)
    kept = [row for row in read_rows(name, missing_ok=True) if row["device"] != device]
    meta = read_meta(name) | {device: {"size": size, "began": began, **_machine(device)}}
    lines = ",\n".join(json.dumps(row) for row in [*kept, *rows])
    path = folder() / f"{name}.json"
    write_atomically(path, f"[\n{lines}\n]\n")
    write_atomically(path.with_suffix(".meta.json"), json.dumps(meta, indent=1) + "\n")
    return path


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _machine(device: str) -> dict:
    return {
        "ended": now(),
        "commit": git_commit(),
        "machine": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "cores": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],  # of the last 1, 5, 15 minutes, our own included
        "torch": torch.__version__,
    }


def _rounded(value: float) -> float:
    """Five digits: more than any clock is good for."""
    return float(f"{value:.5g}") if isinstance(value, float) else value
