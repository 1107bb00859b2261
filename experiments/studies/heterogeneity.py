"""Workers whose labels differ: losses, test metrics and herding bounds against the skew.

What to expect: all workers visit as many units, so that the differences between their means cancel in every step, and
only how units differ within a worker is left to order. Skewed labels leave less of that.

Alpha is what is asked for. All workers get as many units and every unit is dealt out, so that the skew that comes out
is smaller; it is measured on the partitions themselves.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd
from omegaconf import DictConfig

from experiments.report.tables import markdown
from experiments.studies.base import Part, significant
from experiments.studies.paired import BASELINE, LOSS, OURS, UNCOORDINATED, by_seed, difference, ends_lower, keeps
from experiments.studies.style import label
from experiments.studies.training import TASK_NAMES, TEST_METRICS, outcome, overrides, partition, train
from experiments.studies.verdicts import Claim, Verdict, estimate, judge
from experiments.tasks.partition import class_shares

BOUND = "herding_per_step"
PARTITION = ""  # in place of a sorter: nothing is trained
DISTANCE, LARGEST = "distance", "largest_share"  # of workers' mixes of classes from that of all; of a class in them


def parts(settings: DictConfig) -> list[Part]:
    """One training run each, after a look at its workers' classes; the herding bound is that of the last order."""
    cases = [
        {"task": task, "alpha": alpha, "sorter": sorter, "seed": seed}
        for task in settings.tasks
        for seed in range(settings.seeds)
        for alpha in settings.alphas
        for sorter in (PARTITION, *settings.sorters)
    ]
    return [Part(case, partial(_run if case["sorter"] else _skew, settings, case)) for case in cases]


def verdicts(table: pd.DataFrame, settings: DictConfig) -> list[Verdict]:
    lines = []
    for task in settings.tasks:
        even, skewed = (of_task(table, task, alpha) for alpha in ends(settings))
        name, words = TASK_NAMES[task], [f"{TASK_NAMES[task]}, alpha {alpha:g}" for alpha in ends(settings)]
        lines += [ends_lower(even, words[0], OURS), ends_lower(skewed, words[1], OURS)]
        if UNCOORDINATED in settings.sorters:
            lines.append(ends_lower(skewed, words[1], OURS, UNCOORDINATED))
        others = [sorter for sorter in settings.sorters if sorter != OURS]
        lines += [_shrinks(table, settings, task, other) for other in others]
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


def lead_slopes(table: pd.DataFrame, settings: DictConfig, task: str, other: str) -> pd.Series:
    """Of CD-GraB's lead in % of D-RR's loss, in points per tenfold alpha: one straight line per seed."""
    leads = [-difference(of_task(table, task, alpha), OURS, other) for alpha in settings.alphas]
    slopes = np.polyfit(np.log10(list(settings.alphas)), np.stack(leads), 1)[0]
    return pd.Series(slopes, leads[0].index)


def skew(table: pd.DataFrame, task: str, alpha: float, measure: str) -> pd.Series:
    """DISTANCE or LARGEST of the workers' classes, as they came out, per seed."""
    return by_seed(of_task(table, task, alpha), PARTITION, measure)


def alpha_table(table: pd.DataFrame, settings: DictConfig) -> str:
    """The skew that came out; losses, test metrics and bounds of every sorter, and the difference from D-RR."""
    rows = []
    for task in settings.tasks:
        for alpha in settings.alphas:
            some = of_task(table, task, alpha)
            distance, largest = (skew(table, task, alpha, measure).mean() for measure in (DISTANCE, LARGEST))
            for sorter in settings.sorters:
                loss, test, bound = (by_seed(some, sorter, metric) for metric in (LOSS, TEST_METRICS[task], BOUND))
                rows.append(
                    {
                        "task": TASK_NAMES[task],
                        "alpha": f"{alpha:g}",
                        "distance of mixes": f"{distance:.2f}",
                        "largest class": f"{largest:.2f}",
                        "sorter": label(sorter),
                        "train loss": f"{loss.mean():.5f} ± {loss.std():.5f}",
                        "against D-RR (%)": "" if sorter == BASELINE else str(estimate(difference(some, sorter))),
                        "test metric": f"{test.mean():.2f} ± {test.std():.2f}",
                        "herding bound": str(estimate(bound)),
                    }
                )
    return markdown(rows)


def _keeps(name: str, even: pd.DataFrame, skewed: pd.DataFrame, settings: DictConfig) -> Verdict:
    most, least = ends(settings)
    before, after = (-difference(rows, OURS) for rows in (even, skewed))
    words = f"{name}: at alpha {least:g} CD-GraB keeps four fifths of its advantage at alpha {most:g}"
    return keeps(words, after, before, f"there is no sure advantage at alpha {most:g}")


def _shrinks(table: pd.DataFrame, settings: DictConfig, task: str, other: str) -> Verdict:
    """Over all alphas, not only the ends."""
    words = f"{TASK_NAMES[task]}: CD-GraB's lead over {label(other)} shrinks as the skew grows"
    even, skewed = (-difference(of_task(table, task, alpha), OURS, other).mean() for alpha in ends(settings))
    note = f"slope in points per tenfold alpha; {even:.3g} % of D-RR's train loss at alpha {ends(settings)[0]:g}"
    note += f", {skewed:.3g} % at {ends(settings)[1]:g}"
    return judge(Claim(words, least=0.0), estimate(lead_slopes(table, settings, task, other)), note)


def _bound(name: str, even: pd.DataFrame, skewed: pd.DataFrame, sorter: str, most: float, words: str) -> Verdict:
    ratio = by_seed(skewed, sorter, BOUND) / by_seed(even, sorter, BOUND)
    return judge(Claim(f"{name}: {words}", most=most), estimate(ratio), "ratio, most skewed against most even")


def _test(words: str, task: str, skewed: pd.DataFrame) -> Verdict:
    """Accuracies, in points."""
    gain = by_seed(skewed, OURS, TEST_METRICS[task]) - by_seed(skewed, BASELINE, TEST_METRICS[task])
    claim = Claim(f"{words}: CD-GraB's test accuracy is at most half a point below D-RR's", least=-0.5)
    return judge(claim, estimate(gain), "difference in points")


def _run(settings: DictConfig, case: dict) -> dict[str, list]:
    return outcome(train(_overrides(settings, case, case["sorter"]), case["seed"]))


def _skew(settings: DictConfig, case: dict) -> dict[str, list]:
    """The distance is that of total variation, a mean over workers; so is the share of a worker's largest class."""
    owned, labels = partition(_overrides(settings, case, BASELINE), case["seed"])
    shares, overall = class_shares(owned, labels)
    distance = np.abs(shares - overall).sum(1) / 2
    return {DISTANCE: significant([distance.mean()]), LARGEST: significant([shares.max(1).mean()])}


def _overrides(settings: DictConfig, case: dict, sorter: str) -> list[str]:
    last = settings.tasks[case["task"]].epochs
    changes = {"partition": "dirichlet", "alpha": case["alpha"], "herding_every": last}
    return overrides(settings, case["task"], sorter, **changes)
