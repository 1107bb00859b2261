"""From measurements over seeds to verdicts: whether estimates with confidence intervals support a claim."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from omegaconf import DictConfig

from cdgrab.checks import count
from cdgrab.errors import CdgrabError
from experiments.report.kinds import DataFrame, Series
from experiments.report.names import BASELINE, LOSS, OURS, sorter_label
from experiments.report.statistics import ERROR, SAME_LOSS, Estimate, distance_p, estimate, holm
from experiments.report.text import signed, table

HOLDS, FAILS, EQUAL, UNDECIDED = "holds", "fails", "equal", "undecided"
KEPT_ADVANTAGE = 0.8  # the least share of the advantage over the baseline that an approximation should keep
MOST_VALUES = 1000  # more than anybody will compute
IN_PER_CENT = "difference in % of D-RR's train loss"
Measured = Estimate | Sequence[float]  # one value per seed


@dataclass(frozen=True)
class Verdict:
    """One line of results/STUDIES.md."""

    claim: str
    answer: str
    measured: str
    threshold: str
    note: str = ""
    seeds: int = 0  # how many it took to decide; 0: they are not what was repeated
    over_seeds: bool = True  # whether a study that adds seeds adds values to it
    latest: Verdict | None = None  # the same with all seeds that there are
    p: float = math.nan  # of the limit that decides, if means over seeds were compared with it
    adjusted: float = math.nan  # the same for all claims of a study (Holm)

    @property
    def needs_seeds(self) -> bool:
        return self.over_seeds and self.answer == UNDECIDED


def judge(words: str, measured: Measured, note: str = "", unless: str = "", **limits: float) -> Verdict:
    """Judge the claim that a number lies between `least` and `most`; measured: an estimate, or one value per seed.

    holds: the whole interval is between them; fails: all of it is outside; equal: neither, but all of it is within
    `margin` of one limit, where differences do not matter; undecided: anything else. `unless` is a reason why this
    measurement cannot decide, whatever it says.
    """
    measured = estimate(measured)
    answer = UNDECIDED if unless else _answer(measured, **limits)
    missing = _missing(measured, **limits) if answer == UNDECIDED and not unless else ""
    notes = "; ".join(filter(None, (unless, note, missing)))
    p = math.nan if unless else _p(measured, answer, **limits)
    return Verdict(words, answer, str(measured), threshold(**limits), notes, p=p)


def judge_every(words: str, cells: Mapping[object, Measured], note: str, without: str = "", **limits: float) -> Verdict:
    """A claim about every cell: fails where one fails, else undecided or equal where one is; holds where all hold.

    The cell that decides is shown: among those with that answer, the one furthest outside the limits (or, if all hold,
    nearest to them). `note` has a place {cell} for its name; `without` is the note if there are no cells.
    """
    if not cells:
        return judge(words, [], unless=without, **limits)
    measured = {cell: estimate(values) for cell, values in cells.items()}
    answers = {cell: _answer(value, **limits) for cell, value in measured.items()}
    answer = next((some for some in (FAILS, UNDECIDED, EQUAL) if some in answers.values()), HOLDS)

    def outside(cell: object) -> float:
        low, high = measured[cell].low, measured[cell].high
        return _excess(high, low, **limits) if answer == FAILS else _excess(low, high, **limits)

    deciding = max((cell for cell in measured if answers[cell] == answer), key=outside)
    verdict = judge(words, measured[deciding], note.format(cell=deciding), **limits)
    if answer == FAILS:  # one of so many may fail by chance
        return replace(verdict, p=min(len(cells) * verdict.p, 1.0))  # NaN stays
    return replace(verdict, p=max((_p(measured[cell], answers[cell], **limits) for cell in cells), key=_or_nothing))


def looks_of(seeds: int | Sequence[int]) -> list[int]:
    """After how many seeds claims are judged, from study.seeds or that of a model."""
    looks = [seeds] if isinstance(seeds, str) or not isinstance(seeds, Sequence) else list(seeds)
    for look in looks:
        count("study.seeds", look, 1)
    if not looks or any(before >= after for before, after in pairwise(looks)):
        raise CdgrabError(f"study.seeds must be a whole number, or several that ascend, got {looks}")
    return looks


def looks_at(settings: DictConfig, own: Mapping) -> list[int]:
    """After how many seeds the claims of a cell are judged: the study's number, or what the cell (or its model) has
    instead as `seeds`, [5, 10] where results of 5 had been seen when others were added. Whoever wants few seeds of the
    study has few of these."""
    looks = looks_of(own.get("seeds", settings.seeds))
    return looks if looks[0] <= settings.seeds else [settings.seeds]


def repeated(verdict: Verdict, seeds: int = 0) -> Verdict:
    """A claim about something that is repeated a fixed number of times, with as many seeds or without any."""
    return replace(verdict, seeds=seeds, over_seeds=False)


def beyond_chance(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """All claims of a study, undecided where the p value is too large after adjusting for all of them (Holm): one of so
    many may come out by chance. What is counted, and medians of times, have no p value and stay what they are."""
    verdicts = list(verdicts)
    tested = [number for number, verdict in enumerate(verdicts) if not math.isnan(verdict.p)]
    for number, p in zip(tested, holm([verdicts[number].p for number in tested]), strict=True):
        verdict = replace(verdicts[number], adjusted=p)
        if verdict.answer != UNDECIDED and p > ERROR:
            reason = f"{verdict.answer} by itself (p = {verdict.p:.2g}), not among {len(tested)} claims"
            note = "; ".join(filter(None, (verdict.note, reason)))
            verdict = replace(verdict, answer=UNDECIDED, note=note)
        verdicts[number] = verdict
    return verdicts


def beside_all_seeds(first: Verdict, last: Verdict) -> Verdict:
    """A claim's first decision. Its note says so if all seeds together would not have led to it."""
    later = f"with all {last.seeds} seeds {last.measured}: {last.answer}" * (first.answer != last.answer)
    return replace(first, note="; ".join(filter(None, (first.note, later))), latest=last)


