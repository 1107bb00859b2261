"""From measurements over seeds to verdicts: estimates with confidence intervals, and what they say about a claim."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from experiments.report.statistics import t_quantile
from experiments.report.tables import markdown

HOLDS, FAILS, UNDECIDED = "holds", "fails", "undecided"
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its confidence interval; one seed says nothing about the spread. What is `counted`, not
    measured, has neither seeds nor interval."""

    mean: float
    low: float
    high: float
    seeds: int
    counted: bool = False

    def __str__(self) -> str:
        if self.counted:
            return f"{_signed(self.mean)}, counted"
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


def counted(value: float) -> Estimate:
    """A number that would be the same in every repetition."""
    return Estimate(value, value, value, 0, counted=True)


def judge(claim: Claim, measured: Estimate, note: str = "", unless: str = "") -> Verdict:
    """holds: the whole interval is inside the claim's limits; fails: all of it is outside; undecided: anything else.

    `unless` is a reason why this measurement cannot decide, whatever it says.
    """
    answer = UNDECIDED if unless else _answer(claim, measured)
    return Verdict(claim.words, answer, str(measured), claim.threshold, "; ".join(filter(None, (unless, note))))


def judge_every(claim: Claim, cells: Mapping[object, Estimate], note: str, unless: str = "") -> Verdict:
    """A claim about every cell: holds where all of them hold, fails where one fails, else undecided.

    Printed is the cell that decides: among those with that answer, the one that reaches furthest out (or, where all
    hold, nearest to it). `note` has a place {cell} for its name.
    """
    answers = {cell: _answer(claim, value) for cell, value in cells.items()}
    answer = next((some for some in (FAILS, UNDECIDED) if some in answers.values()), HOLDS)

    def outside(cell: object) -> float:
        value = cells[cell]
        if answer == FAILS:
            return max(claim.least - value.high, value.low - claim.most)
        return max(claim.least - value.low, value.high - claim.most)

    deciding = max((cell for cell in cells if answers[cell] == answer), key=outside)
    return judge(claim, cells[deciding], note.format(cell=deciding), unless)


def _answer(claim: Claim, measured: Estimate) -> str:
    if not math.isfinite(measured.low + measured.high):
        return UNDECIDED
    if claim.least <= measured.low and measured.high <= claim.most:
        return HOLDS
    return FAILS if measured.high < claim.least or measured.low > claim.most else UNDECIDED


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
