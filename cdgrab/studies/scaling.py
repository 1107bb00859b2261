"""What coordination costs and what it brings, from 2 to 64 workers: at a fixed batch, and with a batch that grows.

Losses and herding bounds come from training runs, with all workers in one process. Times come from epochs of D-RR and
CD-GraB that take turns in the same processes, and count as ratios: what slows the machine down slows both.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path

import pandas as pd
from omegaconf import DictConfig

from .base import Part, significant
from .looks import label
from .paired import BASELINE, OURS, UNCOORDINATED, difference
from .training import TASK_NAMES, outcome, overrides, train
from .verdicts import Claim, Verdict, estimate, judge, power_exponents

FIXED, WEAK = MODES = ("fixed", "weak")
MODE_NAMES = {FIXED: "fixed batch", WEAK: "growing batch"}
BOUND = "herding_per_step"
MOST_TIME, MOST_BYTES = 1.5, 1.1  # of D-RR's
NO_GROWTH = 0.1  # an exponent


def parts(settings: DictConfig) -> list[Part]:
    """Training runs first; then, one at a time, epochs with a clock."""
    cells = [(task, mode, workers) for task in settings.tasks for mode in MODES for workers in settings.workers]
    trained = [
        _key("trained", *cell, sorter=sorter, seed=seed)
        for cell in cells
        for seed in range(settings.seeds)
        for sorter in settings.sorters
    ]
    timed = [_key("timed", *cell) for cell in cells]
    for task in settings.tasks:
        for processes in settings.processes:
            timed.append(_key("timed", task, FIXED, max(settings.processes), processes))
            timed.append(_key("timed", task, WEAK, processes, processes))
    return [Part(case, partial(_train, settings, case)) for case in trained] + [
        Part(case, partial(_time, settings, case), alone=True) for case in timed
    ]


class Measured:
    """The results of one task."""

    def __init__(self, table: pd.DataFrame, task: str) -> None:
        rows = table[table["task"] == task]
        self.name = TASK_NAMES[task]
        self.trained, timed = rows[rows["kind"] == "trained"], rows[rows["kind"] == "timed"]
        timed = timed.assign(
            time=timed[f"{OURS}_seconds"] / timed[f"{BASELINE}_seconds"],
            traffic=timed[f"{OURS}_bytes"] / timed[f"{BASELINE}_bytes"].where(timed[f"{BASELINE}_bytes"] > 0),
        )
        alone = timed["processes"] == 1
        self.simulated, self.distributed = timed[alone], timed[~alone]

    def differences(self, mode: str, sorter: str = OURS) -> dict[int, pd.Series]:
        """By workers: sorter − D-RR in per cent of D-RR's loss, per seed."""
        rows = self.trained[self.trained["mode"] == mode]
        return {workers: difference(some, sorter) for workers, some in rows.groupby("workers")}

    def bounds(self, sorter: str, mode: str = FIXED) -> pd.DataFrame:
        return self.trained[(self.trained["mode"] == mode) & (self.trained["sorter"] == sorter)]

    def growth(self, sorter: str) -> pd.Series:
        """The exponent of the herding bound in workers, per seed, at a fixed batch."""
        return power_exponents(self.bounds(sorter), "workers", BOUND)


def verdicts(table: pd.DataFrame, settings: DictConfig) -> list[Verdict]:
    lines = []
    for measured in (Measured(table, task) for task in settings.tasks):
        lines += [_ends_lower(measured, mode) for mode in MODES]
        lines.append(_bound_stays(measured))
        if UNCOORDINATED in settings.sorters:
            lines.append(_alone_grows(measured))
        lines += [_time_ratio(measured, measured.simulated, mode, "workers", "one process") for mode in MODES]
        lines.append(_time_stays(measured))
        if len(measured.distributed):
            lines += [_time_ratio(measured, measured.distributed, mode, "processes", "2 to 8") for mode in MODES]
            lines.append(_bytes_ratio(measured))
    return lines


def _ends_lower(measured: Measured, mode: str) -> Verdict:
    """The worker count at which it is worst decides."""
    by_workers = measured.differences(mode)
    worst = max(by_workers, key=lambda workers: by_workers[workers].mean())
    claim = Claim(f"{measured.name}, {MODE_NAMES[mode]}: CD-GraB ends lower than D-RR at every worker count", most=0.0)
    note = f"difference in % of D-RR's train loss where it is worst, {worst} workers"
    return judge(claim, estimate(by_workers[worst]), note)


