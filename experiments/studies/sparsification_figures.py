"""Figures and tables of the study `sparsification`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from experiments.report import plots, text
from experiments.report.kinds import Axes, DataFrame, Figure
from experiments.report.names import BASELINE, LOSS, OTHER_COLOURS, OURS, sorter_label
from experiments.report.statistics import estimate
from experiments.studies import sparsifiers
from experiments.studies.base import Study
from experiments.studies.sparsification import ends, settled_mean
from experiments.studies.sparsifiers import DENSE, method_label, options_of, task_label, variant
from experiments.studies.verdicts import select

COLOURS = {  # of methods, and of options of ExDyna
    "exdyna": "#c4322b",
    "topk": "#3465a4",
    "cltk": "#56a0c9",
    "hard_threshold": "#8c6d46",
    "sidco": "#7b5ea7",
    "deft": "#009e73",
    "micro": "#e69f00",
    "dense": "#333333",
    "static": "#777777",
    "paper": "#e08a86",
    "relative": "#e69f00",
    "counted": "#c4322b",
    "proportional": "#e69f00",
    "fixed": "#a5a000",
    False: "#d66bb0",  # without error feedback
}
SMOOTH = 5  # iterations, for curves only
THIN = {"lw": 1.3}


@plots.styled
def synthetic(study: Study) -> Figure:
    """Density by iteration, build-up and bytes by workers, imbalance and thresholds by rule, time of selecting."""
    figure, axes = plots.panels(2, 4, 14, 6.4)
    unused = iter(axes.flatten())
    for density in list(study.settings.densities)[:2]:
        _draw_density(next(unused), study, density)
    _draw_crowds(next(unused), study, "ratio", "build-up", "actual / target")
    _draw_crowds(next(unused), study, "bytes", "bytes on the wire", "sent / dense")
    for draw in (_draw_rules, _draw_settling, _draw_times, _draw_sparse_model):
        draw(next(unused), study)
    for panel in unused:
        panel.set_axis_off()
    note = f"means over seeds; {study.settings.dim:,} coordinates, {study.settings.workers} workers where not stated"
    title = "Sparse gradients: what is selected, sent and spent"
    return plots.finish(figure, title, f"{note} · {study.caption()}")


@plots.styled
def trainings(study: Study) -> Figure:
    """Train loss by epoch for every task, at the same actual density; dashed with D-RR, solid with CD-GraB. Below:
    what sparsity costs, and what CD-GraB's orders gain, seed by seed."""
    rows = select(study.table, measure="training")
    tasks, words = list(rows["task"].unique()), ("full train loss", "loss less that of dense", "loss less that of D-RR")
    figure, axes = plots.panels(3, len(tasks), 4.8 * len(tasks), 8.4, map(task_label, tasks))
    for column, task in zip(axes.T, tasks, strict=True):
        found = _losses(study, select(rows, task=task))
        for (method, sorter), losses in found.items():
            dashes = "-" if sorter == OURS else (0, (3, 1.5))
            style = {"color": method_colour(method), "ls": dashes, "lw": 1.4, "marker": "o", "ms": 2.5}
            name = f"{method_label(method)}, {sorter_label(sorter)}"
            column[0].plot(losses.mean(axis="columns"), label=name, **style)
            if method != DENSE and False not in options_of(method)[1].values():
                _draw_paired(column[1], losses - found[DENSE, sorter], **style)
            if sorter == OURS and (method, BASELINE) in found:
                _draw_paired(column[2], losses - found[method, BASELINE], **style)
        for panel, label in zip(column, words, strict=True):
            panel.set(xlabel="epoch", ylabel=label)
            plots.whole_numbers(panel.xaxis, 6)
        for panel in column[1:]:
            panel.axhline(0.0, **plots.GREY, zorder=1)
    note = (
        "means over seeds; strokes: 95 % intervals of the last difference; without error feedback losses are too high "
        "for the second row; Top-k's k is adapted to reach the same density"
    )
    return plots.finish(figure, "Training with a hundredth of the gradient", f"{note} · {study.caption()}")


