"""The figure and the tables of the study of practice."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from experiments.report import plots, text
from experiments.report.kinds import Axes, DataFrame, Figure
from experiments.report.names import LOSS
from experiments.studies.base import Study
from experiments.studies.practice import (
    ARMS,
    COST,
    SCORE,
    TRAINED,
    Comparison,
    cell,
    cell_label,
    cells,
    compared,
    ends,
    judged,
    memory_of,
)
from experiments.studies.practice_training import BATCH, COIN, EXAMPLE, FIXED, REFORMED, ROTATED, SHUFFLE
from experiments.studies.verdicts import EQUAL, FAILS, HOLDS, UNDECIDED, Verdict, select

COLOURS = {
    FIXED: "#3465a4",
    COIN: "#6a9955",
    BATCH: "#c4322b",
    EXAMPLE: "#e69f00",
    REFORMED: "#7b5ea7",
    ROTATED: "#2aa198",
}
ORDERED = {BATCH: "batches", EXAMPLE: 'examples (`unit="example"`)'}  # by options of the sampler
ANSWERS = {HOLDS: "helps", FAILS: "harms", EQUAL: "makes no difference", UNDECIDED: "cannot tell"}
NEAR, FAR = (1, 2, 3, 5), (1, 3, 10, 30, 100)  # ticks of a panel up to 10, and of a longer one
APART = 0.17  # between the bars of one cell
PANELS = {LOSS: "train loss: gain (%)", SCORE: "validation score: gain (points)"}


@plots.styled
def gains(study: Study) -> Figure:
    """How much better than fresh batches, one row per cell: right of the line is better."""
    means, bases = ends(study.table), list(study.settings.models)
    of_models = {name: bases.index(study.settings.cells[name].base) for name in cells(study.settings)}
    names = sorted(of_models, key=of_models.get)
    figure, axes = plots.panels(1, len(PANELS), 10.4, 0.36 * len(names) + 1.8, PANELS.values(), sharey=True)
    for panel, metric in zip(axes[0], PANELS, strict=True):
        for row, name in enumerate(names):
            arms = [arm for arm in COLOURS if arm in cell(study.settings, name)["arms"]]
            for place, arm in enumerate(arms):
                value = compared(means, study.settings, name, arm, SHUFFLE, metric).gain
                y, style = row + APART * (place - (len(arms) - 1) / 2), {"color": COLOURS[arm]}
                plots.interval(panel, value, y, lw=1.6, **style)
                panel.plot(value.mean, y, "o", ms=3, label=ARMS[arm], **style)
        for row in range(1, len(names)):
            if study.settings.cells[names[row]].base != study.settings.cells[names[row - 1]].base:
                panel.axhline(row - 0.5, **plots.GREY, zorder=0)
        panel.axvline(0, color="black", lw=1.1, zorder=0)
        _scale(panel)
        panel.set_yticks(range(len(names)), [cell_label(study.settings, name) for name in names])
        panel.set_ylim(len(names) - 0.5, -0.5)
    interval = "95 % interval (wider where seeds were added)"
    note = f"against fresh batches in every epoch; mean and {interval}, paired over seeds"
    return plots.finish(figure, "What orders bring to scripts as people write them", f"{note} · {study.caption()}")


def _scale(panel: Axes) -> None:
    """Linear between −1 and 1, logarithmic beyond, with room at both ends and ticks that one can read."""
    from matplotlib.ticker import NullLocator

    low, high = panel.dataLim.intervalx
    panel.set_xscale("symlog", linthresh=1.0, linscale=0.5)
    panel.set_xlim(1.3 * min(low, -1), 1.3 * max(high, 1))
    ticks = [0, *(sign * size for size in (NEAR if max(-low, high) < 10 else FAR) for sign in (-1, 1))]
    panel.set_xticks([tick for tick in ticks if 1.3 * low <= tick <= 1.3 * high], minor=False)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter("{x:g}")


@text.table
def summary_table(table: DataFrame, settings: DictConfig) -> Iterator[dict[str, str]]:
    """Whether it helps, for whoever trains something similar: models as they are and augmented, what can be switched on
    by the sampler's own options."""
    found = _judged(ends(table), settings)

    def gain(*which: str, unit: str) -> str:
        value = found[which][0].gain
        return text.minus(f"{value.mean:+.2g}{unit} [{value.low:.2g}, {value.high:.2g}]")

    plain = {"base", "arms", "augment", "seeds"}
    for name in (name for name in cells(settings) if settings.cells[name].keys() <= plain):
        costs = select(table, kind=COST, cell=name)
        score = " % in perplexity" if cell(settings, name)["model"] == "gpt" else " points"
        for arm in (arm for arm in ORDERED if arm in cell(settings, name)["arms"]):
            yield {
                "model, data": cell_label(settings, name),
                "ordered": ORDERED[arm],
                "gain in train loss over `shuffle=True`": gain(name, arm, SHUFFLE, LOSS, unit=" %"),
                "over the same batches at random": gain(name, arm, FIXED, LOSS, unit=" %"),
                "gain in validation": gain(name, arm, SHUFFLE, SCORE, unit=score),
                "seeds": str(len(found[name, arm, SHUFFLE, LOSS][0].gains)),
                "verdict": ANSWERS[found[name, arm, SHUFFLE, LOSS][1].answer],
                "a step takes": _times(costs, arm),
            }


