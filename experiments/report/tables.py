"""Tables of runs, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from experiments.report.kinds import Series
from experiments.report.names import BASELINE, OURS, column_title, higher_is_better, metric_label, sorter_label
from experiments.report.published import published, published_metrics
from experiments.report.runs import Group, Sweep
from experiments.report.statistics import FEWEST_SEEDS, paired_p
from experiments.report.text import markdown, mean_std

HEADNOTE = (
    "Last epoch (validation accuracies: best epoch), mean ± sample standard deviation over seeds; differences and the "
    "two-sided t-test are paired over seeds, at least three of them. The paper's difference is that of its own curves' "
    "last points, on its own data."
)
# Further pairs, if the runs exist: what the published code really compares on M4 and WikiText-2, and ours against it
PAIRS = ((OURS, "riffle"), ("riffle", "d_rr,shared=True"))


def summary(group: Group, metrics: tuple[str, ...], experiment: str) -> str:
    """Final metrics per sorter, epochs to D-RR's final loss, seconds per epoch, and who wins on each seed.

    A metric in the published code's form is shown together with the metric itself.
    """
    metrics = tuple(dict.fromkeys([*metrics, *(metric.removesuffix("_authors") for metric in metrics)]))
    notes = [group.caption() + ".", *_published_finals(experiment, metrics, group.column)]
    return _page(list(_rows(group, metrics)), _differences(group, metrics), notes)


def sweep_summary(sweep: Sweep, metrics: tuple[str, ...], experiment: str) -> str:
    """The same with one block of rows for every value of the swept setting."""
    rows, differences, notes = [], [], [sweep.caption() + "."]
    for group in sweep.groups:
        title = column_title(sweep.setting, group.setting(sweep.setting))
        rows += [{"": title} | row for row in _rows(group, metrics)]
        differences += [{"": title} | row for row in _differences(group, metrics)]
        notes += [f"{title}: {note}" for note in _published_finals(experiment, metrics, group.column)]
    return _page(rows, differences, notes)


def comparison(experiment: str, groups: Iterable[Group]) -> list[dict[str, str]]:
    """CD-GraB against D-RR on the metrics that the paper reports: one row per group and metric."""
    own = published_metrics(experiment)
    plain = tuple(metric.removesuffix("_authors") for metric in own)
    return [
        _compared(experiment, group, metric)
        for group in groups
        if {OURS, BASELINE} <= set(group.sorters)
        for metric in (own if group.like_the_paper else plain)
        if metric in group.metrics
    ]


def first_crossing(curve: Series, target: float) -> float:
    """The epoch at which a falling curve first reaches `target`, linearly interpolated; NaN if it never does."""
    below = curve[curve <= target]
    if below.empty:
        return math.nan
    epoch = below.index[0]
    if epoch == curve.index[0]:
        return float(epoch)
    earlier = curve[:epoch].index[-2]
    return float(earlier + (epoch - earlier) * (curve[earlier] - target) / (curve[earlier] - curve[epoch]))


def _rows(group: Group, metrics: tuple[str, ...]) -> Iterator[dict[str, str]]:
    loss = metrics[0]
    for sorter in group.sorters:
        curve = group.curve(sorter, loss)
        if curve.empty:  # a metric that these runs did not log
            continue
        row = {"sorter": group.label(sorter), "seeds": str(len(group.final(sorter, loss)))}
        row |= {f"final {metric_label(metric)}": _mean_std(group.final(sorter, metric)) for metric in metrics}
        if BASELINE in group.sorters and "loss" in loss:
            epoch = first_crossing(curve["mean"], group.curve(BASELINE, loss)["mean"].iloc[-1])
            row["epochs to D-RR's final loss"] = "not reached" if math.isnan(epoch) else f"{epoch:.1f}"
        row["seconds per epoch"] = f"{curve['elapsed'].iloc[-1] / curve.index[-1]:.3f}" if group.timed else "–"
        yield row


def _differences(group: Group, metrics: tuple[str, ...]) -> list[dict[str, str]]:
    pairs = [(sorter, BASELINE) for sorter in group.sorters if sorter != BASELINE] + list(PAIRS)
    return [
        {"difference": f"{group.label(first)} − {group.label(second)}", "final": metric_label(metric)}
        | _paired(group.final(first, metric) - group.final(second, metric), metric)
        for first, second in pairs
        if {first, second} <= set(group.sorters)
        for metric in metrics
    ]


def _page(rows: list[dict[str, str]], differences: list[dict[str, str]], notes: list[str]) -> str:
    tables = [markdown(table) for table in (rows, differences) if table]
    return "\n\n".join([*tables, "  \n".join(notes)]) + "\n"


def _paired(difference: Series, metric: str) -> dict[str, str]:
    """Over the seeds that both have."""
    difference = difference.dropna()
    better = (difference > 0) if higher_is_better(metric) else (difference < 0)
    p = paired_p(difference.tolist()) if len(difference) >= FEWEST_SEEDS else math.nan
    return {
        "mean ± std": f"{difference.mean():+.3g}" + f" ± {difference.std():.2g}" * (len(difference) > 1),
        "better on": f"{better.sum()} of {len(difference)} seeds",
        "paired t-test": "too few seeds" if math.isnan(p) else f"p = {p:.2g}" if p >= 1e-4 else "p < 1e-4",
    }


def _compared(experiment: str, group: Group, metric: str) -> dict[str, str]:
    """The values of the last epoch; for validation accuracies of the best epoch, as in the paper's table."""
    read, first = group.best if metric.startswith("val_accuracy") else group.final, group.manifests[0]
    ours, baseline, columns = read(OURS, metric), read(BASELINE, metric), group.columns or "workers"
    paired = _paired(ours - baseline, metric)
    return {
        "task": f"{first['task']}, {column_title(columns, group.setting(columns))}",
        "data": ("EMBEDDED: " if first["data"]["embedded"] else "") + first["data"]["description"],
        "size": first.get("size", "paper"),
        "seeds": str(len((ours - baseline).dropna())),
        "metric": metric_label(metric),
        sorter_label(BASELINE): _mean_std(baseline),
        sorter_label(OURS): _mean_std(ours),
        f"{sorter_label(OURS)} − {sorter_label(BASELINE)}": paired.pop("mean ± std"),
        **paired,
        "the paper's difference": _papers_difference(experiment, group, metric),
    }


def _papers_difference(experiment: str, group: Group, metric: str) -> str:
    """The paper's difference at its last epoch. Our own metric is compared with the published code's form of it."""
    theirs = metric if metric in published_metrics(experiment) else f"{metric}_authors"
    finals = _finals(experiment, theirs, group.column)
    both = sorter_label(OURS), sorter_label(BASELINE)
    return f"{finals[both[0]] - finals[both[1]]:+.3g}" if {*both} <= set(finals) else "–"


def _published_finals(experiment: str, metrics: tuple[str, ...], column: str | float | None) -> list[str]:
    known = {metric: finals for metric in metrics if (finals := _finals(experiment, metric, column))}
    parts = [
        f"{metric_label(metric)} " + ", ".join(f"{series} {value:.6g}" for series, value in finals.items())
        for metric, finals in known.items()
    ]
    return [f"The paper, on its own data: {'; '.join(parts)}."] if parts else []


def _finals(experiment: str, metric: str, column: str | float | None) -> dict[str, float]:
    """The last points of the paper's curves, by series."""
    curves = published(experiment, metric, column=column)
    return {series: curve["mean"].iloc[-1] for series, curve in curves.items()}


def _mean_std(values: Series) -> str:
    return mean_std(values, 6 if values.abs().max() < 10 else 3)
