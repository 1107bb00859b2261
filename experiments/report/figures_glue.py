"""GLUE: the runs of all datasets in, Table 1 of the CD-GraB paper and its figure out."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from experiments.report import measures, names, plots
from experiments.report.kinds import Axes, Figure, Series
from experiments.report.manifests import pretrained_by
from experiments.report.names import BASELINE, GLUE, LOSS, OURS
from experiments.report.published import published
from experiments.report.runs import Group, Sweep
from experiments.report.text import FEWEST_SEEDS, markdown, mean_std

EXPERIMENT = "table1_glue"
PAIR = {names.sorter_label(sorter): sorter for sorter in (OURS, BASELINE)}
METRICS = {"val_accuracy": "", "val_accuracy_mm": "-mm"}  # suffix of the dataset's name; only MNLI has both


@dataclass(frozen=True)
class Row:
    """One line of the table: a dataset, or one of MNLI's two validation parts."""

    group: Group
    metric: str

    @property
    def name(self) -> str:
        return self.group.column + METRICS[self.metric]

    def best(self, sorter: str) -> Series:
        """Each seed's best validation accuracy over the epochs."""
        return self.group.best(sorter, self.metric)

    def difference(self) -> Series:
        """CD-GraB − D-RR, by seed; empty if one of the two is missing."""
        return (self.best(OURS) - self.best(BASELINE)).dropna()

    @property
    def comparable(self) -> bool:
        return bool(self.papers()) and not self.group.trial

    def papers(self) -> dict[str, tuple[float, float]]:
        """The paper's mean and std by sorter; empty if its table lacks the dataset."""
        numbers = published(EXPERIMENT, self.metric, column=self.group.column)
        last = {PAIR[series]: table.iloc[-1] for series, table in numbers.items()}
        return {sorter: (line["mean"], line["high"] - line["mean"]) for sorter, line in last.items()}


def rows(sweep: Sweep) -> list[Row]:
    """In the order of the paper's table, then the datasets that it leaves out."""
    order = {name: place for place, name in enumerate(GLUE)}
    groups = sorted(sweep.groups, key=lambda group: order.get(group.column, len(order)))
    return [Row(group, metric) for group in groups for metric in METRICS if metric in group.metrics]


def summary(sweep: Sweep) -> str:
    """Table 1 in Markdown: ours, the difference paired by seed, and the paper's numbers."""
    lines = []
    for row in rows(sweep):
        difference, papers, majority = row.difference(), row.papers(), measures.majority(row.group)
        lines.append(
            {"dataset": row.name}
            | {name: mean_std(row.best(sorter), 2) for name, sorter in PAIR.items()}
            | {"difference": mean_std(difference, 2, sign="+")}
            | {"better on": f"{int((difference > 0).sum())} of {len(difference)} seeds"}
            | {"majority class": "–" if majority is None else f"{majority:.2f}"}
            | {f"paper: {name}": "{:.2f} ± {:.2f}".format(*papers[s]) if papers else "–" for name, s in PAIR.items()}
            | {"paper: difference": f"{papers[OURS][0] - papers[BASELINE][0]:+.2f}" if papers else "–"}
        )
    notes = ["Best validation accuracy over the epochs (%), mean ± std over seeds; differences are paired by seed."]
    notes += [f"{group.caption()} · {_encoder(group)}." for group in dict.fromkeys(row.group for row in rows(sweep))]
    return markdown(lines) + "\n\n" + "  \n".join(notes) + "\n"


