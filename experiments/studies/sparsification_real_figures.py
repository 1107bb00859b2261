"""The figure and a table of the study `sparsification` on real gradients."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from experiments.report import plots, text
from experiments.report.kinds import Axes, DataFrame, Figure
from experiments.report.statistics import estimate
from experiments.studies.base import Study
from experiments.studies.sparsification_figures import method_colour
from experiments.studies.sparsification_real import CROWDS, LONG, TIME, drop_of, later_half, tasks
from experiments.studies.sparsifiers import method_label, task_label
from experiments.studies.verdicts import select

COURSES = {"ratio": "actual / target", "threshold": "threshold", "imbalance": "workers · max / sum − 1"}


@plots.styled
def real(study: Study) -> Figure:
    """For each task: density, threshold and imbalance by iteration; build-up and time of selecting by workers."""
    trained = tasks(study.settings)
    figure, axes = plots.panels(len(trained), 5, 15, 3.4 * len(trained) + 0.4)
    for row, (task, own) in zip(axes, trained.items(), strict=True):
        rows = select(study.table, task=task)
        for panel, (column, words) in zip(row, COURSES.items(), strict=False):
            _draw_course(panel, rows, own, column)
            panel.set(title=f"{task_label(task)}, {own.workers} workers", xlabel="iteration", ylabel=words)
        _draw_crowds(row[3], select(rows, measure=CROWDS), own)
        row[3].set(title=f"{task_label(task)}: build-up", ylabel="actual / target")
        if own.timed_workers:
            _draw_times(row[4], select(rows, measure=TIME))
            row[4].set(title=f"{task_label(task)}: selecting", ylabel="ms, mean over workers")
        else:
            row[4].set_axis_off()
    for panel in (panel for row in axes for panel in (row[0], row[3])):
        panel.axhspan(0.9, 1.1, color="0.92", zorder=0)
    seeds = study.settings.real.seeds
    note = f"target {study.settings.densities[0]:g}; means over {seeds} seeds, by workers with 95 % intervals"
    note += "; dotted: gradients shrink tenfold; grey: within 10 % of the target"
    return plots.finish(figure, "Sparse gradients of real models", f"{note} · {study.caption(seeds)}")


def _draw_course(panel: Axes, rows: DataFrame, own: DictConfig, column: str) -> None:
    for method in own.methods:
        mean = select(rows, measure=LONG, method=method).groupby("iteration")[column].mean().dropna()
        if len(mean) and (column != "imbalance" or mean.max()):  # Top-k has neither a threshold nor an imbalance
            panel.plot(mean.index, mean, lw=1.3, color=method_colour(method), label=method_label(method))
    panel.axvline(drop_of(own), **plots.GREY, ls=":")
    if column == "imbalance":
        panel.set_ylim(bottom=0)
    else:
        plots.log_ticks(panel.yaxis)


def _draw_crowds(panel: Axes, rows: DataFrame, own: DictConfig) -> None:
    for method in own.crowd_methods:
        some = select(rows, method=method)
        by_workers = {workers: later_half(select(some, workers=workers), "ratio") for workers in own.crowds}
        plots.estimates(panel, by_workers, color=method_colour(method), label=method_label(method))
    plots.log_x(panel, own.crowds, "workers")
    plots.log_ticks(panel.yaxis)


def _draw_times(panel: Axes, rows: DataFrame) -> None:
    for method, some in rows.groupby("timed", sort=False):
        by_workers = {workers: 1000 * its["selection"] for workers, its in some.groupby("workers")}
        plots.estimates(panel, by_workers, color=method_colour(method), label=method_label(method))
    plots.log_x(panel, sorted(rows["workers"].unique()), "workers")
    plots.log_ticks(panel.yaxis)
    panel.set_ylim(bottom=500 * rows.groupby(["timed", "workers"])["selection"].mean().min())  # intervals may reach 0


@text.table
def crowd_table(study: Study) -> Iterator[dict[str, str]]:
    """Actual density / target by workers, and the imbalance of most workers."""
    trained = tasks(study.settings)
    counts = sorted({workers for own in trained.values() for workers in own.crowds})
    for task, own in trained.items():
        for method in own.crowd_methods:
            rows = select(study.table, measure=CROWDS, task=task, method=method)
            found = {workers: select(rows, workers=workers) for workers in own.crowds}
            row = {"task": task_label(task), "method": method_label(method)}
            for workers in counts:
                known = workers in found
                row[f"{workers} workers"] = str(estimate(later_half(found[workers], "ratio"))) if known else "–"
            most = max(own.crowds)
            yield row | {"imbalance of most workers": f"{later_half(found[most], 'imbalance').mean():.2f}"}
