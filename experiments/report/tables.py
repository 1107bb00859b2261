"""Tables of runs, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from experiments.report.kinds import DataFrame, Series
from experiments.report.names import (
    BASELINE,
    OURS,
    PUBLISHED_SORTERS,
    column_title,
    higher_is_better,
    metric_label,
    sorter_label,
)
from experiments.report.published import last_half, published, published_metrics
from experiments.report.runs import Group, Sweep
from experiments.report.statistics import paired_p
from experiments.report.text import markdown
from experiments.report.text import mean_std as as_text

HEADNOTE = (
    "Mean over the last half of the epochs, and the last epoch (validation accuracies: the best epoch of each seed), ± "
    "sample standard deviation over seeds; differences and the two-sided t-test are paired over seeds, at least three "
    "of them. The paper's difference is that of its own curves, on its own data."
)
LAST_HALF, LAST_EPOCH, BEST_EPOCH = "last half", "last epoch", "best epoch"
ENDS = {LAST_HALF: Group.last_half, LAST_EPOCH: Group.final}  # what a curve ends at, one value per seed
# Further pairs, if the runs exist: what the published code really compares on M4 and WikiText-2, and ours against it
PAIRS = ((OURS, "riffle"), ("riffle", "d_rr,shared=True"))


def summary(group: Group, metrics: tuple[str, ...], experiment: str) -> str:
    """Final metrics per sorter, epochs to D-RR's final loss, seconds per epoch, and who wins on each seed.

    A metric in the published code's form is shown together with the metric itself.
    """
    metrics = tuple(dict.fromkeys([*metrics, *(metric.removesuffix("_authors") for metric in metrics)]))
    notes = [group.caption() + ".", *_published_ends(experiment, metrics, group.column)]
    return _page(list(_rows(group, metrics)), _differences(group, metrics), notes)


def sweep_summary(sweep: Sweep, metrics: tuple[str, ...], experiment: str) -> str:
    """The same with one block of rows for every value of the swept setting."""
    rows, differences, notes = [], [], [sweep.caption() + "."]
    for group in sweep.groups:
        title = column_title(sweep.setting, group.setting(sweep.setting))
        rows += [{"": title} | row for row in _rows(group, metrics)]
        differences += [{"": title} | row for row in _differences(group, metrics)]
        notes += [f"{title}: {note}" for note in _published_ends(experiment, metrics, group.column)]
    return _page(rows, differences, notes)


def comparison(experiment: str, groups: Iterable[Group]) -> list[dict[str, str]]:
    """CD-GraB against D-RR on the metrics that the paper reports: one row per group, metric and what is compared."""
    own = published_metrics(experiment)
    plain = tuple(metric.removesuffix("_authors") for metric in own)
    return [
        _compared(experiment, group, metric, when)
        for group in groups
        if {OURS, BASELINE} <= set(group.sorters)
        for metric in (own if group.like_the_paper else plain)
        if metric in group.metrics
        for when in ends(metric)
    ]


def ends(metric: str) -> dict[str, Callable[[Group, str, str], Series]]:
    """What is compared: means over the last half of the epochs, and last epochs; validation accuracies where they are
    best, as in the paper's table."""
    return {BEST_EPOCH: Group.best} if metric.startswith("val_accuracy") else ENDS


def papers_ends(experiment: str, metric: str, column: str | float | None, when: str = LAST_HALF) -> dict[str, float]:
    """What the paper's curves end at, by sorter."""
    curves = published(experiment, metric, column=column)
    return {PUBLISHED_SORTERS[series]: papers_end(curve, when) for series, curve in curves.items()}


def papers_end(curve: DataFrame, when: str) -> float:
    """What one of them ends at. Of validation accuracies the best is all that was published."""
    return last_half(curve) if when == LAST_HALF else float(curve["mean"].iloc[-1])


def epochs_to(curve: Series, target: float) -> float:
    """The first epoch after which a falling curve is at `target` or below, counted; NaN if it never is."""
    below = curve[curve <= target]
    return math.nan if below.empty else float(below.index[0])