@plots.styled
def figure(sweep: Sweep, title: str) -> Figure:
    """Above: best accuracies, their paired differences, and the train losses relative to D-RR's, epoch by epoch.
    Below: the accuracy of every dataset against epochs. The paper's numbers (hollow) where it has the dataset; the
    caption says which pretraining ours come from."""
    import matplotlib.pyplot as plt

    shown = rows(sweep)
    drawn = plt.figure(figsize=(11.5, 6.6), layout="constrained")
    above, below = drawn.subfigures(2, 1, height_ratios=(1.25, 1.0))
    panels = above.subplots(1, 3, width_ratios=(1.25, 1.0, 1.0))
    for panel, draw in zip(panels, (_draw_accuracies, _draw_differences, _draw_losses), strict=True):
        draw(panel, shown)
        panel.legend(fontsize=7)
    for panel in panels[:2]:
        panel.set_xticks(range(len(shown)), [row.name for row in shown], rotation=25 * (len(shown) > 4))
        panel.set_xlim(-0.5, len(shown) - 0.5)
    for panel, row in zip(below.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        _draw_epochs(panel, row)
    below.axes[0].set_ylabel(names.metric_label("val_accuracy"))
    drawn.suptitle(title + " (embedded data)" * (shown[0].name == "embedded"), fontweight="bold")
    others = len({row.group.column for row in shown}) - 1
    caption = f"{shown[0].group.caption()} · {_encoder(shown[0].group)}"
    caption += f" · {others} more datasets: see the table" if others else ""
    drawn.supxlabel("\n".join(textwrap.wrap(caption, 190)), **plots.SMALL)
    return drawn


def _draw_accuracies(panel: Axes, shown: list[Row]) -> None:
    for side, (name, sorter) in zip((0.12, -0.12), PAIR.items(), strict=True):
        marks = {"fmt": "o", "color": names.sorter_colour(sorter)}
        best = [row.best(sorter) for row in shown]
        places = [place + side for place in range(len(shown))]
        _mean_and_std(panel, places, best, **marks, label=name)
        known = [(place + 2 * side, *row.papers()[sorter]) for place, row in enumerate(shown) if row.comparable]
        if known:
            panel.errorbar(*zip(*known, strict=True), **marks, mfc="white", ms=4, lw=0.8, label=f"{name}, paper")
    panel.set_ylabel("best validation accuracy (%)")


def _draw_differences(panel: Axes, shown: list[Row]) -> None:
    panel.axhline(0.0, **plots.GREY)
    seeds = [(place - 0.12, value) for place, row in enumerate(shown) for value in row.difference()]
    panel.plot(*zip(*seeds, strict=True), ".", color="0.5", ms=4, label="each seed")
    differences = [row.difference() for row in shown]
    _mean_and_std(panel, range(len(shown)), differences, fmt="o", color="0.1", label="mean ± std")
    known = [(place + 0.12, row.papers()) for place, row in enumerate(shown) if row.comparable]
    if known:
        values = [papers[OURS][0] - papers[BASELINE][0] for _, papers in known]
        panel.plot([place for place, _ in known], values, "D", mfc="white", color="0.1", ms=4, label="paper")
    panel.set_ylabel("CD-GraB − D-RR (points)")


def _draw_losses(panel: Axes, shown: list[Row]) -> None:
    panel.axhline(0.0, **plots.GREY)
    for row in shown:
        if row.metric == "val_accuracy":
            ours, baseline = (row.group.curve(sorter, LOSS)["mean"] for sorter in (OURS, BASELINE))
            excess = (100.0 * (ours / baseline - 1.0)).dropna()  # empty if one of the two is missing
            panel.plot(excess.index, excess, ".-", label=row.name)
    panel.set(xlabel="epoch", ylabel="full train loss, CD-GraB over D-RR (%)")


def _draw_epochs(panel: Axes, row: Row) -> None:
    for name, sorter in PAIR.items():
        curve = row.group.curve(sorter, row.metric)
        plots.mean_std(panel, curve.index, curve["mean"], curve["std"], color=names.sorter_colour(sorter), label=name)
    panel.set_title(row.name, fontsize=9)
    panel.set_xlabel("epoch")


def _mean_and_std(panel: Axes, places: list[float], values: list[Series], **style) -> None:
    spreads = [some.std() if len(some) >= FEWEST_SEEDS else 0.0 for some in values]
    panel.errorbar(places, [some.mean() for some in values], spreads, ms=5, capsize=2, **style)


def _encoder(group: Group) -> str:
    """Which encoder, and the runs that trained it if they are ours."""
    if group.setting("task.encoder") == "frozen":
        return f"linear head on frozen {group.setting('task.encoder_name')}"
    if group.setting("task.encoder") == "random_gpt2":
        return "Tiny GPT-2 with new initial weights, trained as a whole"
    folders = {name for manifest in group.manifests for name in pretrained_by(manifest)}
    return f"Tiny GPT-2 of {', '.join(sorted(folders))}, trained on as a whole"