def _judged(means: DataFrame, settings: DictConfig) -> dict[tuple[str, ...], tuple[Comparison, Verdict]]:
    """Comparisons by cell, arm, control and metric."""
    return {(each.cell, each.arm, each.control, each.metric): (each, v) for each, v in judged(means, settings)}


@text.table
def gain_table(table: DataFrame, settings: DictConfig) -> Iterator[dict[str, str]]:
    """Every cell and every kind of batches: losses, scores, and gains with p values adjusted for all of them (Holm)."""
    means = ends(table)
    found = _judged(means, settings)

    def gain(*which: str) -> str:
        if which not in found:
            return ""
        each, verdict = found[which]
        return f"{each.gain}, {(each.gains > 0).sum()} of {len(each.gains)}, p = {verdict.adjusted:.2g}"

    for name in cells(settings):
        for arm in cell(settings, name)["arms"]:
            rows = means.loc[(name, arm)]
            yield {
                "model": cell_label(settings, name),
                "batches": ARMS[arm],
                "train loss": text.mean_std(rows[LOSS], 5),
                "last train loss": text.mean_std(rows[f"last {LOSS}"], 5),
                "train score": text.minus(text.mean_std(rows["train_score"], 2)),
                "validation score": text.minus(text.mean_std(rows[SCORE], 2)),
                "last validation score": text.minus(text.mean_std(rows[f"last {SCORE}"], 2)),
                "loss against fresh (%)": gain(name, arm, SHUFFLE, LOSS),
                "loss against fixed (%)": gain(name, arm, FIXED, LOSS),
                "score against fresh (points)": gain(name, arm, SHUFFLE, SCORE),
            }


@text.table
def setting_table(table: DataFrame, settings: DictConfig) -> Iterator[dict[str, str]]:
    """What every cell trains and how, what a step with orders takes, and what the sampler's report says at the end: the
    herding bound of CD-GraB's order of batches over a random one's, and how many signs outlast an epoch."""
    for name in cells(settings):
        chosen, rows = cell(settings, name), select(table, cell=name)
        trained, costs = rows[rows["examples"].notna()], select(rows, kind=COST)
        dim, schedule = (
            trained["dim"].iloc[0],
            (chosen["optimiser"], f"{trained['rate'].iloc[-1]:g}", chosen["schedule"]),
        )
        yield {
            "model": cell_label(settings, name),
            "parameters": f"{dim:,.0f}",
            "examples": f"{trained['examples'].iloc[-1]:,.0f}",
            "batch": f"{chosen['batch']}",
            "epochs": f"{chosen['epochs']}",
            "optimiser, rate": " ".join(schedule),
            "step, over a plain one": ", ".join(_ratio(costs, arm, dim) for arm in costs["arm"].unique()),
            **_report(select(trained, kind=TRAINED, arm=BATCH).drop_duplicates("seed")),
        }


def _report(runs: DataFrame) -> dict[str, str]:
    advice = runs["advice"].value_counts()
    return {
        "bound / random": f"{runs['bound'].mean():.2f}",
        "signs right": f"{100 * runs['signs_right'].mean():.0f} %",
        "report": ", ".join(f"{words} ({seeds})" for words, seeds in advice.items()),
    }


def _ratio(costs: DataFrame, arm: str, dim: float) -> str:
    """batch 1.05 (3.1 floats per parameter)"""
    memory = memory_of(select(costs, arm=arm), dim)
    return f"{arm} {_times(costs, arm)}" + (f" ({memory:.1f} floats per parameter)" if memory == memory else "")


def _times(costs: DataFrame, arm: str) -> str:
    """As long as a plain one."""
    rows = select(costs, arm=arm)
    return f"{(rows['ours_us'] / rows['plain_us']).median():.2f} ×" if len(rows) else "–"