def _bound_stays(measured: Measured) -> Verdict:
    claim = Claim(
        f"{measured.name}, fixed batch: CD-GraB's herding bound does not grow with the workers", most=NO_GROWTH
    )
    return judge(claim, estimate(measured.growth(OURS)), "exponent in workers")


def _alone_grows(measured: Measured) -> Verdict:
    words = f"{measured.name}, fixed batch: the bound of {label(UNCOORDINATED)} grows faster with the workers"
    difference = measured.growth(UNCOORDINATED) - measured.growth(OURS)
    return judge(Claim(words, least=0.0), estimate(difference), "difference of the exponents, paired over seeds")


def _time_ratio(measured: Measured, rows: pd.DataFrame, mode: str, by: str, where: str) -> Verdict:
    """Ratios of neighbouring epochs; the count at which they are largest decides."""
    on = where if by == "workers" else f"{where} processes"
    words = f"{measured.name}, {MODE_NAMES[mode]}: CD-GraB's epochs take at most 1.5 times D-RR's, on {on}"
    ratios = rows[rows["mode"] == mode].groupby(by)["time"]
    worst = ratios.median().idxmax()
    note = f"mean ratio of {int(ratios.count()[worst])} pairs of epochs where it is largest, {worst} {by}"
    return judge(Claim(words, most=MOST_TIME), estimate(ratios.get_group(worst)), note)


def _time_stays(measured: Measured) -> Verdict:
    rows = measured.simulated[measured.simulated["mode"] == FIXED]
    exponents = power_exponents(rows.assign(seed=rows["epoch"]), "workers", "time")
    words = f"{measured.name}, fixed batch: the ratio of times does not grow with the workers, on one process"
    return judge(Claim(words, most=NO_GROWTH), estimate(exponents), "exponent in workers, fitted epoch by epoch")


def _bytes_ratio(measured: Measured) -> Verdict:
    rows = measured.distributed[measured.distributed["mode"] == WEAK]
    ratios = rows.groupby("processes")["traffic"].mean()
    claim = Claim(f"{measured.name}, one unit per process and step: CD-GraB sends as much as D-RR", most=MOST_BYTES)
    return judge(claim, estimate([ratios.max()] * 2), f"ratio of bytes, counted, {ratios.idxmax()} processes")


# -- how it is made ---------------------------------------------------------------------------------------------------


def _key(kind: str, task: str, mode: str, workers: int, processes: int = 1, sorter: str = "", seed: int = -1) -> dict:
    named = {"kind": kind, "task": task, "mode": mode, "workers": workers, "processes": processes}
    return named | {"sorter": sorter, "seed": seed}


def _changes(settings: DictConfig, case: dict) -> dict:
    batch = settings.batches[case["mode"]] * (case["workers"] if case["mode"] == WEAK else 1)
    return {"workers": case["workers"], "batch": batch}


def _train(settings: DictConfig, case: dict) -> dict[str, list]:
    changes = _changes(settings, case) | {"herding_every": settings.tasks[case["task"]].epochs}
    return outcome(train(overrides(settings, case["task"], case["sorter"], **changes), case["seed"]))


def _time(settings: DictConfig, case: dict) -> dict[str, list]:
    """Seconds of every timed epoch, and bytes that a process sends per step."""
    from scripts.bench import epoch  # the benchmark of epochs, with this study's runs
    from scripts.bench.measure import under_torchrun

    run = [o for o in overrides(settings, case["task"], "", **_changes(settings, case)) if o != "sorter="]
    arguments = (str(settings.timed_epochs), "0", *run)
    if case["processes"] == 1:
        with tempfile.TemporaryDirectory() as folder:
            epoch.main(f"{folder}/found", *arguments)
            found = json.loads(Path(folder, "found0").read_text())
    else:
        found = under_torchrun("scripts.bench.epoch", case["processes"], arguments)[0]
    columns: dict[str, list] = {"epoch": list(range(settings.timed_epochs))}
    for sorter in (BASELINE, OURS):
        columns[f"{sorter}_seconds"] = significant([line["seconds"] for line in found[sorter]], 5)
        columns[f"{sorter}_bytes"] = [found["what"]["bytes_per_step"][sorter]] * settings.timed_epochs
    return columns
