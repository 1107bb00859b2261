"""From one value per seed to a row of results/PAPER.md: interval, p value adjusted within a family, verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from experiments.report.kinds import Series
from experiments.report.statistics import ERROR, Estimate, estimate, holm, paired_p, sign_p
from experiments.report.tables import p_value
from experiments.report.text import FEWEST_SEEDS, plural, signed

REPRODUCED, CONTRADICTED = "reproduced", "contradicted"
UNDECIDED, IMPOSSIBLE = "cannot decide", "not possible here"
VERDICTS = (REPRODUCED, CONTRADICTED, UNDECIDED, IMPOSSIBLE)


@dataclass(frozen=True)
class Evidence:
    """Where numbers of ours come from."""

    data: str
    figure: str  # its name under results/figures
    command: str


@dataclass(frozen=True)
class Row:
    """One line of the scoreboard."""

    where: str
    says: str
    verdict: str
    reason: str = ""
    ours: str = "–"
    seeds: str = "–"
    evidence: Evidence = Evidence("–", "", "–")

    def cells(self, drawn: Callable[[str], bool]) -> dict[str, str]:
        figure = self.evidence.figure
        return {
            "where": self.where,
            "the paper says": self.says,
            "ours [interval]": self.ours,
            "seeds": self.seeds,
            "data": self.evidence.data,
            "verdict": f"**{self.verdict}**" + f": {self.reason}" * bool(self.reason),
            "figure": f"[figure](figures/{figure}.png)".replace(" ", "%20") if drawn(figure) else "–",
            "command": f"`{self.evidence.command}`" if self.evidence.command != "–" else "–",
        }


@dataclass(frozen=True)
class Claim:
    """A claim that the mean of `values`, one per seed, lies below (or above) a limit."""

    where: str
    says: str
    family: str  # tests that are adjusted for one another
    values: Series
    evidence: Evidence
    wanted: int  # seeds
    below: bool = True
    limit: float = 0.0
    shown: Callable[[float], float] = float  # exp for what is a logarithm
    unit: str = ""  # of what is shown, where the claim does not say it
    beside: str = ""  # other numbers
    unless: str = ""  # why these runs cannot decide, whatever they say
    margin: float = 0.0  # a smaller difference from the limit does not matter
    censored: int = 0  # of the values are larger by nobody knows how much: then signs decide, and there is no interval

    @property
    def p(self) -> float:
        differences = [float(value) - self.limit for value in self.values]
        return sign_p(differences) if self.censored else paired_p(differences)


def judged(claims: Iterable[Claim | Row]) -> list[Row]:
    """Rows stay as they are; p values of claims are adjusted within their families."""
    claims = list(claims)
    families: dict[str, list[Claim]] = {}
    for claim in claims:
        if isinstance(claim, Claim):
            families.setdefault(claim.family, []).append(claim)
    adjusted = {
        id(claim): p
        for family in families.values()
        for claim, p in zip(family, holm([claim.p for claim in family]), strict=True)
    }
    return [claim if isinstance(claim, Row) else _row(claim, adjusted[id(claim)]) for claim in claims]


def _row(claim: Claim, adjusted: float) -> Row:
    value = estimate(claim.values)
    if claim.censored:
        value = replace(value, low=-math.inf, high=math.inf)
    verdict, reason = _verdict(claim, value, adjusted)
    by_holm = "" if adjusted == claim.p else f" ({p_value(adjusted)} by Holm)"
    test = " of the signs" * bool(claim.censored)
    p = "" if math.isnan(claim.p) else f", {p_value(claim.p)}{test}{by_holm}"
    number = str(replace(value, **{end: claim.shown(getattr(value, end)) for end in ("mean", "low", "high")}))
    unit = f" ({claim.unit})" * bool(claim.unit)
    ours = "; ".join(filter(None, (number + unit + p, claim.beside))) if value.seeds else "–"
    return Row(claim.where, claim.says, verdict, reason, ours, _of(value.seeds, claim.wanted), claim.evidence)


def _of(seeds: int, wanted: int) -> str:
    return str(seeds) if seeds >= wanted else f"{seeds} of {wanted}"


def _verdict(claim: Claim, value: Estimate, adjusted: float) -> tuple[str, str]:
    if claim.unless or value.seeds < FEWEST_SEEDS:
        return UNDECIDED, claim.unless or plural(value.seeds, "seed")
    if adjusted <= ERROR:
        return (REPRODUCED if (value.mean < claim.limit) == claim.below else CONTRADICTED), ""
    if claim.p <= ERROR:
        return UNDECIDED, f"{p_value(adjusted)} by Holm"
    if max(value.high - claim.limit, claim.limit - value.low) <= claim.margin:
        return CONTRADICTED, "equal, within the margin" if claim.margin else "the same on every seed"
    if claim.censored:
        agree = sum((value < claim.limit) == claim.below for value in claim.values)
        return UNDECIDED, f"so on {agree} of {value.seeds} seeds"
    return UNDECIDED, f"the interval includes {signed(claim.shown(claim.limit))}"
