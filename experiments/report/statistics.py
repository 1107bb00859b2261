"""What is more than chance over seeds? Means with Student's t intervals, medians, paired t-tests, Holm's adjustment,
slopes.

Importing scipy takes long: only its special functions are imported, where they are used. `scipy.stats` takes several
times as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate

import numpy as np

from experiments.report.kinds import DataFrame, Series
from experiments.report.text import FEWEST_SEEDS, plural, signed

ERROR = 0.05  # the share of intervals that may miss the truth
SAME_LOSS = 0.5  # per cent of D-RR's train loss: a smaller difference does not matter
_looks = ContextVar("looks", default=1)


@contextmanager
def looking(times: int) -> Iterator[None]:
    """Within it, intervals are wider and p values larger, for results that are judged this many times while seeds are
    added: every look has an equal share of the 5 % (Bonferroni), so that all of them together err no more often. Inside
    another the larger number counts."""
    token = _looks.set(max(times, _looks.get()))
    try:
        yield
    finally:
        _looks.reset(token)


@dataclass(frozen=True)
class Estimate:
    """A mean or median over seeds with its confidence interval, which is infinite where they are too few. A number that
    is `counted`, not measured, has neither seeds nor interval."""

    mean: float
    low: float
    high: float
    seeds: int
    counted: bool = False
    error: float = field(default=math.nan, compare=False)  # the standard error of a mean

    def __str__(self) -> str:
        if self.counted:
            return f"{signed(self.mean)}, counted"
        if not self.seeds:
            return "–"
        if self.seeds < FEWEST_SEEDS:
            return f"{signed(self.mean)}, {plural(self.seeds, 'seed')}"
        if math.isinf(self.low):  # nothing is known about the spread
            return signed(self.mean)
        return f"{signed(self.mean)} [{signed(self.low)}, {signed(self.high)}]"


def estimate(values: Sequence[float] | Estimate) -> Estimate:
    """Mean and 95 % interval (see `looking`) of independent values, one per seed, by Student's t; NaNs don't count."""
    if isinstance(values, Estimate):
        return values
    values = np.asarray(values, dtype=float)
    values = values[np.isfinite(values)]
    if len(values) < FEWEST_SEEDS:
        return Estimate(float(values.mean()) if len(values) else math.nan, -math.inf, math.inf, len(values))
    mean, error = float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))
    half = _t_quantile(len(values) - 1, _looks.get()) * error
    return Estimate(mean, mean - half, mean + half, len(values), error=error)


def median(values: Sequence[float]) -> Estimate:
    """The median and its 95 % interval (see `looking`) from one value to another, as many from both ends: whatever the
    distribution, values are above or below its median like coins that are tossed."""
    values = np.sort(np.asarray(values, dtype=float))
    tosses = len(values)
    ways = accumulate(math.comb(tosses, heads) for heads in range(tosses + 1))  # to see so many heads at most
    outside = next(heads for heads, some in enumerate(ways) if some / 2**tosses >= ERROR / _looks.get() / 2)
    low, high = (values[outside - 1], values[-outside]) if outside else (-math.inf, math.inf)
    return Estimate(float(np.median(values)) if len(values) else math.nan, float(low), float(high), len(values))


def against(values: Sequence[float], mean: float, std: float, seeds: int) -> Estimate:
    """The mean of values less that of others, of which only the spread over so many seeds is known: Welch's."""
    values = np.asarray(values, dtype=float)
    gap = float(values.mean() - mean)
    if len(values) < FEWEST_SEEDS or not math.isfinite(std):
        return Estimate(gap, -math.inf, math.inf, len(values))
    ours, theirs = values.var(ddof=1) / len(values), std**2 / seeds
    freedom = (ours + theirs) ** 2 / (ours**2 / (len(values) - 1) + theirs**2 / (seeds - 1))
    half = _t_quantile(freedom, 1) * math.sqrt(ours + theirs)
    return Estimate(gap, gap - half, gap + half, len(values))


def counted(value: float) -> Estimate:
    """An estimate of a number that would be the same in every repetition."""
    return Estimate(value, value, value, 0, counted=True)


def paired_p(differences: Sequence[float]) -> float:
    """Two-sided p value of the paired t-test that the mean difference is zero; NaN for too few pairs."""
    measured = estimate(differences)
    return distance_p(measured, measured.mean)


def distance_p(measured: Estimate, distance: float) -> float:
    """Two-sided p value of the t-test that the true mean is this far away; NaN for too few values, and for what is no
    mean."""
    if not math.isfinite(measured.error + distance):
        return math.nan
    if not measured.error:  # no spread at all
        return 0.0 if distance else 1.0
    from scipy.special import stdtr

    return min(1.0, _looks.get() * 2 * float(stdtr(measured.seeds - 1, -abs(distance) / measured.error)))


def sign_p(differences: Sequence[float]) -> float:
    """Two-sided p value of the sign test, where the sizes of differences are not known; NaN for too few."""
    signs = [value > 0 for value in differences if value]
    if len(differences) < FEWEST_SEEDS:
        return math.nan
    fewer = min(sum(signs), len(signs) - sum(signs))
    return min(1.0, _looks.get() * 2 * sum(math.comb(len(signs), some) for some in range(fewer + 1)) / 2 ** len(signs))


def holm(p_values: Sequence[float]) -> list[float]:
    """p values adjusted for testing all of these at once (Holm 1979): the smallest × n, the next × (n − 1), … A p value
    of NaN counts as 1."""
    import pandas as pd

    ascending = pd.Series(p_values, dtype=float).fillna(1.0).sort_values()
    return list((ascending * np.arange(len(ascending), 0, -1)).clip(upper=1.0).cummax().sort_index())


def power_exponents(table: DataFrame, x: str, y: str) -> Series:
    """The exponent of y ∝ x^exponent by least squares on logarithms, one fit per seed.

    Seeds are the independent repetitions, so the uncertainty is the spread of their exponents, not that of the points
    around one line.
    """
    import pandas as pd

    def exponent(rows: DataFrame) -> float:
        return float(np.polyfit(np.log(rows[x]), np.log(rows[y]), 1)[0]) if rows[x].nunique() > 1 else math.nan

    return pd.Series({seed: exponent(rows) for seed, rows in table.groupby("seed")}, name="exponent")


@cache
def _t_quantile(freedom: float, looks: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - ERROR / looks / 2))
