"""Convergence rates: how the final gap falls with workers, with units per worker and with epochs.

Convex problems are measured by their gap, loss − smallest loss; the non-convex one by its squared gradient norm, as in
the theory. Both are means over the last half of the epochs. Its two quarters tell whether a run has reached its noise
floor: only there do gaps measure the effect of the order.

The rates are those of Theorems 1 and 2 of the CD-GraB paper (arXiv 2302.00845): smooth non-convex losses, and the P.L.
condition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np
import torch
from omegaconf import DictConfig

from cdgrab.sorters import SORTERS, make_sorter
from experiments.report import text
from experiments.report.kinds import DataFrame, Series
from experiments.report.names import BASELINE, ONE_WORKER, OURS, UNCOORDINATED
from experiments.report.names import sorter_label as label
from experiments.report.statistics import estimate, power_exponents
from experiments.store.records import significant
from experiments.studies.parts import Part
from experiments.studies.problems import Problem, make_problem, sgd_epoch
from experiments.studies.verdicts import HOLDS, Verdict, judge, select

NON_CONVEX, MEAN, KEPT = "tanh_neuron", "id_grab_bal", "shuffle_once"
NAMES = {"least_squares": "least squares", "logistic": "ridge logistic regression", NON_CONVEX: "tanh neuron"}
GAPS = ("gap", "squared gradient norm")  # of convex problems, of the other
END = "end"  # a column: the mean over the last half of the epochs, of which results have both quarters
SWEEPS = ("workers", "units", "epochs")
AT_ONCE = 5  # seeds
LONGER = 2  # times the epochs, at the same rate: at the noise floor this changes nothing
SETTLED = 1.5  # at the noise floor, the gaps of the last two quarters differ by less than this factor
# Limits of the exponents: the P.L. rates are −1 (random) and −2 (balanced; in epochs both), with room for finite ranges
RANDOM, BALANCED, TIGHT = {"least": -1.4, "most": -0.7}, {"most": -1.8}, {"least": -2.2, "most": -1.8}
NON_CONVEX_RATE = 2 / 3
# Exponents on least squares from an independent reference computation with the same settings
REFERENCE = {
    "workers": {BASELINE: -0.97, UNCOORDINATED: -1.07, MEAN: -0.58, OURS: -2.6},
    "units": {BASELINE: -0.96, UNCOORDINATED: -2.8, OURS: -2.9},
}
AGREES = 0.1  # how much an exponent may differ from the reference


def parts(settings: DictConfig) -> Iterator[Part]:
    """One part for every problem, setting, sorter and some seeds, which are computed at once."""
    for first, (problem, options) in product(range(0, settings.seeds, AT_ONCE), settings.problems.items()):
        for case in _cases(settings, problem, options):
            seeds = range(first, min(first + AT_ONCE, settings.seeds))
            yield Part(case | {"first_seed": first, "last_seed": seeds[-1]}, partial(_run, settings, case, seeds))


def final_gaps(
    problem: Problem, seeds: range, sorter: str, workers: int, units: int, epochs: int, rate: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean gaps of the third and of the last quarter of the epochs, [seeds] each, of plain SGD from zero.

    Every seed has a sorter of its own. A single worker with all units visits as many per step as there are workers
    otherwise.
    """
    replicas, _, dim = problem.features.shape
    alone = sorter in ONE_WORKER
    shape = {"workers": 1, "units": workers * units} if alone else {"workers": workers, "units": units}
    options = {"background": False} if SORTERS[sorter].needs_gradients else {}  # so little work is not worth a thread
    sorters = [make_sorter(sorter, dim=dim, seed=seed, **shape, **options) for seed in seeds]
    first_row, positions = units * torch.arange(workers)[:, None], torch.arange(shape["units"])
    smallest = 0.0 if problem.kind == NON_CONVEX else problem.minimum
    weights, gaps = torch.zeros(replicas, dim, dtype=torch.float64), []
    for epoch in range(epochs):
        order = torch.stack([one.order(epoch) for one in sorters])
        visits = order.view(replicas, units, workers) if alone else (order + first_row).transpose(1, 2)
        gradients = sgd_epoch(problem, weights, visits, rate)
        by_worker = gradients.view(replicas, shape["units"], shape["workers"], dim).transpose(1, 2)
        for one, seen in zip(sorters, by_worker, strict=True):
            one.observe(positions, seen)
        if 2 * (epoch + 1) > epochs:
            value = problem.gradient(weights).square().sum(1) if problem.kind == NON_CONVEX else problem.loss(weights)
            gaps.append(value - smallest)
    third, last = torch.stack(gaps).tensor_split(2)
    return third.mean(0), last.mean(0)