def method_colour(method: str) -> str:
    """The colour of a method; a variant has that of its last option."""
    name, options = options_of(method)
    known = [COLOURS[key] for key in (name, *options.values()) if key in COLOURS]
    return known[-1] if known else OTHER_COLOURS[0]


def _named(method: str) -> dict:
    return {"color": method_colour(method), "label": method_label(method)}


def _draw_mean(panel: Axes, rows: DataFrame, x: str, y: str, smooth: int = 1, **style) -> None:
    """The mean over seeds. Their initial parameters make seeds differ more than methods: tables show the spread."""
    mean = rows.groupby(x)[y].mean().rolling(smooth, center=True, min_periods=1).mean()
    panel.plot(mean.index, mean, **style)


def _losses(study: Study, rows: DataFrame) -> dict[tuple[str, str], DataFrame]:
    """By method and sorter: train losses by epoch (rows) and seed (columns), of those that were run."""
    pairs = [(method, sorter) for method in study.settings.trained for sorter in study.settings.sorters]
    found = {(method, sorter): select(rows, method=method, sorter=sorter) for method, sorter in pairs}
    return {pair: some.pivot(index="epoch", columns="seed", values=LOSS) for pair, some in found.items() if len(some)}


def _draw_paired(panel: Axes, differences: DataFrame, **style) -> None:
    """Means over seeds of differences by epoch (rows), and the interval of the last one, beside those before it."""
    panel.plot(differences.mean(axis="columns"), **style)
    last, epochs = estimate(differences.iloc[-1]), differences.index[-1]
    if np.isfinite(last.low):
        place = epochs * (1 + 0.01 * len(panel.get_lines()))
        panel.plot([place] * 2, [last.low, last.high], color=style["color"], ls=style["ls"], lw=1.1)


def _draw_density(panel: Axes, study: Study, density: float) -> None:
    rows = select(study.table, measure="density", target=density)
    for method, some in rows.groupby("method", sort=False):
        _draw_mean(panel, some, "iteration", "ratio", SMOOTH, **THIN, **_named(method))
    _frame_ratios(panel, f"density, target {density:g}")


def _draw_crowds(panel: Axes, study: Study, column: str, title: str, words: str) -> None:
    """Against the workers: build-up, or bytes relative to dense ones."""
    crowds, rows = list(study.settings.crowds), select(study.table, measure="build-up")

    def level(method: str) -> np.ndarray:
        return np.array([settled_mean(select(rows, method=method, workers=w), column).mean() for w in crowds])

    dense = level(DENSE) if column == "bytes" else 1.0
    for method in study.settings.methods:
        panel.plot(crowds, level(method) / dense, "o-", ms=3, **THIN, **_named(method))
    panel.set(title=f"{title}, target {study.settings.densities[0]:g}", ylabel=words)
    plots.log_x(panel, crowds, "workers")
    plots.log_ticks(panel.yaxis)


def _draw_rules(panel: Axes, study: Study) -> None:
    for method, rows in select(study.table, measure="imbalance").groupby("method", sort=False):
        _draw_mean(panel, rows, "iteration", "imbalance", SMOOTH, color=method_colour(method), **THIN)
    panel.set(title="imbalance by rule of partitions", xlabel="iteration", ylabel="workers · max / sum − 1")
    panel.set_ylim(0, 1.35 * panel.get_ylim()[1])  # the names are above the curves
    _name_lines(panel, sparsifiers.RULES)


