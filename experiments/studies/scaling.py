"""What coordination costs and what it brings, from 2 to 64 workers: at a fixed batch, and with a batch that grows.

Losses and herding bounds come from training runs with all workers in one process. Times come from epochs of D-RR and
CD-GraB that take turns in the same processes, and are compared as ratios: other load on the machine slows both down.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np
from omegaconf import DictConfig

from experiments.report import plots, text
from experiments.report.kinds import DataFrame, Figure, Series
from experiments.report.names import BASELINE, BOUND, OURS, UNCOORDINATED, sorter_label, sorter_style, task_name
from experiments.report.statistics import SAME_LOSS, Estimate, counted, median, power_exponents
from experiments.store.records import significant
from experiments.studies.base import Study
from experiments.studies.parts import Part, trained
from experiments.studies.timing import in_turn, under_torchrun
from experiments.studies.training import overrides
from experiments.studies.verdicts import Verdict, difference, judge, judge_every, repeated, select
from experiments.training.memory import keep_freed_memory

FIXED, WEAK = MODES = ("fixed", "weak")
MODE_NAMES = {FIXED: "fixed batch", WEAK: "growing batch"}
DASHES = {FIXED: "-", WEAK: plots.DASHED}
TRAFFIC = "#7b5ea7"
COLUMNS = ("train loss against D-RR (%)", "parallel herding bound", "time of an epoch / D-RR's", "on several processes")
MOST_TIME, MOST_BYTES = 1.5, 1.1  # of D-RR's
NO_GROWTH = 0.1  # an exponent


def parts(settings: DictConfig) -> Iterator[Part]:
    """Training runs first; then timed epochs, one part at a time."""
    cells = list(product(settings.tasks, MODES, settings.workers))
    for cell, seed, sorter in product(cells, range(settings.seeds), settings.sorters):
        case = _key("trained", *cell, sorter=sorter, seed=seed)
        changes = _changes(settings, case) | {"herding_every": settings.tasks[case["task"]].epochs}
        yield trained(case, overrides(settings, case["task"], sorter, **changes), seed)
    timed = [_key("timed", *cell) for cell in cells]
    for task, processes in product(settings.tasks, settings.processes):
        timed.append(_key("timed", task, FIXED, max(settings.processes), processes))
        timed.append(_key("timed", task, WEAK, processes, processes))
    yield from (Part(case, partial(_time, settings, case), alone=True) for case in timed)


def _key(kind: str, task: str, mode: str, workers: int, processes: int = 1, sorter: str = "", seed: int = -1) -> dict:
    named = {"kind": kind, "task": task, "mode": mode, "workers": workers, "processes": processes}
    return named | {"sorter": sorter, "seed": seed}


def _changes(settings: DictConfig, case: dict) -> dict:
    batch = settings.batches[case["mode"]] * (case["workers"] if case["mode"] == WEAK else 1)
    return {"workers": case["workers"], "batch": batch}


def _time(settings: DictConfig, case: dict) -> dict[str, list]:
    """Seconds of every timed epoch, and bytes that a process sends per step."""
    run = [o for o in overrides(settings, case["task"], "", **_changes(settings, case), device="cpu") if o != "sorter="]
    if case["processes"] == 1:
        keep_freed_memory()
        found = in_turn(settings.timed_epochs, 0.0, run)
    else:
        arguments = (settings.timed_epochs, 0, *run)
        found = under_torchrun("experiments.studies.timing", case["processes"], arguments)[0]
    columns: dict[str, list] = {"epoch": list(range(settings.timed_epochs))}
    for sorter in (BASELINE, OURS):
        columns[f"{sorter}_seconds"] = significant([line["seconds"] for line in found[sorter]], 5)
        columns[f"{sorter}_bytes"] = [found["what"]["bytes_per_step"][sorter]] * settings.timed_epochs
    return columns


class TaskResults:
    """The results of one task: training runs, and timed epochs on one process (`simulated`) and on several."""

    def __init__(self, table: DataFrame, task: str) -> None:
        self.name, self.trained = task_name(task), select(table, task=task, kind="trained")
        timed = select(table, task=task, kind="timed")
        seconds, sent = ({s: timed[f"{s}_{what}"] for s in (BASELINE, OURS)} for what in ("seconds", "bytes"))
        timed = timed.assign(
            time=seconds[OURS] / seconds[BASELINE], traffic=sent[OURS] / sent[BASELINE].where(sent[BASELINE] > 0)
        )
        alone = timed["processes"] == 1
        self.timed, self.simulated, self.distributed = timed, timed[alone], timed[~alone]

    def differences(self, mode: str, sorter: str = OURS) -> dict[int, Series]:
        """By workers: sorter − D-RR in per cent of D-RR's loss, per seed."""
        rows = select(self.trained, mode=mode)
        return {workers: difference(some, sorter) for workers, some in rows.groupby("workers")}

    def bounds(self, sorter: str, mode: str) -> DataFrame:
        return select(self.trained, mode=mode, sorter=sorter)

    def growth(self, sorter: str, mode: str) -> Series:
        """The exponent of the herding bound in workers, per seed."""
        return power_exponents(self.bounds(sorter, mode), "workers", BOUND)