def threshold(least: float = -math.inf, most: float = math.inf, margin: float = 0.0) -> str:
    """≤ 1.1, ≥ 0.9 or 0.9 … 1.1, and the margin in brackets"""
    within = f" (± {signed(margin)})" if margin else ""
    if math.isinf(least):
        return f"≤ {signed(most)}{within}"
    return f"≥ {signed(least)}{within}" if math.isinf(most) else f"{signed(least)} … {signed(most)}{within}"


@table
def verdict_table(verdicts: Iterable[Verdict]) -> Iterator[dict[str, str]]:
    for verdict in verdicts:
        p = "–" if math.isnan(verdict.adjusted) else f"{verdict.adjusted:.2g}"
        row = {"claim": verdict.claim, "verdict": f"**{verdict.answer}**", "measured [interval]": verdict.measured}
        row |= {"threshold": verdict.threshold, "p (Holm)": p}
        yield row | {"seeds": str(verdict.seeds or "–"), "note": verdict.note}


def _excess(low: float, high: float, least: float = -math.inf, most: float = math.inf, margin: float = 0.0) -> float:
    """By how much `low` is too low or `high` is too high; the margin does not count."""
    return max(least - low, high - most)


def _answer(measured: Estimate, **limits: float) -> str:
    low, high = measured.low, measured.high
    if not math.isfinite(low + high):
        return UNDECIDED
    if _excess(low, high, **limits) <= 0:
        return HOLDS
    if _excess(high, low, **limits) > 0:
        return FAILS
    return EQUAL if _distance(low, high, **limits) <= limits.get("margin", 0.0) else UNDECIDED


def _p(measured: Estimate, answer: str, **limits: float) -> float:
    """Of the nearest limit, or of the margin's end; NaN where all values are the limit itself."""
    distance = _distance(measured.mean, **limits)
    room = limits["margin"] - distance if answer == EQUAL else distance
    return distance_p(measured, room) if room or measured.error else math.nan


def _or_nothing(p: float) -> float:
    """NaN counts as less than any p value."""
    return -1.0 if math.isnan(p) else p


def _distance(*values: float, least: float = -math.inf, most: float = math.inf, margin: float = 0.0) -> float:
    """How far all of them are at most from the same limit, the nearer one, wherever its margin ends."""
    return min(max(abs(value - limit) for value in values) for limit in (least, most))


def _missing(measured: Estimate, **limits: float) -> str:
    """How many values would decide if mean and spread stayed what they are: intervals shrink with their root. They
    must exclude the limit, or else fit into the margin around it."""
    half, distance = (measured.high - measured.low) / 2, _distance(measured.mean, **limits)
    room = max(distance, limits.get("margin", 0.0) - distance)
    if not (math.isfinite(half) and room):
        return ""
    needed = measured.seeds * (half / room) ** 2
    if needed >= MOST_VALUES:
        return f"even {MOST_VALUES:,} values would not decide"
    return f"about {max(measured.seeds + 1, math.ceil(float(f'{needed:.2g}')))} values would decide"


# -- sorters compared seed by seed: the same data, split and partition, only the order differs -------------------------


def select(rows: DataFrame, **values: object) -> DataFrame:
    """The rows that have these values in the columns of these names."""
    wanted = np.ones(len(rows), dtype=bool)
    for column, value in values.items():
        wanted &= (rows[column] == value).to_numpy(dtype=bool)
    return rows[wanted]


def by_seed(rows: DataFrame, sorter: str, metric: str = LOSS) -> Series:
    """One value per seed."""
    return select(rows, sorter=sorter).set_index("seed")[metric].sort_index()


def difference(rows: DataFrame, sorter: str, other: str = BASELINE, metric: str = LOSS) -> Series:
    """sorter − other, per seed, in per cent of the baseline's mean: below 0 where `sorter` ends lower."""
    scale = by_seed(rows, BASELINE, metric).mean()
    return 100 * (by_seed(rows, sorter, metric) - by_seed(rows, other, metric)) / scale


def ends_lower(rows: DataFrame, what: str, sorter: str, other: str = BASELINE) -> Verdict:
    words = f"{what}: {sorter_label(sorter)} ends lower than {sorter_label(other)}"
    return judge(words, difference(rows, sorter, other), IN_PER_CENT, most=0.0, margin=SAME_LOSS)


def keeps_the_advantage(rows: DataFrame, what: str, sorter: str) -> Verdict:
    words = f"{what}: {sorter_label(sorter)} keeps four fifths of CD-GraB's advantage"
    unless = f"{sorter_label(OURS)} itself is not shown to end lower than D-RR"
    return keeps(words, difference(rows, BASELINE, sorter), difference(rows, BASELINE, OURS), unless)


def keeps(words: str, after: Series, before: Series, unless: str) -> Verdict:
    """Whether `after` is at least four fifths of `before`, advantages per seed, in per cent of D-RR's loss.

    Judged by the excess of `after` over that, seed by seed: a ratio would divide by a mean that is itself uncertain.
    `unless`: the note if the advantage before may be chance.
    """
    note = f"advantage {after.mean():.3g} − {KEPT_ADVANTAGE:g} × {before.mean():.3g}, in % of D-RR's train loss"
    sure = estimate(before).low > 0
    return judge(words, after - KEPT_ADVANTAGE * before, note, "" if sure else unless, least=0.0)
