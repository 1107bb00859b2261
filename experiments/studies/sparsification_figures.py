"""Figures of the study `sparsification`."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.report.figures import STYLE, finish
from experiments.studies.base import Study
from experiments.studies.sparsification_verdicts import measured, runs, settled_mean, training
from experiments.studies.sparsifiers import DENSE, PUBLISHED, RULES, TASK_NAMES, THRESHOLDS, label, options_of
from experiments.studies.style import label as sorter_label
from experiments.studies.style import plain_log_ticks, ticks_at

METHOD_COLOURS = {
    "exdyna": "#c4322b",
    "topk": "#3465a4",
    "cltk": "#56a0c9",
    "hard_threshold": "#8c6d46",
    "sidco": "#7b5ea7",
    "deft": "#009e73",
    "micro": "#e69f00",
    "dense": "#333333",
}
VARIANT_COLOURS = {
    PUBLISHED: "#e08a86",
    "static": "#777777",
    "paper": "#e08a86",
    "relative": "#e69f00",
    "balanced": "#c4322b",
    "counted": "#c4322b",
    "proportional": "#e69f00",
    "fixed": "#a5a000",
    False: "#d66bb0",  # without error feedback
}
SMOOTH = 5  # iterations, for curves only


def made_up(study: Study) -> Figure:
    """Density by iteration, build-up and bytes by workers, imbalance and thresholds by rule, time of selecting."""
    densities = list(study.settings.densities)
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(2, 4, figsize=(14, 6.4))
        panels = iter(axes.flatten())
        for density in densities[:2]:
            _draw_density(next(panels), study, density)
        _draw_crowds(next(panels), study, "ratio")
        _draw_crowds(next(panels), study, "bytes")
        _draw_rules(next(panels), study)
        _draw_settling(next(panels), study)
        _draw_times(next(panels), study)
        _draw_sparse_model(next(panels), study)
        for panel in panels:
            panel.set_axis_off()
        note = (
            f"means over seeds; {study.settings.dim:,} coordinates, {study.settings.workers} workers where not stated"
        )
        finish(figure, "Sparse gradients: what is selected, sent and spent", f"{note} · {study.caption()}")
    return figure


def trainings(study: Study) -> Figure:
    """Train loss by epoch for every task, at one actual density; dashed with D-RR, drawn out with CD-GraB."""
    table = study.table
    tasks = list(training(table)["task"].unique())
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(1, len(tasks), figsize=(4.8 * len(tasks), 3.9), squeeze=False)
        for panel, task in zip(axes[0], tasks, strict=True):
            for method in study.settings.trained:
                for sorter in study.settings.sorters:
                    some = runs(table, task, method, sorter)
                    if len(some):
                        name = f"{label(method)}, {sorter_label(sorter)}"
                        _draw_mean(panel, some, "epoch", "train_loss", label=name, **_style(method, sorter))
            panel.set(title=TASK_NAMES[task], xlabel="epoch", ylabel="full train loss")
            panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        note = "means over seeds; Top-k's k is adapted to reach the same density"
        finish(figure, "Training with a hundredth of the gradient", f"{note} · {study.caption()}")
    return figure


def colour(method: str) -> str:
    name, options = options_of(method)
    chosen = [VARIANT_COLOURS[value] for value in options.values()]
    return VARIANT_COLOURS.get(method) or (chosen[-1] if chosen else METHOD_COLOURS[name])


def _style(method: str, sorter: str) -> dict:
    return {
        "color": colour(method),
        "ls": "-" if sorter == "cd_grab" else (0, (3, 1.5)),
        "lw": 1.4,
        "marker": "o",
        "ms": 2.5,
    }


def _draw_mean(panel: Axes, rows: pd.DataFrame, x: str, y: str, smooth: int = 1, **style) -> None:
    """Over seeds, which differ in the model's first parameters more than methods do: their spread is in the tables."""
    mean = rows.groupby(x)[y].mean().rolling(smooth, center=True, min_periods=1).mean()
    panel.plot(mean.index, mean, **style)


def _draw_density(panel: Axes, study: Study, density: float) -> None:
    for method in study.settings.methods:
        rows = measured(study.table, "density", method, density=density)
        _draw_mean(panel, rows, "iteration", "ratio", SMOOTH, color=colour(method), label=label(method), lw=1.3)
    panel.axhspan(0.9, 1.1, color="0.92", zorder=0)
    panel.set(title=f"density, target {density:g}", xlabel="iteration", ylabel="actual / target", yscale="log")
    plain_log_ticks(panel.yaxis)


