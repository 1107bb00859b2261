"""Tables: what groups of runs say, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pandas as pd

from experiments.report.figures import AXIS_LABELS, column_title
from experiments.report.published import published, published_metrics
from experiments.report.runs import Group, Sweep
from experiments.report.statistics import paired_p
from experiments.store.files import RESULTS

BASELINE = "d_rr"
HEADNOTE = (
    "Last epoch (validation accuracies: best epoch), mean ± std over seeds; differences and the two-sided t-test are "
    "paired over seeds. The paper's difference is that of its own curves' last points, on its own data."
)
# Further pairs, where the runs exist: what the published code really compares on M4 and WikiText-2, and we with it
PAIRS = (("cd_grab", "riffle"), ("riffle", "d_rr,shared=True"))


def summary(group: Group, metrics: tuple[str, ...], experiment: str) -> str:
    """Final metrics per sorter, epochs to D-RR's final loss, seconds per epoch, and who wins on each seed.

    Beside the published code's form of a metric stands the metric itself.
    """
    metrics = tuple(dict.fromkeys([*metrics, *(metric.removesuffix("_authors") for metric in metrics)]))
    notes = [group.caption() + ".", *_published_finals(experiment, metrics, group.column)]
    return _page(_rows(group, metrics), _differences(group, metrics), notes)


def sweep_summary(sweep: Sweep, metrics: tuple[str, ...], experiment: str) -> str:
    """The same with one block of rows for every value of the swept setting."""
    rows, differences, notes = [], [], [sweep.caption() + "."]
    for group in sweep.groups:
        title = column_title(group, sweep.setting)
        rows += [{"": title} | row for row in _rows(group, metrics)]
        differences += [{"": title} | row for row in _differences(group, metrics)]
        notes += [f"{title}: {note}" for note in _published_finals(experiment, metrics, group.column)]
    return _page(rows, differences, notes)


def comparison(experiment: str, groups: Iterable[Group]) -> list[dict[str, str]]:
    """CD-GraB against D-RR on the metrics that the paper reports: one row per group and metric."""
    rows = []
    for group in groups:
        own = published_metrics(experiment)
        plain = tuple(m.removesuffix("_authors") for m in own)
        for metric in own if group.like_the_paper else plain:
            if {"cd_grab", BASELINE} <= set(group.sorters) and metric in group.metrics:
                rows.append(_compared(experiment, group, metric))
    return rows


def save(text: str, name: str) -> None:
    """Next to the figure of the same name."""
    path = RESULTS / "figures" / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def first_crossing(curve: pd.Series, target: float) -> float:
    """The epoch at which a falling curve first reaches `target`, linearly interpolated; NaN if it never does."""
    below = curve[curve <= target]
    if below.empty:
        return math.nan
    epoch = below.index[0]
    if epoch == curve.index[0]:
        return float(epoch)
    before = curve[:epoch].iloc[-2]
    earlier = curve[:epoch].index[-2]
    return float(earlier + (epoch - earlier) * (before - target) / (before - curve.loc[epoch]))


def markdown(rows: list[dict[str, str]]) -> str:
    """A Markdown table; every row has the same keys."""
    header = list(rows[0])
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in header]
    line = [
        " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        for cells in (header, *([row[name] for name in header] for row in rows))
    ]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([f"| {line[0]} |", f"|{rule}|", *(f"| {cells} |" for cells in line[1:])])


def _rows(group: Group, metrics: tuple[str, ...]) -> list[dict[str, str]]:
    loss, rows = metrics[0], []
    for sorter in group.sorters:
        curve = group.curve(sorter, loss)
        if curve.empty:  # a metric that these runs did not log
            continue
        row = {"sorter": group.label(sorter), "seeds": str(len(group.final(sorter, loss)))}
        row |= {f"final {AXIS_LABELS[metric]}": _mean_std(group.final(sorter, metric)) for metric in metrics}
        if BASELINE in group.sorters and "loss" in loss:
            target = group.curve(BASELINE, loss)["mean"].iloc[-1]
            row["epochs to D-RR's final loss"] = _shown(first_crossing(curve["mean"], target))
        row["seconds per epoch"] = f"{curve['elapsed'].iloc[-1] / curve.index[-1]:.3f}" if group.timed else "–"
        rows.append(row)
    return rows


def _differences(group: Group, metrics: tuple[str, ...]) -> list[dict[str, str]]:
    pairs = [(sorter, BASELINE) for sorter in group.sorters if sorter != BASELINE] + list(PAIRS)
    return [
        {"difference": f"{group.label(first)} − {group.label(second)}", "final": AXIS_LABELS[metric]}
        | _paired(group.final(first, metric) - group.final(second, metric), metric)
        for first, second in pairs
        if {first, second} <= set(group.sorters)
        for metric in metrics
    ]


def _page(rows: list[dict[str, str]], differences: list[dict[str, str]], notes: list[str]) -> str:
    tables = [markdown(table) for table in (rows, differences) if table]
    return "\n\n".join([*tables, "  \n".join(notes)]) + "\n"


def _paired(difference: pd.Series, metric: str) -> dict[str, str]:
    """Over the seeds that both have."""
    difference = difference.dropna()
    better = (difference > 0) if "accuracy" in metric else (difference < 0)
    p = paired_p(difference.tolist())
    return {
        "mean ± std": f"{difference.mean():+.3g}" + f" ± {difference.std(ddof=0):.2g}" * (len(difference) > 1),
        "better on": f"{better.sum()} of {len(difference)} seeds",
        "paired t-test": "one seed" if math.isnan(p) else f"p = {p:.2g}" if p >= 1e-4 else "p < 1e-4",
    }


def _values(group: Group, metric: str) -> Callable[[str], pd.Series]:
    """Of every seed, by sorter: the last epoch's value; of validation accuracies the best, as in the paper's table."""
    read = group.best if metric.startswith("val_accuracy") else group.final
    return lambda sorter: read(sorter, metric)


def _compared(experiment: str, group: Group, metric: str) -> dict[str, str]:
    values, first = _values(group, metric), group.manifests[0]
    difference = values("cd_grab") - values(BASELINE)
    paired = _paired(difference, metric)
    return {
        "task": f"{first['task']}, {column_title(group, group.columns or 'workers')}",
        "data": ("EMBEDDED: " if first["data"]["embedded"] else "") + first["data"]["description"],
        "size": first.get("size", "paper"),
        "seeds": str(len(difference.dropna())),
        "metric": AXIS_LABELS[metric],
        "D-RR": _mean_std(values(BASELINE)),
        "CD-GraB": _mean_std(values("cd_grab")),
        "CD-GraB − D-RR": paired.pop("mean ± std"),
        **paired,
        "the paper's difference": _papers_difference(experiment, group, metric),
    }


def _papers_difference(experiment: str, group: Group, metric: str) -> str:
    """At the paper's last epoch. Our own metric is set beside the published code's form of it."""
    known = published_metrics(experiment)
    theirs = metric if metric in known else f"{metric}_authors"
    curves = published(experiment, theirs, column=group.column)
    if not {"CD-GraB", "D-RR"} <= set(curves):
        return "–"
    return f"{curves['CD-GraB']['mean'].iloc[-1] - curves['D-RR']['mean'].iloc[-1]:+.3g}"


def _published_finals(experiment: str, metrics: tuple[str, ...], column: str | float | None) -> list[str]:
    parts = []
    for metric in metrics:
        finals = {
            series: curve["mean"].iloc[-1] for series, curve in published(experiment, metric, column=column).items()
        }
        if finals:
            parts.append(
                f"{AXIS_LABELS[metric]} " + ", ".join(f"{series} {value:.6g}" for series, value in finals.items())
            )
    return [f"The paper, on its own data: {'; '.join(parts)}."] if parts else []


def _mean_std(values: pd.Series) -> str:
    """One seed has no spread."""
    digits = 6 if values.abs().max() < 10 else 3
    return f"{values.mean():.{digits}f}" + f" ± {values.std(ddof=0):.{digits}f}" * (len(values) > 1)


def _shown(value: float) -> str:
    return "not reached" if math.isnan(value) else f"{value:.1f}"
