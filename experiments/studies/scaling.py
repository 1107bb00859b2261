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

from experiments.studies.base import Part, significant
from experiments.studies.paired import BASELINE, OURS, UNCOORDINATED, difference
from experiments.studies.style import label
from experiments.studies.training import TASK_NAMES, outcome, overrides, train
from experiments.studies.verdicts import Claim, Verdict, counted, estimate, judge, judge_every, power_exponents

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

    def growth(self, sorter: str, mode: str = FIXED) -> pd.Series:
        """The exponent of the herding bound in workers, per seed."""
        return power_exponents(self.bounds(sorter, mode), "workers", BOUND)


def verdicts(table: pd.DataFrame, settings: DictConfig) -> list[Verdict]:
    lines = []
    for measured in (Measured(table, task) for task in settings.tasks):
        lines += [_ends_lower(measured, mode) for mode in MODES]
        lines += [_bound_stays(measured, mode) for mode in MODES]
        if UNCOORDINATED in settings.sorters:
            lines += [_alone_grows(measured, mode) for mode in MODES]
        lines += [_time_ratio(measured, measured.simulated, mode, "workers", "one process") for mode in MODES]
        lines.append(_time_stays(measured))
        if len(measured.distributed):
            lines += [_time_ratio(measured, measured.distributed, mode, "processes", "2 to 8") for mode in MODES]
            lines += [_bytes_ratio(measured, mode) for mode in MODES]
    return lines


def _ends_lower(measured: Measured, mode: str) -> Verdict:
    claim = Claim(f"{measured.name}, {MODE_NAMES[mode]}: CD-GraB ends lower than D-RR at every worker count", most=0.0)
    by_workers = {workers: estimate(some) for workers, some in measured.differences(mode).items()}
    return judge_every(claim, by_workers, "difference in % of D-RR's train loss where it decides, {cell} workers")


def _bound_stays(measured: Measured, mode: str) -> Verdict:
    words = f"{measured.name}, {MODE_NAMES[mode]}: CD-GraB's herding bound does not grow with the workers"
    return judge(Claim(words, most=NO_GROWTH), estimate(measured.growth(OURS, mode)), "exponent in workers")


def _alone_grows(measured: Measured, mode: str) -> Verdict:
    words = f"{measured.name}, {MODE_NAMES[mode]}: the bound of {label(UNCOORDINATED)} grows faster with the workers"
    difference = measured.growth(UNCOORDINATED, mode) - measured.growth(OURS, mode)
    return judge(Claim(words, least=0.0), estimate(difference), "difference of the exponents, paired over seeds")


def _time_ratio(measured: Measured, rows: pd.DataFrame, mode: str, by: str, where: str) -> Verdict:
    """Means of the ratios of neighbouring epochs, with intervals over these pairs."""
    on = where if by == "workers" else f"{where} processes"
    words = f"{measured.name}, {MODE_NAMES[mode]}: CD-GraB's epochs take at most 1.5 times D-RR's, on {on}"
    ratios = {count: estimate(some) for count, some in rows[rows["mode"] == mode].groupby(by)["time"]}
    pairs = min(ratio.seeds for ratio in ratios.values())
    note = f"mean ratio of {pairs} pairs of epochs where it decides, {{cell}} {by}"
    return judge_every(Claim(words, most=MOST_TIME), ratios, note)


def _time_stays(measured: Measured) -> Verdict:
    rows = measured.simulated[measured.simulated["mode"] == FIXED]
    exponents = power_exponents(rows.assign(seed=rows["epoch"]), "workers", "time")
    words = f"{measured.name}, fixed batch: the ratio of times does not grow with the workers, on one process"
    return judge(Claim(words, most=NO_GROWTH), estimate(exponents), "exponent in workers, fitted epoch by epoch")


def _bytes_ratio(measured: Measured, mode: str) -> Verdict:
    """With one unit per process and step, and gradients that are not short, the mean's own exchange serves the sorter;
    else pair differences are sent beside it."""
    rows = measured.distributed[measured.distributed["mode"] == mode]
    ratios = {count: counted(some.iloc[0]) for count, some in rows.groupby("processes")["traffic"]}
    words = f"{measured.name}, {'one unit' if mode == WEAK else 'several units'} per process and step"
    claim = Claim(f"{words}: CD-GraB sends as much as D-RR", most=MOST_BYTES)
    return judge_every(claim, ratios, "ratio of bytes where it is largest, {cell} processes")


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
