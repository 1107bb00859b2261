"""Learning rates × sorters, for SGD and AdamW (Figure 12 in small), and the largest stable rate of every sorter."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pandas as pd
from omegaconf import DictConfig

from experiments.report.tables import markdown
from experiments.studies.base import Part
from experiments.studies.paired import BASELINE, LOSS, OURS, difference
from experiments.studies.style import label
from experiments.studies.training import TASK_NAMES, outcome, overrides, train
from experiments.studies.verdicts import Claim, Verdict, estimate, judge, judge_every

OPTIMISER_NAMES = {"sgd": "SGD with momentum", "adamw": "AdamW"}
TOLERANCE = 0.5  # per cent of D-RR's loss
LEARNED = 0.95  # of the first loss that a run has to end below: class frequencies alone save less


def parts(settings: DictConfig) -> list[Part]:
    """One training run each."""
    cases = [
        {"task": task, "optimiser": optimiser, "rate": rate, "sorter": sorter, "seed": seed}
        for task in settings.tasks
        for optimiser, rates in settings.rates[task].items()
        for seed in range(settings.seeds)
        for rate in rates
        for sorter in settings.sorters
    ]
    return [Part(case, partial(_run, settings, case)) for case in cases]


class Measured:
    """The runs of one task with one optimiser."""

    def __init__(self, table: pd.DataFrame, settings: DictConfig, task: str, optimiser: str) -> None:
        self.name = f"{TASK_NAMES[task]}, {OPTIMISER_NAMES[optimiser]}"
        self.rows = table[(table["task"] == task) & (table["optimiser"] == optimiser)].copy()
        complete = self.rows["epochs_done"] == settings.tasks[task].epochs
        self.rows["sound"] = complete & (self.rows[LOSS] < LEARNED * self.rows["start_loss"])
        self.rates, self.sorters = sorted(self.rows["rate"].unique()), list(settings.sorters)

    def stable_rates(self, *sorters: str) -> list[float]:
        """Those at which, and below which, every seed of these sorters is sound."""
        rows = self.rows[self.rows["sorter"].isin(sorters)]
        sound = rows.groupby("rate")["sound"].all().sort_index().cummin()
        return list(sound[sound].index)

    def largest_stable(self, sorter: str) -> pd.Series:
        """By seed; NaN where even the smallest is not."""
        rows = self.rows[self.rows["sorter"] == sorter].sort_values("rate")
        sound = rows.groupby("seed")["sound"].cummin()
        return rows["rate"].where(sound).groupby(rows["seed"]).max()

    def step(self) -> float:
        """From D-RR's largest stable rate to the next one tried, in doublings; NaN where there is none."""
        stable = self.stable_rates(BASELINE)
        larger = [rate for rate in self.rates if stable and rate > stable[-1]]
        return float(np.log2(larger[0] / stable[-1])) if larger else np.nan

    def best_losses(self) -> pd.DataFrame:
        """Of every sorter and seed at its own best rate."""
        return self.rows[self.rows["sound"]].groupby(["sorter", "seed"], as_index=False)[LOSS].min()

    def differences(self, rate: float, sorter: str = OURS) -> pd.Series:
        return difference(self.rows[self.rows["rate"] == rate], sorter)


def every_measured(table: pd.DataFrame, settings: DictConfig) -> Iterator[Measured]:
    for task in settings.tasks:
        for optimiser in settings.rates[task]:
            yield Measured(table, settings, task, optimiser)


def verdicts(table: pd.DataFrame, settings: DictConfig) -> list[Verdict]:
    lines = []
    for measured in every_measured(table, settings):
        lines += [_larger_rates(measured), _best_rates(measured), _every_rate(measured), _grows(measured)]
    return lines


def rate_table(table: pd.DataFrame, settings: DictConfig) -> str:
    """Final train losses by rate; in brackets where a seed was not sound; and the largest stable rates."""
    rows = []
    for measured in every_measured(table, settings):
        for rate in measured.rates:
            row = {"": measured.name, "rate": f"{rate:g}"}
            for sorter in measured.sorters:
                some = measured.rows[(measured.rows["rate"] == rate) & (measured.rows["sorter"] == sorter)]
                loss = f"{some[LOSS].mean():.4g} ± {some[LOSS].std():.2g}"
                row[label(sorter)] = loss if some["sound"].all() else f"({loss})"
            rows.append(row)
        stable = {label(sorter): f"{measured.largest_stable(sorter).min():g}" for sorter in measured.sorters}
        rows.append({"": measured.name, "rate": "largest stable"} | stable)
    return markdown(rows)


def _larger_rates(measured: Measured) -> Verdict:
    claim = Claim(f"{measured.name}: CD-GraB's largest stable rate is no smaller than D-RR's", least=0.0)
    ratio = np.log2(measured.largest_stable(OURS) / measured.largest_stable(BASELINE))
    at_the_edge = all(len(measured.stable_rates(sorter)) == len(measured.rates) for sorter in (OURS, BASELINE))
    note = f"in doublings; the next rate that was tried is {measured.step():.2g} above D-RR's"
    return judge(claim, estimate(ratio), note, "all rates tried are stable" if at_the_edge else "")


def _best_rates(measured: Measured) -> Verdict:
    claim = Claim(f"{measured.name}: each at its best rate, CD-GraB ends lower than D-RR", most=0.0)
    return judge(claim, estimate(difference(measured.best_losses(), OURS)), "difference in % of D-RR's train loss")


def _every_rate(measured: Measured) -> Verdict:
    claim = Claim(f"{measured.name}: at no stable rate does CD-GraB end more than 0.5 % higher", most=TOLERANCE)
    stable = measured.stable_rates(OURS, BASELINE)
    if not stable:
        return judge(claim, estimate([]), unless="no rate is stable for both")
    by_rate = {rate: estimate(measured.differences(rate)) for rate in stable}
    return judge_every(claim, by_rate, "in % of D-RR's train loss where it decides, rate {cell:g}")


def _grows(measured: Measured) -> Verdict:
    claim = Claim(
        f"{measured.name}: CD-GraB's advantage is larger at the largest stable rate than at the smallest", 0.0
    )
    stable = measured.stable_rates(OURS, BASELINE)
    if len(stable) < 2:
        return judge(claim, estimate([]), unless="fewer than two rates are stable for both")
    growth = measured.differences(stable[0]) - measured.differences(stable[-1])
    note = f"in % of D-RR's train loss, rate {stable[-1]:g} against {stable[0]:g}"
    return judge(claim, estimate(growth), note)


def _run(settings: DictConfig, case: dict) -> dict[str, list]:
    changes = {"optimiser": case["optimiser"], "lr": case["rate"]}
    return outcome(train(overrides(settings, case["task"], case["sorter"], **changes), case["seed"]))
