"""GLUE: the runs of all datasets in, Table 1 and its figure out."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.data.glue import LAYOUTS
from experiments.report.figures import AXIS_LABELS, COLOURS, STYLE
from experiments.report.published import SORTERS, published
from experiments.report.runs import Group, Sweep, pretrained_by
from experiments.report.tables import markdown

EXPERIMENT = "table1_glue"
OURS, BASELINE = "cd_grab", "d_rr"
PAIR = {name: sorter for name, sorter in SORTERS.items() if sorter in (OURS, BASELINE)}
METRICS = {"val_accuracy": "", "val_accuracy_mm": "-mm"}  # MNLI has both; what is added to the dataset's name


@dataclass(frozen=True)
class Row:
    """One line of the table: a dataset, or one of MNLI's two validation parts."""

    group: Group
    metric: str

    @property
    def name(self) -> str:
        return self.group.column + METRICS[self.metric]

    def best(self, sorter: str) -> pd.Series:
        """Each seed's best validation accuracy over the epochs."""
        return self.group.best(sorter, self.metric)

    def difference(self) -> pd.Series:
        """CD-GraB − D-RR, by seed; empty when one of the two is missing."""
        return (self.best(OURS) - self.best(BASELINE)).dropna()

    def papers(self) -> dict[str, tuple[float, float]]:
        """Mean and std by sorter; empty for what the paper's table does not have."""
        numbers = published(EXPERIMENT, self.metric, column=self.group.column)
        last = {PAIR[series]: table.iloc[-1] for series, table in numbers.items()}
        return {sorter: (line["mean"], line["high"] - line["mean"]) for sorter, line in last.items()}


def rows(sweep: Sweep) -> list[Row]:
    """In the order of the paper's table, then the datasets that it leaves out."""
    order = [*LAYOUTS, "embedded"]
    groups = sorted(sweep.groups, key=lambda group: order.index(group.column))
    return [Row(group, metric) for group in groups for metric in METRICS if metric in group.metrics]


def summary(sweep: Sweep) -> str:
    """Table 1 in Markdown: ours, the difference paired by seed, and the paper's numbers."""
    lines = []
    for row in rows(sweep):
        difference, papers = row.difference(), row.papers()
        lines.append(
            {"dataset": row.name}
            | {name: _mean_std(row.best(sorter)) for name, sorter in PAIR.items()}
            | {"difference": _mean_std(difference, "+")}
            | {"better on": f"{int((difference > 0).sum())} of {len(difference)} seeds"}
            | {f"paper: {name}": "{:.2f} ± {:.2f}".format(*papers[s]) if papers else "–" for name, s in PAIR.items()}
            | {"paper: difference": f"{papers[OURS][0] - papers[BASELINE][0]:+.2f}" if papers else "–"}
        )
    notes = ["Best validation accuracy over the epochs (%), mean ± std over seeds; differences are paired by seed."]
    notes += [f"{group.caption()} · {_encoder(group)}." for group in dict.fromkeys(row.group for row in rows(sweep))]
    return markdown(lines) + "\n\n" + "  \n".join(notes) + "\n"


