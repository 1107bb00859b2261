"""What claims about curves are judged by: pure functions of runs, one value per seed, and of published curves."""

from __future__ import annotations

import math

import numpy as np

from experiments.report.kinds import DataFrame, Series
from experiments.report.names import LOSS
from experiments.report.runs import Group
from experiments.report.tables import LAST_HALF, ends, epochs_to

Pair = tuple[str, str]


def difference(group: Group, pair: Pair, metric: str = LOSS, when: str = LAST_HALF) -> Series:
    """First − second, of the seeds that both have; empty if one of them is missing."""
    first, second = (ends(metric)[when](group, sorter, metric) for sorter in pair)
    return (first - second).dropna()


def scatter(curve: Series) -> float:
    """The standard deviation of the change from epoch to epoch over the last half of the epochs."""
    return float(curve[curve.index > math.ceil(curve.index[-1]) / 2].diff().std())


def smoother(group: Group, pair: Pair) -> Series:
    """log(scatter of the second / of the first): above 0 where the first is smoother."""
    first, second = (by_seed(group, sorter) for sorter in pair)
    both = first.columns.intersection(second.columns)
    return np.log(second[both].apply(scatter) / first[both].apply(scatter)).dropna()


def sooner(group: Group, pair: Pair) -> Series:
    """Epochs that the first takes to the second's last loss, less those of the second itself.

    Both are counted, to the loss of the same seed; what is not reached counts as one epoch more than there were.
    """
    first, second = _epochs_to_last(group, pair)
    return (first - second).dropna()


def never_there(group: Group, pair: Pair) -> int:
    """On how many seeds the first never reaches the second's last loss."""
    epochs, _ = _epochs_to_last(group, pair)
    return int((epochs > group.metrics["epoch"].max()).sum())


def sooner_in_seconds(group: Group, pair: Pair) -> Series:
    """log(seconds of the second to its last loss / seconds of the first to it)."""
    epochs, seconds = _epochs_to_last(group, pair), (by_seed(group, sorter, "seconds").mean() for sorter in pair)
    first, second = (count * each for count, each in zip(epochs, seconds, strict=True))
    return np.log(second / first).dropna()


def slower(group: Group, pair: Pair) -> Series:
    """log(seconds per epoch of the first / of the second)."""
    first, second = (by_seed(group, sorter, "seconds").mean() for sorter in pair)
    return np.log(first / second).dropna()


def slopes(groups: list[Group], setting: str, pair: Pair) -> Series:
    """The slope of the difference in loss per doubling of the setting, fitted seed by seed; seeds that have at least
    three values of it."""
    import pandas as pd

    table = pd.DataFrame({math.log2(group.setting(setting)): difference(group, pair) for group in groups})
    return table[table.count(axis=1) >= 3].apply(lambda row: slope(row.dropna().to_dict()), axis=1)


def slope(points: dict[float, float]) -> float:
    """Of a line through the points."""
    return float(np.polyfit(list(points), list(points.values()), 1)[0])


def majority(group: Group) -> float | None:
    """The accuracy of always saying the largest class, in per cent; None if the runs do not say."""
    rows = group.manifests[0]["data"]["rows"]
    parts = 1 + ("val_accuracy_mm" in group.metrics)  # two of about equal size
    return 100.0 * rows["largest_class"] * parts / rows["validation"] if "largest_class" in rows else None


def by_seed(group: Group, sorter: str, metric: str = LOSS) -> DataFrame:
    """One column per seed, one row per epoch."""
    rows = group.metrics[group.metrics["sorter"] == sorter]
    return rows.pivot(index="epoch", columns="seed", values=metric)


def _epochs_to_last(group: Group, pair: Pair) -> list[Series]:
    first, second = (by_seed(group, sorter) for sorter in pair)
    last = second.iloc[-1]

    def reached(curve: Series) -> float:
        epoch = epochs_to(curve, last.get(curve.name, math.nan))
        return curve.index[-1] + 1 if math.isnan(epoch) else epoch

    return [curves[curves.columns.intersection(second.columns)].apply(reached) for curves in (first, second)]
