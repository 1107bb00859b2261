"""Learning rates × sorters, for SGD and AdamW, and the largest stable rate of every sorter: Figure 12 of the CD-GraB
paper in small."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
from omegaconf import DictConfig

from experiments.report import plots, text
from experiments.report.kinds import Axes, DataFrame, Figure, Series
from experiments.report.names import BASELINE, LOSS, OURS, sorter_label, sorter_style, task_name
from experiments.report.statistics import SAME_LOSS
from experiments.studies.base import Study
from experiments.studies.parts import Part, trained
from experiments.studies.training import overrides
from experiments.studies.verdicts import IN_PER_CENT, Verdict, difference, judge, judge_every, select

OPTIMISER_NAMES = {"sgd": "SGD with momentum", "adamw": "AdamW"}
LEARNED = 0.95  # a stable run ends below this share of its first loss; knowing class frequencies alone gains less
APART = 1.13  # a factor between marks that would otherwise overlap


def parts(settings: DictConfig) -> Iterator[Part]:
    """One training run each."""
    for task in settings.tasks:
        for optimiser, rates in settings.rates[task].items():
            for seed, rate, sorter in product(range(settings.seeds), rates, settings.sorters):
                case = {"task": task, "optimiser": optimiser, "rate": rate, "sorter": sorter, "seed": seed}
                yield trained(case, overrides(settings, task, sorter, optimiser=optimiser, lr=rate), seed)


class RateSweep:
    """The runs of one task with one optimiser."""

    def __init__(self, table: DataFrame, settings: DictConfig, task: str, optimiser: str) -> None:
        self.name = f"{task_name(task)}, {OPTIMISER_NAMES.get(optimiser, optimiser)}"
        self.rows = select(table, task=task, optimiser=optimiser).copy()
        complete = self.rows["epochs_done"] == settings.tasks[task].epochs
        self.rows["sound"] = complete & (self.rows[LOSS] < LEARNED * self.rows["start_loss"])
        self.rates, self.sorters = sorted(self.rows["rate"].unique()), list(settings.sorters)

    def stable_rates(self, *sorters: str) -> list[float]:
        """The rates at which, and below which, every seed of these sorters is stable."""
        rows = self.rows[self.rows["sorter"].isin(sorters)]
        sound = rows.groupby("rate")["sound"].all().sort_index().cummin()
        return list(sound[sound].index)

    def largest_stable(self, sorter: str) -> Series:
        """The largest stable rate by seed; NaN if even the smallest is not stable."""
        rows = select(self.rows, sorter=sorter).sort_values("rate")
        sound = rows.groupby("seed")["sound"].cummin()
        return rows["rate"].where(sound).groupby(rows["seed"]).max()

    def step(self) -> float:
        """From D-RR's largest stable rate to the next one tried, in doublings; NaN if there is none."""
        stable = self.stable_rates(BASELINE)
        larger = [rate for rate in self.rates if stable and rate > stable[-1]]
        return float(np.log2(larger[0] / stable[-1])) if larger else np.nan

    def best_losses(self) -> DataFrame:
        """The loss of every sorter and seed at its own best rate."""
        return select(self.rows, sound=True).groupby(["sorter", "seed"], as_index=False)[LOSS].min()

    def differences(self, rate: float, sorter: str = OURS) -> Series:
        return difference(select(self.rows, rate=rate), sorter)


def rate_sweeps(table: DataFrame, settings: DictConfig) -> Iterator[RateSweep]:
    for task in settings.tasks:
        for optimiser in settings.rates[task]:
            yield RateSweep(table, settings, task, optimiser)


# -- what it says -----------------------------------------------------------------------------------------------------


def verdicts(table: DataFrame, settings: DictConfig) -> list[Verdict]:
    questions = (_larger_rates, _best_rates, _every_rate, _grows)
    return [ask(sweep) for sweep in rate_sweeps(table, settings) for ask in questions]


def _larger_rates(sweep: RateSweep) -> Verdict:
    words = f"{sweep.name}: CD-GraB's largest stable rate is no smaller than D-RR's"
    ratio = np.log2(sweep.largest_stable(OURS) / sweep.largest_stable(BASELINE))
    at_the_edge = all(len(sweep.stable_rates(sorter)) == len(sweep.rates) for sorter in (OURS, BASELINE))
    note = f"in doublings; the next rate that was tried is {sweep.step():.2g} above D-RR's"
    return judge(words, ratio, note, "all rates tried are stable" if at_the_edge else "", least=0.0)


def _best_rates(sweep: RateSweep) -> Verdict:
    words = f"{sweep.name}: each at its best rate, CD-GraB ends lower than D-RR"
    return judge(words, difference(sweep.best_losses(), OURS), IN_PER_CENT, most=0.0, margin=SAME_LOSS)


