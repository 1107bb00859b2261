"""Figures and tables of the study `scaling`."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.report.figures import STYLE, finish
from experiments.report.tables import markdown
from experiments.studies.base import Study
from experiments.studies.paired import BASELINE, OURS
from experiments.studies.scaling import BOUND, FIXED, MODE_NAMES, MODES, MOST_TIME, Measured
from experiments.studies.style import label, line_style, plain_log_ticks, ticks_at
from experiments.studies.verdicts import estimate

DASHES = {FIXED: "-", "weak": (0, (4, 2))}
TRAFFIC = "#7b5ea7"
COLUMNS = ("train loss against D-RR (%)", "parallel herding bound", "time of an epoch / D-RR's", "on several processes")


def cost_and_gain(study: Study) -> Figure:
    """Advantage, herding bound and time against workers, and time and bytes against processes; one row per task."""
    tasks, sorters = list(study.settings.tasks), list(study.settings.sorters)
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(len(tasks), len(COLUMNS), figsize=(12.8, 2.8 * len(tasks) + 1.1), squeeze=False)
        for row, task in zip(axes, tasks, strict=True):
            measured = Measured(study.table, task)
            for sorter in sorters:
                for mode in MODES:
                    style = line_style(sorter) | {"ls": DASHES[mode]}
                    by_workers = dict(list(measured.bounds(sorter, mode).groupby("workers")[BOUND]))
                    _draw(row[1], by_workers, label=label(sorter) if mode == FIXED else None, **style)
                    if sorter != BASELINE:
                        _draw(row[0], measured.differences(mode, sorter), **style)
            for mode in MODES:
                style = {"color": line_style(OURS)["color"], "ls": DASHES[mode]}
                _draw(row[2], _by(measured.simulated, mode, "workers", "time"), **style)
                _draw(row[3], _by(measured.distributed, mode, "processes", "time"), **style)
                _draw(row[3], _by(measured.distributed, mode, "processes", "traffic"), **style | {"color": TRAFFIC})
            _frame(row, study, measured)
        for panel, title in zip(axes[0], COLUMNS, strict=True):
            panel.set_title(title)
        for mode in MODES:
            axes[0, 0].plot([], [], color="0.35", ls=DASHES[mode], label=MODE_NAMES[mode])
        axes[0, 3].plot([], [], color=TRAFFIC, label="bytes sent / D-RR's")
        note = "mean with 95 % interval over seeds (loss, bound) or pairs of epochs (time)"
        finish(figure, "What coordination brings and costs", f"{note} · {study.caption()}")
    return figure


def cost_table(study: Study) -> str:
    """Seconds and bytes of every timed setting."""
    rows = []
    for task in study.settings.tasks:
        measured = Measured(study.table, task)
        timed = pd.concat([measured.simulated, measured.distributed])
        for (mode, workers, processes), some in timed.groupby(["mode", "workers", "processes"]):
            row = {
                "task": measured.name,
                "batch": MODE_NAMES[mode],
                "workers": f"{workers}",
                "processes": f"{processes}",
            }
            for sorter in (BASELINE, OURS):
                row[f"{label(sorter)} (s)"] = f"{some[f'{sorter}_seconds'].median():.3g}"
            row["ratio"] = f"{some['time'].median():.2f}"
            for sorter in (BASELINE, OURS):
                row[f"{label(sorter)} (bytes per step)"] = f"{some[f'{sorter}_bytes'].iloc[0]:,.0f}"
            rows.append(row)
    return markdown(rows)


def _by(rows: pd.DataFrame, mode: str, x: str, y: str) -> dict[int, pd.Series]:
    return dict(list(rows[rows["mode"] == mode].groupby(x)[y]))


def _draw(panel: Axes, by_count: Mapping[int, pd.Series], **style) -> None:
    counts, values = list(by_count), [estimate(some) for some in by_count.values()]
    panel.plot(counts, [value.mean for value in values], marker="o", ms=3.4, lw=1.3, **style)
    if values and all(np.isfinite(value.low) for value in values):
        low, high = [value.low for value in values], [value.high for value in values]
        panel.fill_between(counts, low, high, color=style["color"], alpha=0.15, lw=0)


def _frame(row: np.ndarray, study: Study, measured: Measured) -> None:
    row[0].set_ylabel(measured.name)
    row[3].set_ylabel("time and bytes / D-RR's")
    row[0].axhline(0, color="0.6", lw=0.8)
    for panel in (row[1], row[3]):
        panel.set_yscale("log")
        plain_log_ticks(panel.yaxis)
    means = measured.trained.groupby(["mode", "sorter", "workers"])[BOUND].mean()
    row[1].set_ylim(means.min() / 2, means.max() * 2)  # intervals of three seeds reach below zero
    for panel in row[2:]:
        panel.axhline(1, color="0.6", lw=0.8)
        panel.axhline(MOST_TIME, color="0.6", lw=0.8, ls=":")
    for panel, counts in zip(row, [study.settings.workers] * 3 + [study.settings.processes], strict=True):
        panel.set(xscale="log", xlabel="processes" if panel is row[3] else "workers")
        ticks_at(panel.xaxis, list(counts))
