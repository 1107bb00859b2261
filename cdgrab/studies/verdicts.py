"""From measurements over seeds to verdicts: estimates with confidence intervals, and what they say about a claim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..report import markdown
from ..significance import t_quantile

HOLDS, FAILS, UNDECIDED = "holds", "fails", "undecided"
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its confidence interval; one seed says nothing about the spread."""

    mean: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        if not self.seeds:
            return "–"
        if self.seeds < 2:
            return f"{_signed(self.mean)}, one seed"
        return f"{_signed(self.mean)} [{_signed(self.low)}, {_signed(self.high)}]"


@dataclass(frozen=True)
class Claim:
    """`number` lies between `least` and `most`; the reason for the two limits is in the words."""

    words: str
    least: float = -math.inf
    most: float = math.inf

    @property
    def threshold(self) -> str:
        if math.isinf(self.least):
            return f"≤ {_signed(self.most)}"
        return f"≥ {_signed(self.least)}" if math.isinf(self.most) else f"{_signed(self.least)} … {_signed(self.most)}"


@dataclass(frozen=True)
class Verdict:
    """One line of results/STUDIES.md."""

    claim: str
    answer: str
    measured: str
    threshold: str
    note: str = ""

    def cells(self) -> dict[str, str]:
        return {
            "claim": self.claim,
            "verdict": f"**{self.answer}**",
            "measured [95 % interval]": self.measured,
            "threshold": self.threshold,
            "note": self.note,
        }


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95 % interval of independent values, one per seed, by Student's t; NaNs don't count."""
    values = np.asarray(values, dtype=float)
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return Estimate(float(values[0]) if len(values) else math.nan, -math.inf, math.inf, len(values))
    half = t_quantile(len(values) - 1, CONFIDENCE) * values.std(ddof=1) / math.sqrt(len(values))
    return Estimate(float(values.mean()), float(values.mean() - half), float(values.mean() + half), len(values))


def judge(claim: Claim, measured: Estimate, note: str = "", unless: str = "") -> Verdict:
    """holds: the whole interval is inside the claim's limits; fails: all of it is outside; undecided: anything else.

    `unless` is a reason why this measurement cannot decide, whatever it says.
    """
    if unless or not math.isfinite(measured.low + measured.high):
        answer = UNDECIDED
    elif claim.least <= measured.low and measured.high <= claim.most:
        answer = HOLDS
    else:
        answer = FAILS if measured.high < claim.least or measured.low > claim.most else UNDECIDED
    return Verdict(claim.words, answer, str(measured), claim.threshold, "; ".join(filter(None, (unless, note))))


def power_exponents(table: pd.DataFrame, x: str, y: str) -> pd.Series:
    """The exponent of y ∝ x^exponent by least squares on logarithms, one fit per seed.

    Seeds are what repeats independently, so that the spread of their exponents, and not that of points around one line,
    is the uncertainty.
    """

    def exponent(rows: pd.DataFrame) -> float:
        return float(np.polyfit(np.log(rows[x]), np.log(rows[y]), 1)[0]) if rows[x].nunique() > 1 else math.nan

    return pd.Series({seed: exponent(rows) for seed, rows in table.groupby("seed")}, name="exponent")


def verdict_table(verdicts: Sequence[Verdict]) -> str:
    return markdown([verdict.cells() for verdict in verdicts])


def _signed(value: float) -> str:
    """Three significant digits, with a real minus sign."""
    return f"{value:.3g}".replace("-", "−")
