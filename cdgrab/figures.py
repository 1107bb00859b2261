"""All plotting code: results in, figures out. Notebooks call these functions and draw nothing themselves."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .results import RESULTS, Group, published

STYLE = str(Path(__file__).with_name("paper.mplstyle"))
COLOURS = {
    "cd_grab": "#c4322b",
    "d_rr": "#3465a4",
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
    "val_ppl": "validation perplexity",
    "test_smape": "test SMAPE",
    "epoch": "epoch",
    "elapsed": "training time (s)",
}


def learning_curves(
    group: Group, metrics: tuple[str, ...], title: str, figure_name: str, pair_offset: float = 0.0
) -> Figure:
    """`metrics` against epochs (upper row) and seconds (lower row), mean ± std over seeds for every sorter.

    The paper's curves are added (dashed) only when the data is the paper's own. `pair_offset` shifts them where the
    paper's point at x stands for epochs x and x + 1.
    """
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(2, len(metrics), figsize=(4.6 * len(metrics), 5.6), squeeze=False)
        for column, metric in enumerate(metrics):
            for row, axis in enumerate(("epoch", "elapsed")):
                panel = axes[row][column]
                for sorter in group.sorters:
                    _draw_ours(panel, group, sorter, metric, axis)
                if group.papers_own_data:
                    _draw_published(panel, figure_name, metric, axis, pair_offset)
                _frame_converged_part(panel, group, metric, figure_name)
                panel.set(xlabel=AXIS_LABELS[axis], ylabel=AXIS_LABELS[metric])
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.955), ncols=len(labels))
        figure.suptitle(title, y=0.985, fontweight="bold")
        figure.text(0.5, 0.005, group.caption(), ha="center", fontsize=6.5, color="0.35", wrap=True)
        figure.tight_layout(rect=(0, 0.025, 1, 0.945))
    return figure


def save(figure: Figure, name: str) -> list[Path]:
    """PNG and PDF under results/figures; the same runs give the same bytes."""
    folder = RESULTS / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.pdf"]
    with plt.style.context(STYLE):
        figure.savefig(paths[0])
        figure.savefig(paths[1], metadata={"CreationDate": None})
    return paths


def _draw_ours(panel: Axes, group: Group, sorter: str, metric: str, axis: str) -> None:
    curve = group.curve(sorter, metric)
    x = curve.index if axis == "epoch" else curve["elapsed"]
    colour = COLOURS.get(sorter.partition(",")[0])
    (line,) = panel.plot(x, curve["mean"], color=colour, label=group.label(sorter))
    panel.fill_between(
        x, curve["mean"] - curve["std"], curve["mean"] + curve["std"], color=line.get_color(), alpha=0.18, lw=0
    )


def _draw_published(panel: Axes, figure_name: str, metric: str, axis: str, pair_offset: float) -> None:
    colours = {"CD-GraB": COLOURS["cd_grab"], "D-RR": COLOURS["d_rr"]}
    for series, curve in published(figure_name, metric, "epoch" if axis == "epoch" else "seconds").items():
        x = curve["x"] + (pair_offset if axis == "epoch" else 0.0)
        panel.plot(x, curve["mean"], color=colours.get(series, "0.5"), ls=(0, (4, 2)), lw=1.1, label=f"{series}, paper")
    if axis != "epoch":
        panel.set_xscale("log")  # the paper's machine and ours are more than a factor of ten apart


def _frame_converged_part(panel: Axes, group: Group, metric: str, figure_name: str) -> None:
    """The first tenth of the epochs may be cut off: it would squeeze the differences that matter into a line."""
    epochs = group.metrics["epoch"].max()
    shown = [group.metrics[group.metrics["epoch"] > (epochs / 10 if epochs >= 10 else 0)][metric]]
    if group.papers_own_data:
        shown += [
            curve["mean"][curve["x"] > curve["x"].max() / 10] for curve in published(figure_name, metric).values()
        ]
    low, high = min(values.min() for values in shown), max(values.max() for values in shown)
    if high > low:
        panel.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))