def figure(sweep: Sweep, title: str) -> Figure:
    """Above: best accuracies, their paired differences, and the train losses relative to D-RR's, epoch by epoch.
    Below: the accuracy of every dataset against epochs. The paper's numbers (hollow) only where data and settings are
    the paper's."""
    shown = rows(sweep)
    with plt.style.context(STYLE):
        drawn = plt.figure(figsize=(11.5, 6.6), layout="constrained")
        above, below = drawn.subfigures(2, 1, height_ratios=(1.25, 1.0))
        panels = above.subplots(1, 3, width_ratios=(1.25, 1.0, 1.0))
        _draw_accuracies(panels[0], shown)
        _draw_differences(panels[1], shown)
        _draw_losses(panels[2], shown)
        for panel in panels[:2]:
            panel.set_xticks(range(len(shown)), [row.name for row in shown], rotation=25 * (len(shown) > 4))
            panel.set_xlim(-0.5, len(shown) - 0.5)
        for panel, row in zip(below.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
            _draw_epochs(panel, row)
        below.axes[0].set_ylabel(AXIS_LABELS["val_accuracy"])
        drawn.suptitle(title + " (embedded data)" * (shown[0].name == "embedded"), fontweight="bold")
        others = len({row.group.column for row in shown}) - 1
        caption = f"{shown[0].group.caption()} · {_encoder(shown[0].group)}"
        caption += f" · {others} more datasets: see the table" if others else ""
        drawn.supxlabel("\n".join(textwrap.wrap(caption, 190)), fontsize=6.5, color="0.35")
    return drawn


def _draw_accuracies(panel: Axes, shown: list[Row]) -> None:
    for side, (name, sorter) in zip((0.12, -0.12), PAIR.items(), strict=True):
        best = [row.best(sorter) for row in shown]
        places = [place + side for place in range(len(shown))]
        means, spreads = [seeds.mean() for seeds in best], [seeds.std(ddof=0) for seeds in best]
        panel.errorbar(places, means, spreads, fmt="o", color=COLOURS[sorter], ms=5, capsize=2, label=name)
        known = [
            (place + 2 * side, *row.papers()[sorter]) for place, row in enumerate(shown) if row.group.like_the_paper
        ]
        if known:
            marks = {"fmt": "o", "mfc": "white", "color": COLOURS[sorter], "ms": 4, "lw": 0.8}
            panel.errorbar(*zip(*known, strict=True), **marks, label=f"{name}, paper")
    panel.set_ylabel("best validation accuracy (%)")
    panel.legend(fontsize=7)


def _draw_differences(panel: Axes, shown: list[Row]) -> None:
    panel.axhline(0.0, color="0.6", lw=0.8)
    seeds = [(place - 0.12, value) for place, row in enumerate(shown) for value in row.difference()]
    panel.plot(*zip(*seeds, strict=True), ".", color="0.5", ms=4, label="each seed")
    differences = [row.difference() for row in shown]
    means, spreads = [d.mean() for d in differences], [d.std(ddof=0) for d in differences]
    panel.errorbar(range(len(shown)), means, spreads, fmt="o", color="0.1", ms=5, capsize=2, label="mean ± std")
    known = [(place + 0.12, row.papers()) for place, row in enumerate(shown) if row.group.like_the_paper]
    if known:
        values = [papers[OURS][0] - papers[BASELINE][0] for _, papers in known]
        panel.plot([place for place, _ in known], values, "D", mfc="white", color="0.1", ms=4, label="paper")
    panel.set_ylabel("CD-GraB − D-RR (points)")
    panel.legend(fontsize=7)


def _draw_losses(panel: Axes, shown: list[Row]) -> None:
    panel.axhline(0.0, color="0.6", lw=0.8)
    for row in shown:
        if row.metric == "val_accuracy":
            ours, baseline = (row.group.curve(sorter, "train_loss")["mean"] for sorter in (OURS, BASELINE))
            excess = (100.0 * (ours / baseline - 1.0)).dropna()  # empty when one of the two is missing
            panel.plot(excess.index, excess, ".-", label=row.name)
    panel.set(xlabel="epoch", ylabel="full train loss, CD-GraB over D-RR (%)")
    panel.legend(fontsize=7)


def _draw_epochs(panel: Axes, row: Row) -> None:
    for name, sorter in PAIR.items():
        curve = row.group.curve(sorter, row.metric)
        panel.plot(curve.index, curve["mean"], color=COLOURS[sorter], label=name)
        low, high = curve["mean"] - curve["std"], curve["mean"] + curve["std"]
        panel.fill_between(curve.index, low, high, color=COLOURS[sorter], alpha=0.18, lw=0)
    panel.set_title(row.name, fontsize=9)
    panel.set_xlabel("epoch")


def _encoder(group: Group) -> str:
    """Which encoder, and the runs it comes from where those are ours."""
    science = group.manifests[0]["science"]
    if science["task.encoder"] == "frozen":
        return f"linear head on frozen {science['task.encoder_name']}"
    folders = {name for manifest in group.manifests for name in pretrained_by(manifest)}
    return f"Tiny GPT-2 of {', '.join(sorted(folders))}, trained on as a whole"


def _mean_std(values: pd.Series, sign: str = "") -> str:
    return f"{values.mean():{sign}.2f} ± {values.std(ddof=0):.2f}" if len(values) else "–"
