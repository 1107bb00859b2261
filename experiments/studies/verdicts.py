"""From measurements over seeds to verdicts: what estimates with confidence intervals say about a claim."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.report.statistics import Estimate, estimate
from experiments.report.text import markdown, signed

HOLDS, FAILS, UNDECIDED = "holds", "fails", "undecided"


@dataclass(frozen=True)
class Claim:
    """`number` lies between `least` and `most`; the reason for the two limits is in the words."""

    words: str
    least: float = -math.inf
    most: float = math.inf

    @property
    def threshold(self) -> str:
        if math.isinf(self.least):
            return f"≤ {signed(self.most)}"
        return f"≥ {signed(self.least)}" if math.isinf(self.most) else f"{signed(self.least)} … {signed(self.most)}"


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


def judge_mean(words: str, values: Sequence[float], note: str = "", unless: str = "", **limits: float) -> Verdict:
    """The claim that the mean of `values`, one per seed, lies between `least` and `most`."""
    return judge(Claim(words, **limits), estimate(values), note, unless)


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


def verdict_table(verdicts: Sequence[Verdict]) -> str:
    return markdown([verdict.cells() for verdict in verdicts])
