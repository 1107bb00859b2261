"""Figures of runs: learning curves of one group, and sweeps with one column per group."""

from __future__ import annotations

import textwrap

from experiments.report import plots
from experiments.report.kinds import Axes, Figure, Series
from experiments.report.names import PUBLISHED_SORTERS, column_title, metric_label, sorter_colour
from experiments.report.published import published
from experiments.report.runs import Group, Sweep


@plots.styled
def learning_curves(group: Group, metrics: tuple[str, ...], title: str, experiment: str) -> Figure:
    """`metrics` against epochs (upper row) and seconds (lower row), mean ± std over seeds for every sorter.

    The paper's curves are added (dashed) only if data and settings are the paper's; seconds only if they are
    meaningful.
    """
    rows = ("epoch", "elapsed") if group.timed else ("epoch",)
    figure, axes = plots.panels(len(rows), len(metrics), 4.6 * len(metrics), 2.4 * len(rows) + 1.0)
    for row, axis in zip(axes, rows, strict=True):
        for panel, metric in zip(row, metrics, strict=True):
            _draw_panel(panel, group, metric, axis, experiment)
            _frame(panel, _converged(group, metric, experiment))
    return _finish(figure, title, group)


@plots.styled
def sweep_curves(sweep: Sweep, metrics: tuple[str, ...], title: str, experiment: str) -> Figure:
    """One column per value of the swept setting, one row per metric, against epochs.

    Columns that differ in workers share their y axes, to be compared; learning rates lead to different levels.
    """
    share, columns = sweep.setting == "workers", len(sweep.groups)
    titles = [column_title(sweep.setting, group.setting(sweep.setting)) for group in sweep.groups]
    width, height = max(2.5 * columns + 0.7, 6.5), 2.2 * len(metrics) + 1.2
    figure, axes = plots.panels(len(metrics), columns, width, height, titles, sharex="col" if share else "none")
    for row, metric in zip(axes, metrics, strict=True):
        shown = [_converged(group, metric, experiment) for group in sweep.groups]
        for panel, group, own in zip(row, sweep.groups, shown, strict=True):
            _draw_panel(panel, group, metric, "epoch", experiment)
            _frame(panel, [value for values in shown for value in values] if share else own)
            if share:
                panel.label_outer()
    return _finish(figure, title, sweep)


def _draw_panel(panel: Axes, group: Group, metric: str, axis: str, experiment: str) -> None:
    for sorter in group.sorters:
        curve = group.curve(sorter, metric)
        if not curve.empty:  # empty: a metric that these runs did not log
            x, style = curve.index if axis == "epoch" else curve["elapsed"], {"color": sorter_colour(sorter)}
            if 2 * len(curve) < curve.index[-1]:  # measured in some epochs only: show which
                style |= plots.DOTS | {"ms": 2.6}
            plots.mean_std(panel, x, curve["mean"], curve["std"], label=group.label(sorter), **style)
    if group.like_the_paper:
        _draw_published(panel, group, metric, axis, experiment)
    panel.set(xlabel=metric_label(axis), ylabel=textwrap.fill(metric_label(metric), 26))
    if axis == "epoch":
        plots.whole_numbers(panel.xaxis, steps=[1, 2, 5, 10])


def _draw_published(panel: Axes, group: Group, metric: str, axis: str, experiment: str) -> None:
    curves = published(experiment, metric, "epoch" if axis == "epoch" else "seconds", group.column)
    for series, curve in curves.items():
        colour = sorter_colour(PUBLISHED_SORTERS[series])
        panel.plot(curve["x"], curve["mean"], color=colour, label=f"{series}, paper", **plots.PUBLISHED)
    if axis != "epoch" and curves:
        panel.set_xscale("log")  # the paper's machine and ours are more than a factor of ten apart


def _converged(group: Group, metric: str, experiment: str) -> list[float]:
    """The values that must be visible. Without the first tenth of the epochs, which would hide the later
    differences."""

    def later(x: Series, values: Series) -> list[float]:
        return values[x > (x.max() / 10 if x.max() >= 10 else 0)].dropna().tolist()

    shown = []
    for curve in (group.curve(sorter, metric).reset_index() for sorter in group.sorters):
        for end in (curve["mean"] - curve["std"], curve["mean"] + curve["std"]):
            shown += later(curve["epoch"], end)
    if group.like_the_paper:
        for curve in published(experiment, metric, column=group.column).values():
            shown += later(curve["x"], curve["mean"])
    return shown


def _frame(panel: Axes, shown: list[float]) -> None:
    if shown and max(shown) > min(shown):
        margin = 0.06 * (max(shown) - min(shown))
        panel.set_ylim(min(shown) - margin, max(shown) + margin)


def _finish(figure: Figure, title: str, runs: Group | Sweep) -> Figure:
    embedded = " (embedded data)" if runs.manifests[0]["data"]["embedded"] else ""
    return plots.finish(figure, title + embedded, runs.caption())
