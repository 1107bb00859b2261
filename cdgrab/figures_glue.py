"""GLUE: runs of all datasets in, Table 1 and its figure out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .data.glue import LAYOUTS
from .figures import COLOURS, STYLE
from .report import markdown
from .results import RESULTS, Group

OURS, BASELINE = "cd_grab", "d_rr"
PAPERS_NAMES = {OURS: "CD-GraB", BASELINE: "D-RR"}
METRICS = {"val_accuracy": "", "val_accuracy_mm": "-mm"}  # MNLI has both; what the second adds to the dataset's name


@dataclass(frozen=True)
class Row:
    """One line of the table: a dataset, or one of MNLI's two validation parts."""

    group: Group
    metric: str

    @property
    def dataset(self) -> str:
        return _label(self.group) + METRICS[self.metric]

    def best(self, sorter: str) -> pd.Series:
        """Each seed's best validation accuracy over the epochs."""
        rows = self.group.metrics[self.group.metrics["sorter"] == sorter]
        return rows.groupby("seed")[self.metric].max()

    def difference(self) -> pd.Series:
        """CD-GraB − D-RR, by seed; empty when one of the two is missing."""
        return (self.best(OURS) - self.best(BASELINE)).dropna()

    def papers(self) -> dict[str, tuple[float, float]]:
        """Mean and std by sorter; empty for datasets that the paper does not have."""
        paper = pd.read_csv(RESULTS / "paper" / "table1_glue.csv")
        rows = paper[paper["panel"] == self.dataset].set_index("series")
        return {sorter: tuple(rows.loc[name, ["mean", "std"]]) for sorter, name in PAPERS_NAMES.items() if len(rows)}


def tables(groups: list[Group]) -> dict[str, list[Row]]:
    """Rows by table: all datasets with the same settings are in one, named after experiment and settings.

    Embedded sentences have a table of their own.
    """
    order = ["embedded", *LAYOUTS]
    found = sorted(groups, key=lambda group: (_name(group), order.index(_label(group))))
    return {
        title: [Row(group, metric) for group in some for metric in METRICS if metric in group.metrics]
        for title, some in groupby(found, key=_name)
    }


def name(directory: Path, label: str) -> str:
    """Of the files of a table that a group belongs to: table1_glue-GLUE-quick, table1_glue-embedded."""
    settings = directory.name.removeprefix(label)
    return f"{directory.parent.name}-{label if label == 'embedded' else 'GLUE'}{settings}"


def summary(rows: list[Row]) -> str:
    """Table 1 in Markdown: ours, the paired difference, and the paper's numbers."""
    lines = []
    for row in rows:
        line = {"dataset": row.dataset}
        for sorter in PAPERS_NAMES:
            line[PAPERS_NAMES[sorter]] = _shown(row.best(sorter))
        difference, papers = row.difference(), row.papers()
        line["difference"] = f"{difference.mean():+.2f} ± {difference.std(ddof=0):.2f}" if len(difference) else "–"
        line["better on"] = f"{int((difference > 0).sum())} of {len(difference)} seeds"
        for sorter in PAPERS_NAMES:
            line[f"paper: {PAPERS_NAMES[sorter]}"] = "{:.2f} ± {:.2f}".format(*papers[sorter]) if papers else "–"
        line["paper: difference"] = f"{papers[OURS][0] - papers[BASELINE][0]:+.2f}" if papers else "–"
        lines.append(line)
    notes = ["Best validation accuracy over the epochs (%), mean ± std over seeds; differences are paired by seed."]
    notes += list(dict.fromkeys(f"{row.group.caption()} · {_encoder(row.group)}." for row in rows))
    return markdown(lines) + "\n\n" + "  \n".join(notes) + "\n"