def _rows(group: Group, metrics: tuple[str, ...]) -> Iterator[dict[str, str]]:
    loss = metrics[0]
    for sorter in group.sorters:
        curve = group.curve(sorter, loss)
        if curve.empty:  # a metric that these runs did not log
            continue
        row = {"sorter": group.label(sorter), "seeds": str(len(group.final(sorter, loss)))}
        for metric in metrics:
            row |= {f"{metric_label(metric)}, {when}": mean_std(of(group, sorter, metric)) for when, of in ENDS.items()}
        if BASELINE in group.sorters and "loss" in loss:
            own, baseline = group.on_the_same_seeds((sorter, BASELINE), loss)
            epoch = epochs_to(own, baseline.iloc[-1]) if len(baseline) else math.nan
            row["epochs to D-RR's last loss"] = "not reached" if math.isnan(epoch) else f"{epoch:g}"
        timed = group.alone.curve(sorter, loss)["elapsed"] if sorter in group.alone.sorters else curve["elapsed"][:0]
        row["seconds per epoch"] = "–" if timed.empty else f"{timed.iloc[-1] / timed.index[-1]:.3f}"
        yield row


def _differences(group: Group, metrics: tuple[str, ...]) -> list[dict[str, str]]:
    pairs = [(sorter, BASELINE) for sorter in group.sorters if sorter != BASELINE] + list(PAIRS)
    return [
        {"difference": f"{group.label(first)} − {group.label(second)}", "of": f"{metric_label(metric)}, {when}"}
        | compared_by_seed(of(group, first, metric) - of(group, second, metric), metric)
        for first, second in pairs
        if {first, second} <= set(group.sorters)
        for metric in metrics
        for when, of in ENDS.items()
    ]


def _page(rows: list[dict[str, str]], differences: list[dict[str, str]], notes: list[str]) -> str:
    tables = [markdown(table) for table in (rows, differences) if table]
    return "\n\n".join([*tables, "  \n".join(notes)]) + "\n"


def compared_by_seed(difference: Series, metric: str) -> dict[str, str]:
    """Over the seeds that both have."""
    difference = difference.dropna()
    better = (difference > 0) if higher_is_better(metric) else (difference < 0)
    p = paired_p(difference.tolist())
    spread = "" if math.isnan(p) else f" ± {difference.std():.2g}"
    return {
        "mean ± std": f"{difference.mean():+.3g}{spread}",
        "better on": f"{better.sum()} of {len(difference)} seeds",
        "paired t-test": "too few seeds" if math.isnan(p) else p_value(p),
    }


def p_value(p: float) -> str:
    return f"p = {p:.2g}" if p >= 1e-4 else "p < 1e-4"


def _compared(experiment: str, group: Group, metric: str, when: str) -> dict[str, str]:
    first, columns = group.manifests[0], group.columns or "workers"
    ours, baseline = (ends(metric)[when](group, sorter, metric) for sorter in (OURS, BASELINE))
    paired = compared_by_seed(ours - baseline, metric)
    return {
        "task": f"{first['task']}, {column_title(columns, group.setting(columns))}",
        "data": ("EMBEDDED: " if first["data"]["embedded"] else "") + first["data"]["description"],
        "size": first.get("size", "paper"),
        "seeds": str(len((ours - baseline).dropna())),
        "metric": f"{metric_label(metric)}, {when}",
        sorter_label(BASELINE): mean_std(baseline),
        sorter_label(OURS): mean_std(ours),
        f"{sorter_label(OURS)} − {sorter_label(BASELINE)}": paired.pop("mean ± std"),
        **paired,
        "the paper's difference": _papers_difference(experiment, group, metric, when),
    }


def _papers_difference(experiment: str, group: Group, metric: str, when: str) -> str:
    """Our own metric is compared with the published code's form of it."""
    theirs = metric if metric in published_metrics(experiment) else f"{metric}_authors"
    values = papers_ends(experiment, theirs, group.column, when)
    return f"{values[OURS] - values[BASELINE]:+.3g}" if {OURS, BASELINE} <= set(values) else "–"


def _published_ends(experiment: str, metrics: tuple[str, ...], column: str | float | None) -> list[str]:
    return [
        f"The paper, on its own data: {metric_label(metric)}, {when}: "
        + ", ".join(f"{sorter_label(sorter)} {value:.6g}" for sorter, value in values.items())
        + "."
        for metric in metrics
        for when in ENDS
        if (values := papers_ends(experiment, metric, column, when))
    ]


def mean_std(values: Series) -> str:
    return as_text(values, 6 if values.abs().max() < 10 else 3)