def _draw_crowds(panel: Axes, study: Study, column: str) -> None:
    """Against the workers: build-up, or bytes relative to dense ones."""
    crowds = list(study.settings.crowds)

    def level(method: str) -> list[float]:
        found = [settled_mean(measured(study.table, "build-up", method, count), column).mean() for count in crowds]
        return [float(value) for value in found]

    dense = level(DENSE) if column == "bytes" else [1.0] * len(crowds)
    for method in study.settings.methods:
        shares = [value / full for value, full in zip(level(method), dense, strict=True)]
        panel.plot(crowds, shares, "o-", ms=3, lw=1.3, color=colour(method), label=label(method))
    title, words = {"ratio": ("build-up", "actual / target"), "bytes": ("bytes on the wire", "sent / dense")}[column]
    panel.set(title=f"{title}, target {study.settings.densities[0]:g}", xlabel="workers", ylabel=words)
    panel.set(xscale="log", yscale="log")
    ticks_at(panel.xaxis, crowds)
    plain_log_ticks(panel.yaxis)


def _draw_rules(panel: Axes, study: Study) -> None:
    for method in RULES:
        rows, rule = measured(study.table, "imbalance", method), options_of(method)[1].get("rule", "balanced")
        _draw_mean(panel, rows, "iteration", "imbalance", SMOOTH, color=VARIANT_COLOURS[rule], lw=1.3)
    panel.set(title="imbalance by rule of partitions", xlabel="iteration", ylabel="workers · max / sum − 1")
    panel.set_ylim(0, 1.35 * panel.get_ylim()[1])  # the names are above the curves
    _name_lines(panel, ["static", "paper", "relative", "balanced"])


def _draw_settling(panel: Axes, study: Study) -> None:
    for method in THRESHOLDS:
        rows, rule = measured(study.table, "settling", method), options_of(method)[1]["threshold"]
        _draw_mean(panel, rows, "iteration", "ratio", color=VARIANT_COLOURS[rule], lw=1.1)
    panel.axhspan(0.9, 1.1, color="0.92", zorder=0)
    panel.axvline(study.settings.settling // 3, color="0.6", lw=0.8, ls=":")
    panel.set(title="thresholds: start, tenfold drop", xlabel="iteration", ylabel="actual / target", yscale="log")
    plain_log_ticks(panel.yaxis)
    _name_lines(panel, ["fixed", "paper", "proportional", "counted"])


def _name_lines(panel: Axes, rules: list[str]) -> None:
    """In the panel: rules are none of the methods that the figure's legend names."""
    for row, rule in enumerate(rules):
        place = (0.97, 0.98 - 0.075 * row)
        panel.annotate(rule, place, xycoords="axes fraction", ha="right", va="top", color=VARIANT_COLOURS[rule])


def _draw_times(panel: Axes, study: Study) -> None:
    workers = study.settings.timed_workers[0]
    rows = measured(study.table, "time", workers=workers).groupby("timed")[["selection", "slowest"]].mean()
    rows = rows.sort_values("selection")
    times = rows["selection"]
    panel.barh([label(m) for m in times.index], 1000 * times, color=[colour(m) for m in times.index], height=0.6)
    panel.plot(1000 * rows["slowest"], range(len(rows)), "|", color="black", ms=9)
    for row, (value, end) in enumerate(zip(1000 * times, 1000 * rows.max(axis=1), strict=True)):
        panel.annotate(f"{value:.3g}", (end, row), (5, 0), textcoords="offset points", va="center", fontsize=7)
    millions = study.settings.timed_dim / 1e6
    panel.set(
        title=f"selecting, {workers} workers, dim {millions:g} M",
        xlabel="ms, mean over workers; stroke: the slowest",
        xscale="log",
    )
    panel.set_xlim(times.min() * 500, times.max() * 4000)


def _draw_sparse_model(panel: Axes, study: Study) -> None:
    rows = study.table[study.table["measure"] == "sparse model"]
    for method in rows["method"].unique():
        some = rows[rows["method"] == method]
        style = {"color": colour(method), "ls": ":" if method == DENSE else "-", "zorder": 3 if method == DENSE else 2}
        _draw_mean(panel, some, "epoch", "train_loss", label=label(method), lw=1.3, **style)
    panel.set(title="sparse model: an embedding", xlabel="tenth of the training", ylabel="loss")