def _draw_settling(panel: Axes, study: Study) -> None:
    for method, rows in select(study.table, measure="settling").groupby("method", sort=False):
        _draw_mean(panel, rows, "iteration", "ratio", color=method_colour(method), lw=1.1)
    panel.axvline(study.settings.settling // 3, **plots.GREY, ls=":")
    _frame_ratios(panel, "thresholds: start, tenfold drop")
    _name_lines(panel, sparsifiers.THRESHOLDS[::-1])


def _frame_ratios(panel: Axes, title: str) -> None:
    panel.axhspan(0.9, 1.1, color="0.92", zorder=0)
    panel.set(title=title, xlabel="iteration", ylabel="actual / target")
    plots.log_ticks(panel.yaxis)


def _name_lines(panel: Axes, methods: tuple) -> None:
    """Labels in the panel, since the figure's legend does not contain the variants."""
    for row, method in enumerate(methods):
        place, style = (0.97, 0.98 - 0.075 * row), {"color": method_colour(method), "ha": "right", "va": "top"}
        panel.annotate(variant(method), place, xycoords="axes fraction", **style)


def _draw_times(panel: Axes, study: Study) -> None:
    workers, millions = study.settings.timed_workers[0], study.settings.timed_dim / 1e6
    rows = select(study.table, measure="time", workers=workers).groupby("timed")[["selection", "slowest"]].mean()
    rows = 1000 * rows.sort_values("selection")
    times, labels = rows["selection"], [method_label(method) for method in rows.index]
    panel.barh(labels, times, color=[method_colour(method) for method in rows.index], height=0.6)
    panel.plot(rows["slowest"], range(len(rows)), "|", color="black", ms=9)
    for row, (value, end) in enumerate(zip(times, rows.max(axis=1), strict=True)):
        panel.annotate(f"{value:.3g}", (end, row), (5, 0), textcoords="offset points", va="center", fontsize=7)
    panel.set(title=f"selecting, {workers} workers, dim {millions:g} M", xscale="log")
    panel.set(xlabel="ms, mean over workers; stroke: the slowest", xlim=(times.min() / 2, times.max() * 4))


def _draw_sparse_model(panel: Axes, study: Study) -> None:
    for method, rows in select(study.table, measure="sparse model").groupby("method", sort=False):
        style = {"ls": ":", "zorder": 3} if method == DENSE else {"ls": "-", "zorder": 2}
        _draw_mean(panel, rows, "epoch", LOSS, **style, **THIN, **_named(method))
    panel.set(title="sparse model: an embedding", xlabel="tenth of the training", ylabel="loss")


# -- tables -----------------------------------------------------------------------------------------------------------


@text.table
def training_table(table: DataFrame) -> Iterator[dict[str, str]]:
    """The final loss of every run."""
    runs = select(table, measure="training").groupby(["task", "method", "sorter"], sort=False)
    for (task, method, sorter), some in runs:
        dense = method == DENSE
        row = {"task": task_label(task), "method": method_label(method), "sorter": sorter_label(sorter)}
        row["train loss"] = str(estimate(ends(some)))
        row["actual density"] = "1" if dense else f"{some['density'].mean():.4f}"
        yield row | {"imbalance": "–" if dense else f"{some['imbalance'].mean():.2f}"}


@text.table
def ablation_table(table: DataFrame) -> Iterator[dict[str, str]]:
    """The sparse model with parts of ExDyna switched off."""
    for method in sparsifiers.ABLATED:
        some = select(table, measure="sparse model", method=method)
        row = {"method": method_label(method), "loss": str(estimate(ends(some)))}
        yield row | {name: f"{some[name].mean():.4f}" for name in ("density", "imbalance")}


@text.table
def time_table(table: DataFrame, measure: str = "time") -> Iterator[dict[str, str]]:
    """Milliseconds that workers take to select."""
    for (method, workers), some in select(table, measure=measure).groupby(["timed", "workers"], sort=False):
        mean, slowest = (f"{1000 * some[column].mean():.2f}" for column in ("selection", "slowest"))
        row = {"method": method_label(method), "workers": str(workers)}
        yield row | {"mean over workers (ms)": mean, "slowest worker (ms)": slowest}