# -- what it says -----------------------------------------------------------------------------------------------------


def verdicts(table: DataFrame, settings: DictConfig) -> Iterator[Verdict]:
    for task in (TaskResults(table, task) for task in settings.tasks):
        yield from (_ends_lower(task, mode) for mode in MODES)
        yield from (_bound_stays(task, mode) for mode in MODES)
        if UNCOORDINATED in settings.sorters:
            yield from (_alone_grows(task, mode) for mode in MODES)
        yield from (_time_ratio(task, task.simulated, mode, "workers", "one process") for mode in MODES)
        yield _time_stays(task)
        if len(task.distributed):
            yield from (_time_ratio(task, task.distributed, mode, "processes", "2 to 8 processes") for mode in MODES)
            yield from (_bytes_ratio(task, mode) for mode in MODES)


def _ends_lower(task: TaskResults, mode: str) -> Verdict:
    words = f"{task.name}, {MODE_NAMES[mode]}: CD-GraB ends lower than D-RR at every worker count"
    note = "difference in % of D-RR's train loss where it decides, {cell} workers"
    return judge_every(words, task.differences(mode), note, most=0.0, margin=SAME_LOSS)


def _bound_stays(task: TaskResults, mode: str) -> Verdict:
    words = f"{task.name}, {MODE_NAMES[mode]}: CD-GraB's herding bound does not grow with the workers"
    return judge(words, task.growth(OURS, mode), "exponent in workers", most=NO_GROWTH)


def _alone_grows(task: TaskResults, mode: str) -> Verdict:
    alone = sorter_label(UNCOORDINATED)
    words = f"{task.name}, {MODE_NAMES[mode]}: the bound of {alone} grows faster with the workers"
    growth = task.growth(UNCOORDINATED, mode) - task.growth(OURS, mode)
    return judge(words, growth, "difference of the exponents, paired over seeds", least=0.0, margin=NO_GROWTH)


def _time_ratio(task: TaskResults, rows: DataFrame, mode: str, by: str, where: str) -> Verdict:
    words = f"{task.name}, {MODE_NAMES[mode]}: CD-GraB's epochs take at most 1.5 times D-RR's, on {where}"
    ratios = _time_ratios(select(rows, mode=mode), by)
    pairs = min(ratio.seeds for ratio in ratios.values())
    note = f"median ratio of {pairs} pairs of epochs where it decides, {{cell}} {by}"
    return repeated(judge_every(words, ratios, note, most=MOST_TIME))


def _time_stays(task: TaskResults) -> Verdict:
    rows = select(task.simulated, mode=FIXED)
    exponents = power_exponents(rows.assign(seed=rows["epoch"]), "workers", "time")
    words = f"{task.name}, fixed batch: the ratio of times does not grow with the workers, on one process"
    note = "median exponent in workers, fitted epoch by epoch"
    return repeated(judge(words, median(exponents), note, most=NO_GROWTH))


def _bytes_ratio(task: TaskResults, mode: str) -> Verdict:
    """With one unit per process and step, and long gradients, the exchange for the mean is all that the sorter needs;
    otherwise pair differences are sent in addition."""
    rows = select(task.distributed, mode=mode)
    ratios = {count: counted(some.iloc[0]) for count, some in rows.groupby("processes")["traffic"]}
    words = f"{task.name}, {'one unit' if mode == WEAK else 'several units'} per process and step"
    note = "ratio of bytes where it is largest, {cell} processes"
    return repeated(judge_every(f"{words}: CD-GraB sends as much as D-RR", ratios, note, most=MOST_BYTES))