def _every_rate(sweep: RateSweep) -> Verdict:
    words = f"{sweep.name}: at no stable rate does CD-GraB end more than {SAME_LOSS:g} % higher"
    by_rate = {rate: sweep.differences(rate) for rate in sweep.stable_rates(OURS, BASELINE)}
    note = "in % of D-RR's train loss where it decides, rate {cell:g}"
    return judge_every(words, by_rate, note, "no rate is stable for both", most=SAME_LOSS)


def _grows(sweep: RateSweep) -> Verdict:
    words = f"{sweep.name}: CD-GraB's advantage is larger at the largest stable rate than at the smallest"
    stable = sweep.stable_rates(OURS, BASELINE)
    if len(stable) < 2:
        return judge(words, [], unless="fewer than two rates are stable for both", least=0.0)
    growth = sweep.differences(stable[0]) - sweep.differences(stable[-1])
    note = f"in % of D-RR's train loss, rate {stable[-1]:g} against {stable[0]:g}"
    return judge(words, growth, note, least=0.0, margin=SAME_LOSS)


# -- figure and table -------------------------------------------------------------------------------------------------


@plots.styled
def losses_by_rate(study: Study) -> Figure:
    """Final train loss against the rate (above), and how far below D-RR (below); one column per task and optimiser."""
    sweeps = list(rate_sweeps(study.table, study.settings))
    figure, axes = plots.panels(2, len(sweeps), 2.9 * len(sweeps) + 0.6, 5.6, sharex="col")
    for (above, below), sweep in zip(axes.T, sweeps, strict=True):
        for place, sorter in enumerate(sweep.sorters):
            _draw_losses(above, sweep, sorter, APART ** (place - (len(sweep.sorters) - 1) / 2))
            if sorter != BASELINE:
                stable = sweep.stable_rates(sorter, BASELINE)
                differences = {rate: sweep.differences(rate, sorter) for rate in stable}
                plots.estimates(below, differences, alpha=0.18, **sorter_style(sorter))
        _say_what_is_cut(above, sweep)
        start, lowest = sweep.rows["start_loss"].mean(), select(sweep.rows, sound=True)[LOSS].min()
        above.axhline(start, **plots.GREY, ls=":")
        above.set(title=sweep.name, ylim=(lowest - 0.06 * (start - lowest), start * 1.06))
        below.axhline(0, **plots.GREY)
        plots.log_x(below, sweep.rates, "learning rate", labelrotation=60)
    axes[0, 0].set_ylabel("train loss")
    axes[1, 0].set_ylabel("against D-RR (%)")
    note = "mean over seeds with 95 % interval (below); ×: not stable; dotted: loss before training"
    return plots.finish(figure, "Final train loss against the learning rate", f"{note} · {study.caption()}")


@text.table
def rate_table(table: DataFrame, settings: DictConfig) -> Iterator[dict[str, str]]:
    """Final train losses by rate, in brackets if a seed was not stable; and the largest stable rates."""
    for sweep in rate_sweeps(table, settings):
        for rate in sweep.rates:
            row = {"": sweep.name, "rate": f"{rate:g}"}
            for sorter in sweep.sorters:
                some = select(sweep.rows, rate=rate, sorter=sorter)
                loss = f"{some[LOSS].mean():.4g} ± {some[LOSS].std():.2g}"
                row[sorter_label(sorter)] = loss if some["sound"].all() else f"({loss})"
            yield row
        stable = {sorter_label(sorter): f"{sweep.largest_stable(sorter).min():g}" for sorter in sweep.sorters}
        yield {"": sweep.name, "rate": "largest stable"} | stable


def _draw_losses(panel: Axes, sweep: RateSweep, sorter: str, aside: float) -> None:
    """aside: the factor by which unstable rates are shifted, since all of them are drawn at the same height."""
    mean = select(sweep.rows, sorter=sorter).groupby("rate")[LOSS].mean().clip(upper=_highest(sweep))
    stable, style = sweep.stable_rates(sorter), sorter_style(sorter)
    panel.plot(mean[stable], label=sorter_label(sorter), **plots.DOTS | style)
    unstable = mean.drop(stable)
    panel.plot(unstable.index * aside, unstable, "x", ms=5, color=style["color"])


def _highest(sweep: RateSweep) -> float:
    """Higher (diverged) losses are drawn here: otherwise they would leave no room for the rest."""
    return sweep.rows["start_loss"].mean() * 1.03


def _say_what_is_cut(panel: Axes, sweep: RateSweep) -> None:
    means = sweep.rows.groupby(["sorter", "rate"])[LOSS].mean()
    if (means > _highest(sweep)).any():
        words = f"{(means > _highest(sweep)).sum()} means cut off,\nup to {means.max():.3g}"
        panel.text(0.03, 0.86, words, transform=panel.transAxes, va="top", **plots.SMALL)
