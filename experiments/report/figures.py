"""All plotting code: results in, figures out. Notebooks call these functions and draw nothing themselves."""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.report.published import SORTERS, published
from experiments.report.runs import Group, Sweep
from experiments.store.files import RESULTS

STYLE = str(Path(__file__).with_name("paper.mplstyle"))
COLOURS = {
    "cd_grab": "#c4322b",
    "d_rr": "#3465a4",
    "d_rr,shared=True": "#86a9d1",
    "id_grab_pair": "#e69f00",
    "id_grab_bal": "#009e73",
    "grab": "#009e73",
    "grab_pair": "#e69f00",
    "riffle": "#7b5ea7",
    "kh": "#56a0c9",
    "flip_flop": "#8c6d46",
    "shuffle_once": "#777777",
}
AXIS_LABELS = {
    "train_loss": "full train loss",
    "test_accuracy": "test accuracy (%)",
    "test_loss": "test loss",
    "test_ppl": "test perplexity",
    "test_ppl_authors": "test perplexity, as published",
    "val_ppl": "validation perplexity",
    "val_ppl_authors": "validation perplexity, as published",
    "val_loss": "validation loss",
    "val_accuracy": "validation accuracy (%)",
    "val_accuracy_mm": "mismatched validation accuracy (%)",
    "test_smape": "test SMAPE",
    "herding_per_vector": "herding bound, per vector",
    "herding_per_step": "herding bound, per step (eq. 8)",
    "epoch": "epoch",
    "elapsed": "training time (s)",
}
COLUMN_TITLES = {"workers": "{:g} workers", "task.lr": "lr {:g}"}


def learning_curves(group: Group, metrics: tuple[str, ...], title: str, experiment: str) -> Figure:
    """`metrics` against epochs (upper row) and seconds (lower row), mean ± std over seeds for every sorter.

    The paper's curves are added (dashed) only when data and settings are the paper's; seconds where they mean anything.
    """
    rows = ("epoch", "elapsed") if group.timed else ("epoch",)
    with plt.style.context(STYLE):
        size = (4.6 * len(metrics), 2.4 * len(rows) + 1.0)
        figure, axes = plt.subplots(len(rows), len(metrics), figsize=size, squeeze=False)
        for row, axis in zip(axes, rows, strict=True):
            for panel, metric in zip(row, metrics, strict=True):
                _draw_panel(panel, group, metric, axis, experiment)
                _frame(panel, _converged(group, metric, experiment))
        _finish_runs(figure, title, group)
    return figure


def sweep_curves(sweep: Sweep, metrics: tuple[str, ...], title: str, experiment: str) -> Figure:
    """One column per value of the swept setting, one row per metric, against epochs.

    Columns that differ in workers share their y axes: that is the comparison. Learning rates lead to other levels.
    """
    share = sweep.setting == "workers"
    with plt.style.context(STYLE):
        size = (max(2.5 * len(sweep.groups) + 0.7, 6.5), 2.2 * len(metrics) + 1.2)
        figure, axes = plt.subplots(len(metrics), len(sweep.groups), figsize=size, squeeze=False)
        for row, metric in zip(axes, metrics, strict=True):
            shown = [_converged(group, metric, experiment) for group in sweep.groups]
            for panel, group, own in zip(row, sweep.groups, shown, strict=True):
                _draw_panel(panel, group, metric, "epoch", experiment)
                _frame(panel, [value for values in shown for value in values] if share else own)
                if share:
                    panel.label_outer()
        for panel, group in zip(axes[0], sweep.groups, strict=True):
            panel.set_title(column_title(group, sweep.setting))
        _finish_runs(figure, title, sweep)
    return figure


def column_title(group: Group, setting: str) -> str:
    """64 workers; lr 0.001."""
    return COLUMN_TITLES.get(setting, "{}").format(group.manifests[0]["science"][setting])


def save(figure: Figure, name: str) -> list[Path]:
    """PNG and PDF under results/figures; the same runs give the same bytes."""
    folder = RESULTS / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.pdf"]
    with plt.style.context(STYLE):
        figure.savefig(paths[0])
        figure.savefig(paths[1], metadata={"CreationDate": None})
    return paths


