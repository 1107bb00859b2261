"""Sorters compared seed by seed: the same data, split and partition, only the order differs."""

from __future__ import annotations

import pandas as pd

from .looks import label
from .verdicts import Claim, Estimate, Verdict, estimate, judge

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
    """Against CD-GraB itself. The advantage is a mean over seeds, and has to be more than chance to be divided by."""
    advantage = difference(table, BASELINE, OURS)
    kept = difference(table, BASELINE, sorter) / advantage.mean()
    claim = Claim(f"{what}: {label(sorter)} keeps four fifths of CD-GraB's advantage", least=KEPT_ADVANTAGE)
    unless = "" if positive(estimate(advantage)) else f"{label(OURS)} itself is not shown to end lower than D-RR"
    return judge(claim, estimate(kept), "share of the advantage over D-RR, in train loss", unless)


def positive(value: Estimate) -> bool:
    """More than chance above zero."""
    return value.low > 0