def figure(rows: list[Row], title: str) -> Figure:
    """Best accuracies, their paired differences, and how far apart the train losses are, epoch by epoch."""
    with plt.style.context(STYLE):
        drawn, panels = plt.subplots(1, 3, figsize=(11.5, 3.9), width_ratios=(1.25, 1.0, 1.0))
        _draw_accuracies(panels[0], rows)
        _draw_differences(panels[1], rows)
        _draw_losses(panels[2], rows)
        for panel in panels[:2]:
            panel.set_xticks(range(len(rows)), [row.dataset for row in rows], rotation=25 * (len(rows) > 3))
            panel.set_xlim(-0.5, len(rows) - 0.5)
        drawn.suptitle(title, fontweight="bold")
        caption = f"{rows[0].group.caption()} · {_encoder(rows[0].group)}"
        drawn.text(0.5, 0.005, caption, ha="center", fontsize=6.5, color="0.35", wrap=True)
        drawn.tight_layout(rect=(0, 0.03, 1, 1))
    return drawn


def _draw_accuracies(panel: Axes, rows: list[Row]) -> None:
    for side, sorter in ((-0.12, BASELINE), (0.12, OURS)):
        name, colour = PAPERS_NAMES[sorter], COLOURS[sorter]
        best = [row.best(sorter) for row in rows]
        means, spreads = [seeds.mean() for seeds in best], [seeds.std(ddof=0) for seeds in best]
        places = [place + side for place in range(len(rows))]
        panel.errorbar(places, means, spreads, fmt="o", color=colour, ms=5, capsize=2, label=name)
        for place, seeds in zip(places, best, strict=True):
            panel.plot([place + 0.06] * len(seeds), seeds, ".", color=colour, ms=3, alpha=0.5)
        known = [(place + side / 2, *row.papers()[sorter]) for place, row in enumerate(rows) if row.papers()]
        if known:
            panel.errorbar(
                *zip(*known, strict=True), fmt="o", mfc="white", color=colour, ms=4, lw=0.8, label=f"{name}, paper"
            )
    panel.set_ylabel("best validation accuracy (%)")
    panel.legend(fontsize=7)


def _draw_differences(panel: Axes, rows: list[Row]) -> None:
    panel.axhline(0.0, color="0.6", lw=0.8)
    for place, row in enumerate(rows):
        difference, papers = row.difference(), row.papers()
        panel.plot([place - 0.1] * len(difference), difference, ".", color="0.5", ms=4, label="each seed")
        panel.errorbar(
            [place], [difference.mean()], [difference.std(ddof=0)], fmt="o", color="0.1", ms=5, capsize=2, label="mean"
        )
        if papers:
            panel.plot(
                [place + 0.12], papers[OURS][0] - papers[BASELINE][0], "D", mfc="white", color="0.1", label="paper"
            )
    handles = dict(reversed(list(zip(*reversed(panel.get_legend_handles_labels()), strict=True))))
    panel.legend(handles.values(), handles.keys(), fontsize=7)
    panel.set_ylabel("CD-GraB − D-RR (points)")


def _draw_losses(panel: Axes, rows: list[Row]) -> None:
    panel.axhline(0.0, color="0.6", lw=0.8)
    for row in rows:
        if row.metric == "val_accuracy" and {OURS, BASELINE} <= set(row.group.sorters):
            ours, baseline = (row.group.curve(sorter, "train_loss")["mean"] for sorter in (OURS, BASELINE))
            panel.plot(ours.index, 100.0 * (ours / baseline - 1.0), label=row.dataset)
    panel.set(xlabel="epoch", ylabel="full train loss, CD-GraB over D-RR (%)")
    panel.legend(fontsize=7)


def _name(group: Group) -> str:
    return name(group.directory, _label(group))


def _label(group: Group) -> str:
    return group.manifests[0]["data"]["label"]


def _encoder(group: Group) -> str:
    """Which encoder, and the checkpoints it came from where those are runs of our own."""
    science = group.manifests[0]["science"]
    if science["task.encoder"] == "frozen":
        return f"linear head on frozen {science['task.encoder_name']}"
    names = {name for manifest in group.manifests for name in manifest["data"]["checksums"]}
    folders = {name.split()[1].rpartition("/")[0] for name in names if name.startswith("checkpoint ")}
    return f"Tiny GPT-2 of {', '.join(sorted(folders))}, trained on as a whole"


def _shown(seeds: pd.Series) -> str:
    return f"{seeds.mean():.2f} ± {seeds.std(ddof=0):.2f}" if len(seeds) else "–"
