"""Figures of runs: learning curves of one group, and sweeps with one column per group."""

from __future__ import annotations

import textwrap

from experiments.report import plots
from experiments.report.kinds import Axes, Figure, Series
from experiments.report.names import (
    BASELINE,
    PUBLISHED_SORTERS,
    column_title,
    metric_label,
    sorter_colour,
    sorter_label,
)
from experiments.report.published import published
from experiments.report.runs import Group, Sweep
from experiments.report.text import FEWEST_SEEDS


@plots.styled
def learning_curves(group: Group, metrics: tuple[str, ...], title: str, experiment: str) -> Figure:
    """`metrics` against epochs and seconds, mean ± std over seeds for every sorter; last row: differences to random
    reshuffling, seed by seed.

    The paper's curves are added (dashed) only on the paper's data; its differences also beside those on other data.
    Seconds only if they are meaningful.
    """
    rows = {"epoch": group} | ({"elapsed": group.alone} if group.alone.manifests else {})
    compared = BASELINE in group.sorters and len(group.sorters) > 1
    count = len(rows) + compared
    figure, axes = plots.panels(count, len(metrics), 4.6 * len(metrics), 2.4 * count + 1.0)
    for row, (axis, runs) in zip(axes, rows.items(), strict=False):
        for panel, metric in zip(row, metrics, strict=True):
            _draw_panel(panel, runs, metric, axis, experiment)
            _frame(panel, _converged(group, metric, experiment))
    for panel, metric in zip(axes[-1], metrics, strict=True) if compared else ():
        _draw_differences(panel, group, metric, experiment)
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
    if group.on_the_papers_data:
        _draw_published(panel, group, metric, axis, experiment)
    panel.set(xlabel=metric_label(axis), ylabel=textwrap.fill(metric_label(metric), 26))
    if axis == "epoch":
        plots.whole_numbers(panel.xaxis, steps=[1, 2, 5, 10])


def _draw_differences(panel: Axes, group: Group, metric: str, experiment: str) -> None:
    """Means over seeds of the differences to random reshuffling; too few seeds are shown one by one."""
    shown, words = [], f"{metric_label(metric)} less {group.label(BASELINE)}'s"
    panel.axhline(0.0, **plots.GREY)
    for sorter in (sorter for sorter in group.sorters if sorter != BASELINE):
        found, colour = group.differences(sorter, BASELINE, metric), sorter_colour(sorter)
        mean, std = found.mean(axis="columns"), found.std(axis="columns")
        if found.shape[1] >= FEWEST_SEEDS:
            plots.mean_std(panel, found.index, mean, std, color=colour)
            shown += _later(mean - std) + _later(mean + std)
        else:
            panel.plot(found.index, mean, color=colour)
            panel.plot(found.index, found, color=colour, lw=0.6, alpha=0.6)
            shown += [value for seed in found for value in _later(found[seed])]
    papers, own = papers_curves(group, metric, experiment) if not group.trial else {}, group.on_the_papers_data
    for sorter in papers.keys() - {BASELINE}:
        difference = (papers[sorter] - papers[BASELINE]).dropna()
        label = f"{sorter_label(sorter)} less {sorter_label(BASELINE)}, paper, on its own data" if not own else None
        panel.plot(difference, color=sorter_colour(sorter), label=label, **plots.PUBLISHED)
        shown += _later(difference)
    _frame(panel, [*shown, 0.0])
    panel.set(xlabel=metric_label("epoch"), ylabel=textwrap.fill(words, 26))
    plots.whole_numbers(panel.xaxis, steps=[1, 2, 5, 10])


def _draw_published(panel: Axes, group: Group, metric: str, axis: str, experiment: str) -> None:
    curves = published(experiment, metric, "epoch" if axis == "epoch" else "seconds", group.column)
    for series, curve in curves.items():
        colour = sorter_colour(PUBLISHED_SORTERS[series])
        panel.plot(curve["x"], curve["mean"], color=colour, label=f"{series}, paper", **plots.PUBLISHED)
    if axis != "epoch" and curves:
        panel.set_xscale("log")  # the paper's machine and ours are more than a factor of ten apart


def _converged(group: Group, metric: str, experiment: str) -> list[float]:
    """The values that must be visible."""
    shown = []
    for curve in (group.curve(sorter, metric) for sorter in group.sorters):
        shown += _later(curve["mean"] - curve["std"]) + _later(curve["mean"] + curve["std"])
    papers = papers_curves(group, metric, experiment) if group.on_the_papers_data else {}
    return shown + [value for curve in papers.values() for value in _later(curve)]


def papers_curves(group: Group, metric: str, experiment: str) -> dict[str, Series]:
    """The paper's means by sorter and epoch."""
    curves = published(experiment, metric, column=group.column)
    return {PUBLISHED_SORTERS[series]: curve.set_index("x")["mean"] for series, curve in curves.items()}


def _later(values: Series) -> list[float]:
    """By epoch, without the first tenth of the epochs, which would hide the later differences."""
    epochs = values.index
    return values[epochs > (epochs.max() / 10 if epochs.max() >= 10 else 0)].dropna().tolist()


def _frame(panel: Axes, shown: list[float]) -> None:
    if shown and max(shown) > min(shown):
        margin = 0.06 * (max(shown) - min(shown))
        panel.set_ylim(min(shown) - margin, max(shown) + margin)


def _finish(figure: Figure, title: str, runs: Group | Sweep) -> Figure:
    embedded = " (embedded data)" if runs.manifests[0]["data"]["embedded"] else ""
    return plots.finish(figure, title + embedded, runs.caption())
