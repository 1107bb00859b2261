"""Contenders measured in turn, medians with quartiles, and what they were measured on."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from cdgrab.runtime.connection import disconnect, launched_rank
from experiments.store.records import begin, cpu_name, finish


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


def summary(key: str, values: Sequence[float]) -> dict[str, float | list[float]]:
    """The median under `key`, the quartiles beside it."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    first, median, third = (rounded(value) for value in quartiles)
    return {key: median, f"{key}_quartiles": [first, third]}


def manifest(device: str, size: str) -> dict:
    """Of a measurement that begins now; `measured` ends it."""
    name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    return begin({"size": size, "machine": name})


def measured(manifest: dict) -> dict:
    load = [round(load, 2) for load in os.getloadavg()]  # of the last 1, 5, 15 minutes, our own included
    return finish(manifest, load=load)


def report(target: str, found: object) -> None:
    """What this process found, for `under_torchrun`; its last act."""
    Path(f"{target}{launched_rank()}").write_text(json.dumps(found))
    disconnect()


def rounded(value: float) -> float:
    """Five digits: more than any clock is good for."""
    return float(f"{value:.5g}") if isinstance(value, float) else value
