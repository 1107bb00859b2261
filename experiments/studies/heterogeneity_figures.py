"""Figures of the study `heterogeneity`."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.report.figures import STYLE, finish
from experiments.studies.base import Study
from experiments.studies.heterogeneity import BOUND, of_task
from experiments.studies.paired import BASELINE, LOSS, by_seed, difference
from experiments.studies.style import label, line_style, plain_log_ticks, ticks_at
from experiments.studies.training import TASK_NAMES, TEST_METRICS
from experiments.studies.verdicts import Estimate, estimate

COLUMNS = ("train loss", "train loss against D-RR (%)", "test accuracy (%)", "parallel herding bound")


def against_alpha(study: Study) -> Figure:
    """Loss, advantage, test metric and herding bound against alpha, one row per task; skew grows to the right."""
    tasks, sorters = list(study.settings.tasks), list(study.settings.sorters)
    with plt.style.context(STYLE):
        size = (12.4, 2.7 * len(tasks) + 1.0)
        figure, axes = plt.subplots(len(tasks), len(COLUMNS), figsize=size, sharex=True, squeeze=False)
        for row, task in zip(axes, tasks, strict=True):
            for sorter in sorters:
                for panel, metric in zip((row[0], row[2], row[3]), (LOSS, TEST_METRICS[task], BOUND), strict=True):
                    _draw(panel, study, task, sorter, lambda rows, m=metric, s=sorter: by_seed(rows, s, m))
                if sorter != BASELINE:
                    _draw(row[1], study, task, sorter, lambda rows, s=sorter: difference(rows, s))
            row[1].axhline(0, color="0.6", lw=0.8)
            row[3].set_yscale("log")
            plain_log_ticks(row[3].yaxis)
            row[0].set_ylabel(TASK_NAMES[task])
        for panel, title in zip(axes[0], COLUMNS, strict=True):
            panel.set_title(title)
        for panel in axes[-1]:
            panel.set(xscale="log", xlabel="alpha (more skew →)")
            ticks_at(panel.xaxis, list(study.settings.alphas))
            panel.tick_params(axis="x", labelrotation=60)
            panel.set_xlim(max(study.settings.alphas) * 1.6, min(study.settings.alphas) / 1.6)
        note = "mean over seeds with 95 % interval; differences paired over seeds"
        finish(figure, "Workers whose labels differ", f"{note} · {study.caption()}")
    return figure


def _draw(panel: Axes, study: Study, task: str, sorter: str, values) -> None:
    alphas = list(study.settings.alphas)
    found: list[Estimate] = [estimate(pd.Series(values(of_task(study.table, task, alpha)))) for alpha in alphas]
    style = line_style(sorter)
    panel.plot(alphas, [value.mean for value in found], marker="o", ms=3.4, label=label(sorter), **style)
    if all(np.isfinite(value.low) for value in found):
        low, high = [value.low for value in found], [value.high for value in found]
        panel.fill_between(alphas, low, high, color=style["color"], alpha=0.15, lw=0)
