"""Workers whose labels differ: losses, test metrics and herding bounds against the skew.

What to expect: all workers visit as many units, so that the differences between their means cancel in every step, and
only how units differ within a worker is left to order. Skewed labels leave less of that.
"""

from __future__ import annotations

from functools import partial

import pandas as pd
from omegaconf import DictConfig

from ..report import markdown
from .base import Part
from .looks import label
from .paired import BASELINE, KEPT_ADVANTAGE, LOSS, OURS, UNCOORDINATED, by_seed, difference, ends_lower, positive
from .training import TASK_NAMES, TEST_METRICS, outcome, overrides, train
from .verdicts import Claim, Verdict, estimate, judge

BOUND = "herding_per_step"


def parts(settings: DictConfig) -> list[Part]:
    """One training run each; the herding bound is that of the order after the last epoch."""
    cases = [
        {"task": task, "alpha": alpha, "sorter": sorter, "seed": seed}
        for task in settings.tasks
        for seed in range(settings.seeds)
        for alpha in settings.alphas
        for sorter in settings.sorters
    ]
    return [Part(case, partial(_run, settings, case)) for case in cases]


def verdicts(table: pd.DataFrame, settings: DictConfig) -> list[Verdict]:
    lines = []
    for task in settings.tasks:
        even, skewed = (of_task(table, task, alpha) for alpha in ends(settings))
        name, words = TASK_NAMES[task], [f"{TASK_NAMES[task]}, alpha {alpha:g}" for alpha in ends(settings)]
        lines += [ends_lower(even, words[0], OURS), ends_lower(skewed, words[1], OURS)]
        if UNCOORDINATED in settings.sorters:
            lines.append(ends_lower(skewed, words[1], OURS, UNCOORDINATED))
        lines += [
            _keeps(name, even, skewed, settings),
            _bound(name, even, skewed, BASELINE, 1.0, "skew lowers D-RR's herding bound"),
            _bound(name, even, skewed, OURS, 1.1, "skew does not raise CD-GraB's herding bound"),
            _test(words[1], task, skewed),
        ]
    return lines


def ends(settings: DictConfig) -> tuple[float, float]:
    """The most even and the most skewed."""
    return max(settings.alphas), min(settings.alphas)


def of_task(table: pd.DataFrame, task: str, alpha: float) -> pd.DataFrame:
    return table[(table["task"] == task) & (table["alpha"] == alpha)]


def alpha_table(table: pd.DataFrame, settings: DictConfig) -> str:
    """Losses, test metrics and bounds of every sorter, and the difference from D-RR."""
    rows = []
    for task in settings.tasks:
        for alpha in settings.alphas:
            some = of_task(table, task, alpha)
            for sorter in settings.sorters:
                loss, test, bound = (by_seed(some, sorter, metric) for metric in (LOSS, TEST_METRICS[task], BOUND))
                rows.append(
                    {
                        "task": TASK_NAMES[task],
                        "alpha": f"{alpha:g}",
                        "sorter": label(sorter),
                        "train loss": f"{loss.mean():.5f} ± {loss.std():.5f}",
                        "against D-RR (%)": "" if sorter == BASELINE else str(estimate(difference(some, sorter))),
                        "test metric": f"{test.mean():.2f} ± {test.std():.2f}",
                        "herding bound": str(estimate(bound)),
                    }
                )
    return markdown(rows)


def _keeps(name: str, even: pd.DataFrame, skewed: pd.DataFrame, settings: DictConfig) -> Verdict:
    """In units of the mean advantage without skew, which has to be more than chance to be divided by."""
    most, least = ends(settings)
    before, after = (-difference(rows, OURS) for rows in (even, skewed))
    words = f"{name}: at alpha {least:g} CD-GraB keeps four fifths of its advantage at alpha {most:g}"
    unless = "" if positive(estimate(before)) else f"there is no sure advantage at alpha {most:g}"
    note = "share of the advantage over D-RR, in train loss"
    return judge(Claim(words, least=KEPT_ADVANTAGE), estimate(after / before.mean()), note, unless)


def _bound(name: str, even: pd.DataFrame, skewed: pd.DataFrame, sorter: str, most: float, words: str) -> Verdict:
    ratio = by_seed(skewed, sorter, BOUND) / by_seed(even, sorter, BOUND)
    return judge(Claim(f"{name}: {words}", most=most), estimate(ratio), "ratio, most skewed against most even")


def _test(words: str, task: str, skewed: pd.DataFrame) -> Verdict:
    """Accuracies, in points."""
    gain = by_seed(skewed, OURS, TEST_METRICS[task]) - by_seed(skewed, BASELINE, TEST_METRICS[task])
    claim = Claim(f"{words}: CD-GraB's test accuracy is at most half a point below D-RR's", least=-0.5)
    return judge(claim, estimate(gain), "difference in points")


def _run(settings: DictConfig, case: dict) -> dict[str, list]:
    last = settings.tasks[case["task"]].epochs
    changes = {"partition": "dirichlet", "alpha": case["alpha"], "herding_every": last}
    return outcome(train(overrides(settings, case["task"], case["sorter"], **changes), case["seed"]))
