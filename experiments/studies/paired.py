"""Sorters compared seed by seed: the same data, split and partition, only the order differs."""

from __future__ import annotations

import pandas as pd

from experiments.studies.style import label
from experiments.studies.verdicts import Claim, Estimate, Verdict, estimate, judge

BASELINE, OURS, UNCOORDINATED = "d_rr", "cd_grab", "id_grab_pair"
LOSS = "train_loss"
KEPT_ADVANTAGE = 0.8  # what an approximation keeps of the advantage over the baseline, at least


def by_seed(table: pd.DataFrame, sorter: str, metric: str = LOSS) -> pd.Series:
    """One value per seed."""
    return table[table["sorter"] == sorter].set_index("seed")[metric].sort_index()


def difference(table: pd.DataFrame, sorter: str, other: str = BASELINE, metric: str = LOSS) -> pd.Series:
    """sorter − other, per seed, in per cent of the baseline's mean: below 0 where `sorter` ends lower."""
    scale = by_seed(table, BASELINE, metric).mean()
    return 100 * (by_seed(table, sorter, metric) - by_seed(table, other, metric)) / scale


def ends_lower(table: pd.DataFrame, what: str, sorter: str, other: str = BASELINE) -> Verdict:
    claim = Claim(f"{what}: {label(sorter)} ends lower than {label(other)}", most=0.0)
    return judge(claim, estimate(difference(table, sorter, other)), "difference in % of D-RR's train loss")


def keeps_the_advantage(table: pd.DataFrame, what: str, sorter: str) -> Verdict:
    words = f"{what}: {label(sorter)} keeps four fifths of CD-GraB's advantage"
    unless = f"{label(OURS)} itself is not shown to end lower than D-RR"
    return keeps(words, difference(table, BASELINE, sorter), difference(table, BASELINE, OURS), unless)


def keeps(words: str, after: pd.Series, before: pd.Series, unless: str) -> Verdict:
    """Whether `after` is at least four fifths of `before`, advantages per seed, in per cent of D-RR's loss.

    Judged by what `after` has more than that, seed by seed: a share would divide by a mean that is itself uncertain.
    `unless`: what to say where there is no sure advantage before.
    """
    beyond = estimate(after - KEPT_ADVANTAGE * before)
    note = f"advantage {after.mean():.3g} − {KEPT_ADVANTAGE:g} × {before.mean():.3g}, in % of D-RR's train loss"
    return judge(Claim(words, least=0.0), beyond, note, "" if positive(estimate(before)) else unless)


def positive(value: Estimate) -> bool:
    """More than chance above zero."""
    return value.low > 0
