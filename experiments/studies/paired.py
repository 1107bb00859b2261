"""Sorters compared seed by seed: the same data, split and partition, only the order differs."""

from __future__ import annotations

from experiments.report.kinds import DataFrame, Series
from experiments.report.names import BASELINE, LOSS, OURS, sorter_label
from experiments.report.statistics import estimate
from experiments.studies.verdicts import Verdict, judge

KEPT_ADVANTAGE = 0.8  # what an approximation keeps of the advantage over the baseline, at least
IN_PER_CENT = "difference in % of D-RR's train loss"


def select(table: DataFrame, **values: object) -> DataFrame:
    """The rows that have these values in the columns of these names."""
    for column, value in values.items():
        table = table[table[column] == value]
    return table


def by_seed(table: DataFrame, sorter: str, metric: str = LOSS) -> Series:
    """One value per seed."""
    return select(table, sorter=sorter).set_index("seed")[metric].sort_index()


def difference(table: DataFrame, sorter: str, other: str = BASELINE, metric: str = LOSS) -> Series:
    """sorter − other, per seed, in per cent of the baseline's mean: below 0 where `sorter` ends lower."""
    scale = by_seed(table, BASELINE, metric).mean()
    return 100 * (by_seed(table, sorter, metric) - by_seed(table, other, metric)) / scale


def ends_lower(table: DataFrame, what: str, sorter: str, other: str = BASELINE) -> Verdict:
    words = f"{what}: {sorter_label(sorter)} ends lower than {sorter_label(other)}"
    return judge(words, difference(table, sorter, other), IN_PER_CENT, most=0.0)


def keeps_the_advantage(table: DataFrame, what: str, sorter: str) -> Verdict:
    words = f"{what}: {sorter_label(sorter)} keeps four fifths of CD-GraB's advantage"
    unless = f"{sorter_label(OURS)} itself is not shown to end lower than D-RR"
    return keeps(words, difference(table, BASELINE, sorter), difference(table, BASELINE, OURS), unless)


def keeps(words: str, after: Series, before: Series, unless: str) -> Verdict:
    """Whether `after` is at least four fifths of `before`, advantages per seed, in per cent of D-RR's loss.

    Judged by what `after` has more than that, seed by seed: a share would divide by a mean that is itself uncertain.
    `unless`: what to say where the advantage before may be chance.
    """
    note = f"advantage {after.mean():.3g} − {KEPT_ADVANTAGE:g} × {before.mean():.3g}, in % of D-RR's train loss"
    sure = estimate(before).low > 0
    return judge(words, after - KEPT_ADVANTAGE * before, note, "" if sure else unless, least=0.0)
