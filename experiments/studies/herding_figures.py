"""Figures and tables of the study `herding`."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cdgrab.sorters import SORTERS
from experiments.report.figures import COLOURS, STYLE, finish
from experiments.report.tables import markdown
from experiments.studies.base import Study
from experiments.studies.herding import floors, published_bounds, published_floors
from experiments.studies.style import ALONE, label, line_style, plain_log_ticks, ticks_at
from experiments.studies.verdicts import estimate, power_exponents

PUBLISHED_STYLE = {"ls": (0, (4, 2)), "lw": 1.1}


def bounds_and_floors(study: Study) -> Figure:
    """The bound round by round for every worker count, and the floors against the workers; the paper's dashed."""
    workers = list(study.settings.workers)
    columns = -(-(len(workers) + 1) // 2)
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(2, columns, figsize=(3.3 * columns, 6.2), squeeze=False)
        panels = axes.flatten()
        for panel, count in zip(panels, workers, strict=False):
            _draw_rounds(panel, study, count)
            panel.sharey(panels[0])
        _draw_floors(panels[-1], study)
        for panel in panels[len(workers) : -1]:
            panel.set_axis_off()
        title = f"Parallel herding bound of {study.settings.vectors:,} random vectors, {study.settings.dim} dimensions"
        finish(figure, title, f"mean ± std over seeds; floor: mean of the last rounds · {study.caption()}")
    return figure


def floor_table(study: Study) -> str:
    """Ours with its interval, and the paper's where it has the same vectors and workers."""
    ours, theirs = floors(study.table), published_floors(study.settings).set_index(["sorter", "workers"])["bound"]
    rows = []
    for (workers, sorter), some in ours.groupby(["workers", "sorter"], sort=True):
        paper = f"{theirs[sorter, workers]:.3g}" if (sorter, workers) in theirs.index else "–"
        level = str(estimate(some["bound"]))
        rows.append({"workers": str(workers), "sorter": label(sorter), "floor": level, "the paper's": paper})
    return markdown(rows)


def _draw_rounds(panel: Axes, study: Study, workers: int) -> None:
    table = study.table
    for sorter in (*study.settings.sorters, ALONE):
        count = 1 if sorter == ALONE else workers
        by_round = table[(table["sorter"] == sorter) & (table["workers"] == count)].groupby("round")["bound"]
        mean, std = by_round.mean(), by_round.std(ddof=0)
        style = line_style(sorter)
        panel.plot(mean.index, mean, label=label(sorter), **style)
        panel.fill_between(mean.index, mean - std, mean + std, color=style["color"], alpha=0.18, lw=0)
    for sorter, curve in published_bounds(workers, study.settings.vectors).items():
        panel.plot(curve["x"], curve["mean"], color=COLOURS[sorter], label=f"{label(sorter)}, paper", **PUBLISHED_STYLE)
    panel.set(title=f"{workers} workers", xlabel="reorder round", ylabel="herding bound", yscale="log")
    panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    plain_log_ticks(panel.yaxis)


def _draw_floors(panel: Axes, study: Study) -> None:
    """Log-log, each with the power law fitted to it."""
    ours, theirs = floors(study.table), published_floors(study.settings)
    for sorter in (sorter for sorter in study.settings.sorters if SORTERS[sorter].needs_gradients):
        some, colour = ours[ours["sorter"] == sorter], COLOURS[sorter]
        mean = some.groupby("workers")["bound"].mean()
        exponent = power_exponents(some, "workers", "bound").mean()
        x = np.log(mean.index.to_numpy())
        fit = np.exp(np.log(mean).mean() + exponent * (x - x.mean()))
        panel.plot(mean.index, fit, color=colour, lw=1)
        panel.scatter(some["workers"], some["bound"], color=colour, s=14, zorder=3)
        paper = theirs[theirs["sorter"] == sorter]
        panel.scatter(
            paper["workers"], paper["bound"], facecolors="none", edgecolors=colour, marker="s", s=34, zorder=3
        )
        text = f"workers$^{{{exponent:.2f}}}$"
        panel.annotate(text, (mean.index[-1], fit[-1]), (7, 0), textcoords="offset points", va="center", color=colour)
    panel.axhline(ours[ours["sorter"] == ALONE]["bound"].mean(), **line_style(ALONE))
    panel.set(title="floor", xlabel="workers (□ the paper's)", ylabel="herding bound", xscale="log", yscale="log")
    counts = list(study.settings.workers)
    ticks_at(panel.xaxis, counts)
    plain_log_ticks(panel.yaxis)
    panel.set_xlim(counts[0] / 1.2, counts[-1] * (counts[-1] / counts[0]) ** 0.4)  # room for the exponents