def _draw_panel(panel: Axes, group: Group, metric: str, axis: str, experiment: str) -> None:
    for sorter in group.sorters:
        _draw_ours(panel, group, sorter, metric, axis)
    if group.like_the_paper:
        _draw_published(panel, group, metric, axis, experiment)
    panel.set(xlabel=AXIS_LABELS[axis], ylabel=textwrap.fill(AXIS_LABELS[metric], 26))
    if axis == "epoch":
        panel.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))


def _draw_ours(panel: Axes, group: Group, sorter: str, metric: str, axis: str) -> None:
    curve = group.curve(sorter, metric)
    if curve.empty:  # a metric that these runs did not log
        return
    x = curve.index if axis == "epoch" else curve["elapsed"]
    colour = COLOURS.get(sorter) or COLOURS.get(sorter.partition(",")[0])
    (line,) = panel.plot(x, curve["mean"], color=colour, label=group.label(sorter))
    panel.fill_between(
        x, curve["mean"] - curve["std"], curve["mean"] + curve["std"], color=line.get_color(), alpha=0.18, lw=0
    )


def _draw_published(panel: Axes, group: Group, metric: str, axis: str, experiment: str) -> None:
    curves = published(experiment, metric, "epoch" if axis == "epoch" else "seconds", group.column)
    for series, curve in curves.items():
        colour = COLOURS[SORTERS[series]]
        panel.plot(curve["x"], curve["mean"], color=colour, ls=(0, (4, 2)), lw=1.1, label=f"{series}, paper")
    if axis != "epoch" and curves:
        panel.set_xscale("log")  # the paper's machine and ours are more than a factor of ten apart


def _converged(group: Group, metric: str, experiment: str) -> list[float]:
    """What must be seen: the first tenth of the epochs would squeeze the differences that matter into a line."""

    def later(x: pd.Series, values: pd.Series) -> list[float]:
        return values[x > (x.max() / 10 if x.max() >= 10 else 0)].dropna().tolist()

    shown = []
    for curve in (group.curve(sorter, metric).reset_index() for sorter in group.sorters):
        shown += later(curve["epoch"], curve["mean"] - curve["std"]) + later(
            curve["epoch"], curve["mean"] + curve["std"]
        )
    if group.like_the_paper:
        for curve in published(experiment, metric, column=group.column).values():
            shown += later(curve["x"], curve["mean"])
    return shown


def _frame(panel: Axes, shown: list[float]) -> None:
    if shown and max(shown) > min(shown):
        margin = 0.06 * (max(shown) - min(shown))
        panel.set_ylim(min(shown) - margin, max(shown) + margin)


def finish(figure: Figure, title: str, caption: str) -> None:
    """Legend and title above the panels, caption below; sizes in inches, so that wide and tall figures look alike."""
    width, height = figure.get_size_inches()
    entries = {
        label: handle for panel in figure.axes for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    rows = -(-len(entries) // max(1, int(width / 1.5)))
    columns = -(-len(entries) // max(1, rows))  # rows of about equal length
    figure.text(0.5, 1 - 0.06 / height, title, ha="center", va="top", fontsize="large", fontweight="bold")
    figure.legend(entries.values(), entries, loc="upper center", bbox_to_anchor=(0.5, 1 - 0.24 / height), ncols=columns)
    lines = textwrap.wrap(caption, int(width * 21))
    figure.text(0.5, 0.03 / height, "\n".join(lines), ha="center", fontsize=6.5, color="0.35")
    bottom = 0.2 + 0.11 * max(0, len(lines) - 2)
    figure.tight_layout(rect=(0, bottom / height, 1, 1 - (0.26 + 0.2 * rows) / height))


def _finish_runs(figure: Figure, title: str, runs: Group | Sweep) -> None:
    finish(figure, title + " (embedded data)" * runs.manifests[0]["data"]["embedded"], runs.caption())