def _cases(settings: DictConfig, problem: str, options: DictConfig) -> list[dict]:
    usual = {**settings.fixed, "epochs": settings.epochs, "noise": options.noise, "rate": options.rate}
    swept = [("workers", {"workers": value}) for value in settings.workers]
    swept += [("units", {"units": value}) for value in settings.units]
    swept += [  # the same total length, in smaller steps
        ("epochs", {"epochs": value, "rate": options.rate * settings.epochs / value}) for value in settings.lengths
    ]
    named = [(name, sorter, change) for name, change in swept for sorter in settings.sorters]
    if problem == NON_CONVEX:  # is it limited by noise, at every worker count that slopes are fitted to?
        checks = [("noise", {"noise": value}) for value in settings.noises]
        checks += [("longer", {"epochs": times * settings.epochs}) for times in (1, LONGER)]
        counts = [{"workers": count} for count in settings.workers if count >= settings.fixed.workers]
        both = (BASELINE, OURS)
        named += [(name, sorter, change | count) for name, change in checks for count in counts for sorter in both]
    return [{"problem": problem, "sweep": name, "sorter": sorter} | usual | change for name, sorter, change in named]


def _run(settings: DictConfig, case: dict, seeds: range) -> dict[str, list]:
    workers, units = case["workers"], case["units"]
    ridge = settings.problems[case["problem"]].ridge
    problem = make_problem(case["problem"], seeds, workers * units, settings.dim, case["noise"], ridge)
    before, gaps = final_gaps(problem, seeds, case["sorter"], workers, units, case["epochs"], case["rate"] / units)
    return {"seed": list(seeds), "gap": significant(gaps), "gap_before": significant(before)}


# -- what it says -----------------------------------------------------------------------------------------------------


def verdicts(table: DataFrame, settings: DictConfig) -> Iterator[Verdict]:
    for problem in settings.problems:
        yield from (_non_convex if problem == NON_CONVEX else _convex)(Gaps(table, settings, problem))


class Gaps:
    """The results of one problem, and the slopes fitted to them."""

    def __init__(self, table: DataFrame, settings: DictConfig, problem: str) -> None:
        rows = select(table, problem=problem)
        self.table = rows.assign(**{END: (rows["gap_before"] + rows["gap"]) / 2})
        self.settings, self.name = settings, NAMES[problem]
        self.gap = GAPS[problem == NON_CONVEX]

    def fitted(self, x: str, sorter: str) -> DataFrame:
        """The rows that a slope is fitted to, without small counts: they are not asymptotic."""
        rows = select(self.sweep(x), sorter=sorter)
        return rows[rows[x] >= self._from(x)]

    def curve(self, x: str, sorter: str) -> DataFrame:
        """Geometric mean over seeds ± a standard deviation; `fitted`: whether the slope is fitted to it."""
        logarithms = np.log(select(self.sweep(x), sorter=sorter).set_index(x)[END]).groupby(level=0)
        mean, spread = logarithms.mean(), logarithms.std().fillna(0.0)
        curve = np.exp(mean).to_frame("mean").assign(low=np.exp(mean - spread), high=np.exp(mean + spread))
        return curve.assign(fitted=mean.index >= self._from(x))

    def sweep(self, name: str) -> DataFrame:
        """The rows of one sweep, of all sorters."""
        return select(self.table, sweep=name)

    def window(self, x: str, sorter: str) -> str:
        """Which values of x a slope is fitted to; those of the noise are all there are."""
        values = self.fitted(x, sorter)[x]
        return f"fitted to {values.min():g} … {values.max():g} {x}" if x in SWEEPS else ""

    def exponents(self, x: str, sorter: str) -> Series:
        """One per seed."""
        return power_exponents(self.fitted(x, sorter), x, END)

    def unsettled(self, x: str, *sorters: str) -> str:
        """Why a slope says nothing about orders: points that have not reached their noise floor."""
        import pandas as pd

        rows = pd.concat([self.fitted(x, sorter) for sorter in sorters])
        drift = np.log(rows["gap_before"] / rows["gap"]).groupby([rows["sorter"], rows[x]]).mean().abs()
        moving = drift[drift > math.log(SETTLED)]
        return f"not at the noise floor at {moving.index[0][1]:g} {x}" if len(moving) else ""

    def slope(self, x: str, sorter: str, words: str = "", unless: str = "", note: str = "", **limits: float) -> Verdict:
        words = words or f"exponent of {label(sorter)}'s {self.gap} in {x}"
        unless = unless or self.unsettled(x, sorter)
        note = "; ".join(filter(None, (note, self.window(x, sorter))))
        return judge(f"{self.name}: {words}", self.exponents(x, sorter), note, unless, **limits)

    def steeper(self, x: str, sorter: str, other: str, unless: str = "") -> Verdict:
        words = f"{self.name}: {label(sorter)} falls faster in {x} than {label(other)}"
        difference = self.exponents(x, sorter) - self.exponents(x, other)
        note = f"difference of the exponents, paired over seeds; {self.window(x, sorter)}"
        return judge(words, difference, note, unless or self.unsettled(x, sorter, other), most=0.0)

    def _from(self, x: str) -> float:
        return self.settings.fixed.get(x, 0)