# -- figure and table -------------------------------------------------------------------------------------------------


@plots.styled
def cost_and_gain(study: Study) -> Figure:
    """Advantage, herding bound and time against workers, and time and bytes against processes; one row per task."""
    tasks, lines = list(study.settings.tasks), {"lw": 1.3}
    figure, axes = plots.panels(len(tasks), len(COLUMNS), 12.8, 2.8 * len(tasks) + 1.1, COLUMNS)
    for row, task in zip(axes, (TaskResults(study.table, task) for task in tasks), strict=True):
        for sorter in study.settings.sorters:
            for mode in MODES:
                style = lines | sorter_style(sorter) | {"ls": DASHES[mode]}
                label = sorter_label(sorter) if mode == FIXED else None
                plots.estimates(row[1], _by(task.bounds(sorter, mode), "workers", BOUND), label=label, **style)
                if sorter != BASELINE:
                    plots.estimates(row[0], task.differences(mode, sorter), **style)
        for mode in MODES:
            style = lines | {"color": sorter_style(OURS)["color"], "ls": DASHES[mode]}
            on_one, on_several = (select(rows, mode=mode) for rows in (task.simulated, task.distributed))
            plots.estimates(row[2], _time_ratios(on_one, "workers"), **style)
            plots.estimates(row[3], _time_ratios(on_several, "processes"), **style)
            plots.estimates(row[3], _by(on_several, "processes", "traffic"), **style | {"color": TRAFFIC})
        _frame(row, study, task)
    for mode in MODES:
        axes[0, 0].plot([], [], color="0.35", ls=DASHES[mode], label=MODE_NAMES[mode])
    axes[0, 3].plot([], [], color=TRAFFIC, label="bytes sent / D-RR's")
    note = "95 % intervals: of means over seeds (loss, bound), of medians over pairs of epochs (time)"
    return plots.finish(figure, "What coordination brings and costs", f"{note} · {study.caption()}")


@text.table
def cost_table(study: Study) -> Iterator[dict[str, str]]:
    """Seconds and bytes of every timed setting."""
    for task in (TaskResults(study.table, task) for task in study.settings.tasks):
        for (mode, workers, processes), some in task.timed.groupby(["mode", "workers", "processes"]):
            seconds = {s: f"{some[f'{s}_seconds'].median():.3g}" for s in (BASELINE, OURS)}
            sent = {s: f"{some[f'{s}_bytes'].iloc[0]:,.0f}" for s in (BASELINE, OURS)}
            row = {"task": task.name, "batch": MODE_NAMES[mode], "workers": f"{workers}", "processes": f"{processes}"}
            row |= {f"{sorter_label(sorter)} (s)": value for sorter, value in seconds.items()}
            row |= {"ratio": f"{some['time'].median():.2f}"}
            yield row | {f"{sorter_label(sorter)} (bytes per step)": value for sorter, value in sent.items()}


def _time_ratios(rows: DataFrame, by: str) -> dict[int, Estimate]:
    """Of neighbouring epochs. Medians: whatever else runs now and then makes single ratios as large as it likes."""
    return {count: median(ratios) for count, ratios in _by(rows, by, "time").items()}


def _by(rows: DataFrame, x: str, y: str) -> dict[int, Series]:
    return dict(list(rows.groupby(x)[y]))


def _frame(row: np.ndarray, study: Study, task: TaskResults) -> None:
    row[0].set_ylabel(task.name)
    row[3].set_ylabel("time and bytes / D-RR's")
    row[0].axhline(0, **plots.GREY)
    for panel in (row[1], row[3]):
        plots.log_ticks(panel.yaxis)
    means = task.trained.groupby(["mode", "sorter", "workers"])[BOUND].mean()
    row[1].set_ylim(means.min() / 2, means.max() * 2)  # intervals of three seeds reach below zero
    for panel in row[2:]:
        panel.axhline(1, **plots.GREY)
        panel.axhline(MOST_TIME, **plots.GREY, ls=":")
    for panel, counts in zip(row, [study.settings.workers] * 3 + [study.settings.processes], strict=True):
        plots.log_x(panel, counts, "processes" if panel is row[3] else "workers")