@text.table
def exponent_table(table: DataFrame, settings: DictConfig) -> Iterator[dict[str, str]]:
    """All exponents with their intervals; those that say nothing about orders in brackets."""
    for problem in settings.problems:
        gaps = Gaps(table, settings, problem)
        for sorter in settings.sorters:
            row = {"problem": gaps.name, "sorter": label(sorter)}
            for x in SWEEPS:
                value = str(estimate(gaps.exponents(x, sorter)))
                row[f"in {x}"] = f"({value})" if gaps.unsettled(x, sorter) else value
                if x in REFERENCE:
                    known = REFERENCE[x].get(sorter, "") if problem == "least_squares" else ""
                    row[f"reference in {x}"] = text.minus(known)
            yield row


def _convex(gaps: Gaps) -> Iterator[Verdict]:
    """What the P.L. rates predict: only coordination improves the slope in workers."""

    def no_faster(sorter: str, note: str = "") -> Verdict:
        words = f"{label(sorter)}'s gap falls like epochs^−2 and no faster"
        return gaps.slope("epochs", sorter, words, note=note, **TIGHT)

    for sorter, limits in ((OURS, BALANCED), (BASELINE, RANDOM), (UNCOORDINATED, RANDOM)):
        yield gaps.slope("workers", sorter, **limits)
    yield gaps.slope("workers", MEAN, least=RANDOM["least"])
    if gaps.name == NAMES["least_squares"]:
        yield _as_the_reference(gaps)
    yield gaps.steeper("workers", OURS, UNCOORDINATED)
    for sorter, limits in ((OURS, BALANCED), (BASELINE, RANDOM), (UNCOORDINATED, BALANCED), (MEAN, BALANCED)):
        yield gaps.slope("units", sorter, **limits)
    yield from (gaps.slope("epochs", sorter, note="an upper bound", **BALANCED) for sorter in (OURS, BASELINE))
    yield no_faster(BASELINE, "errors of ever new orders average out over epochs")
    yield no_faster(KEPT, "the same error in every epoch")


def _non_convex(gaps: Gaps) -> Iterator[Verdict]:
    """First whether it is limited by noise, then the rates: upper bounds, which may be beaten.

    D-RR's rate needs this to be shown for D-RR; CD-GraB's, and comparisons with it, for both.
    """
    checks = {sorter: [_follows_noise(gaps, sorter), _has_arrived(gaps, sorter)] for sorter in (BASELINE, OURS)}
    open_for = [sorter for sorter, lines in checks.items() if any(line.answer != HOLDS for line in lines)]
    unless = f"{label(open_for[0])} is not shown to be noise-limited" if open_for else ""
    upper = {"unless": unless, "note": "an upper bound"}
    baseline = upper | {"unless": unless if BASELINE in open_for else ""}
    yield from (*checks[BASELINE], *checks[OURS])
    yield from (gaps.slope(x, OURS, most=-NON_CONVEX_RATE, **upper) for x in SWEEPS)
    words = f"{label(OURS)}'s {gaps.gap} falls like workers^−2/3 and no faster"
    convex = "an upper bound: close to a minimum this loss is convex, where the P.L. rates apply"
    around = {"least": -NON_CONVEX_RATE - 0.2, "most": -NON_CONVEX_RATE + 0.2}
    yield gaps.slope("workers", OURS, words, unless, convex, **around)
    yield gaps.slope("workers", BASELINE, most=-NON_CONVEX_RATE / 2, **baseline)
    yield gaps.steeper("workers", OURS, UNCOORDINATED, unless)


def _as_the_reference(gaps: Gaps) -> Verdict:
    """The one exponent in workers whose interval does not contain the reference."""
    expected = REFERENCE["workers"][MEAN]
    words = f"exponent of {label(MEAN)}'s {gaps.gap} in workers is that of an independent reference computation"
    limits = {"least": expected - AGREES, "most": expected + AGREES}
    return gaps.slope("workers", MEAN, words, note=text.minus(f"{expected:g} there"), **limits)


def _follows_noise(gaps: Gaps, sorter: str) -> Verdict:
    words = f"exponent of {label(sorter)}'s {gaps.gap} in the label noise"
    note = "noise-limited: gradients at the minimum are proportional to the noise"
    return gaps.slope("noise", sorter, words, note=note, least=1.8, most=2.2)


def _has_arrived(gaps: Gaps, sorter: str) -> Verdict:
    rows = select(gaps.sweep("longer"), sorter=sorter).set_index(["seed", "workers", "epochs"])
    logarithms = np.log(rows[END]).unstack("epochs")
    factors = np.exp((logarithms.iloc[:, -1] - logarithms.iloc[:, 0]).groupby("seed").mean())
    words = f"{gaps.name}: {label(sorter)}'s {gaps.gap} after {LONGER} times the epochs, as a factor"
    return judge(words, factors, "noise-limited: going on is no use", least=0.8, most=1.25)
