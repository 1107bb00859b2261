"""Workers whose labels differ: losses, test metrics and herding bounds against the skew.

What to expect: all workers visit equally many units, so the differences between their means cancel in every step, and
ordering can only exploit differences within a worker. With skewed labels there is less of them.

Each worker's mix of classes is drawn from a Dirichlet distribution with parameter alpha (Hsu, Qi, Brown 2019, arXiv
1909.06335). Since all workers get equally many units and every unit is used, the actual skew is smaller; it is measured
on the partitions themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np
from omegaconf import DictConfig

from experiments.report import plots, text
from experiments.report.kinds import DataFrame, Figure, Series
from experiments.report.names import BASELINE, BOUND, LOSS, OURS, UNCOORDINATED, sorter_label, sorter_line, task_name
from experiments.report.statistics import SAME_LOSS, estimate
from experiments.store.records import significant
from experiments.studies.base import Study
from experiments.studies.parts import Part, trained
from experiments.studies.training import overrides, partition, test_metric
from experiments.studies.verdicts import Verdict, by_seed, difference, ends_lower, judge, keeps, select
from experiments.tasks.partition import class_shares

PARTITION = ""  # in place of a sorter: nothing is trained
DISTANCE, LARGEST = "distance", "largest_share"  # between a worker's mix of classes and that of all data; in a mix
SAME_BOUND = 0.1  # a ratio of herding bounds that is nearer to 1 does not matter
COLUMNS = ("train loss", "train loss against D-RR (%)", "test accuracy (%)", "parallel herding bound")


def parts(settings: DictConfig) -> list[Part]:
    """The skew of every partition, and one training run for each sorter; the herding bound is that of the last
    order."""
    axes = product(settings.tasks, range(settings.seeds), settings.alphas, (PARTITION, *settings.sorters))
    cases = [{"task": task, "alpha": alpha, "sorter": sorter, "seed": seed} for task, seed, alpha, sorter in axes]
    return [_run(settings, case) if case["sorter"] else Part(case, partial(_skew, settings, case)) for case in cases]


def _run(settings: DictConfig, case: dict) -> Part:
    return trained(case, _overrides(settings, case, case["sorter"]), case["seed"])


def _skew(settings: DictConfig, case: dict) -> dict[str, list]:
    """The total variation distance, and the share of a worker's largest class; both are means over workers."""
    owned, labels = partition(_overrides(settings, case, BASELINE), case["seed"])
    shares, overall = class_shares(owned, labels)
    distance = np.abs(shares - overall).sum(1) / 2
    return {DISTANCE: significant([distance.mean()]), LARGEST: significant([shares.max(1).mean()])}


def _overrides(settings: DictConfig, case: dict, sorter: str) -> list[str]:
    last = settings.tasks[case["task"]].epochs
    changes = {"partition": "dirichlet", "alpha": case["alpha"], "herding_every": last}
    return overrides(settings, case["task"], sorter, **changes)


# -- what it says -----------------------------------------------------------------------------------------------------


def verdicts(table: DataFrame, settings: DictConfig) -> Iterator[Verdict]:
    for task in settings.tasks:
        even, skewed = (select(table, task=task, alpha=alpha) for alpha in ends(settings))
        name, words = task_name(task), [f"{task_name(task)}, alpha {alpha:g}" for alpha in ends(settings)]
        yield ends_lower(even, words[0], OURS)
        yield ends_lower(skewed, words[1], OURS)
        if UNCOORDINATED in settings.sorters:
            yield ends_lower(skewed, words[1], OURS, UNCOORDINATED)
        yield from (_shrinks(table, settings, task, other) for other in settings.sorters if other != OURS)
        yield _keeps(name, even, skewed, settings)
        yield _bound(name, even, skewed, BASELINE, "skew lowers D-RR's herding bound", most=1.0, margin=SAME_BOUND)
        yield _bound(name, even, skewed, OURS, "skew does not raise CD-GraB's herding bound", most=1.0 + SAME_BOUND)
        yield _test(words[1], task, skewed)


def ends(settings: DictConfig) -> tuple[float, float]:
    """The most even and the most skewed."""
    return max(settings.alphas), min(settings.alphas)


def lead_slopes(table: DataFrame, settings: DictConfig, task: str, other: str) -> Series:
    """Slopes of CD-GraB's lead in % of D-RR's loss, in points per tenfold alpha: one straight line per seed."""
    import pandas as pd

    leads = [-difference(select(table, task=task, alpha=alpha), OURS, other) for alpha in settings.alphas]
    slopes = np.polyfit(np.log10(list(settings.alphas)), np.stack(leads), 1)[0]
    return pd.Series(slopes, leads[0].index)


def _keeps(name: str, even: DataFrame, skewed: DataFrame, settings: DictConfig) -> Verdict:
    most, least = ends(settings)
    before, after = (-difference(rows, OURS) for rows in (even, skewed))
    words = f"{name}: at alpha {least:g} CD-GraB keeps four fifths of its advantage at alpha {most:g}"
    return keeps(words, after, before, f"there is no sure advantage at alpha {most:g}")


def _shrinks(table: DataFrame, settings: DictConfig, task: str, other: str) -> Verdict:
    """Over all alphas, not only the ends; the same if the line changes by less than a loss that matters."""
    words = f"{task_name(task)}: CD-GraB's lead over {sorter_label(other)} shrinks as the skew grows"
    leads = {a: -difference(select(table, task=task, alpha=a), OURS, other).mean() for a in ends(settings)}
    (most, even), (least, skewed) = leads.items()
    note = f"slope in points per tenfold alpha; {even:.3g} % of D-RR's train loss at alpha {most:g}"
    note += f", {skewed:.3g} % at {least:g}"
    margin = SAME_LOSS / float(np.log10(most / least))
    return judge(words, lead_slopes(table, settings, task, other), note, least=0.0, margin=margin)


def _bound(name: str, even: DataFrame, skewed: DataFrame, sorter: str, words: str, **limits: float) -> Verdict:
    ratio = by_seed(skewed, sorter, BOUND) / by_seed(even, sorter, BOUND)
    return judge(f"{name}: {words}", ratio, "ratio, most skewed against most even", **limits)


def _test(words: str, task: str, skewed: DataFrame) -> Verdict:
    """Accuracies, in points."""
    ours, baseline = (by_seed(skewed, sorter, test_metric(task)) for sorter in (OURS, BASELINE))
    words = f"{words}: CD-GraB's test accuracy is at most half a point below D-RR's"
    return judge(words, ours - baseline, "difference in points", least=-0.5)


# -- figure and table -------------------------------------------------------------------------------------------------


@plots.styled
def against_alpha(study: Study) -> Figure:
    """Loss, advantage, test metric and herding bound against alpha, one row per task; skew grows to the right."""
    tasks, alphas = list(study.settings.tasks), list(study.settings.alphas)
    figure, axes = plots.panels(len(tasks), len(COLUMNS), 12.4, 2.7 * len(tasks) + 1.0, COLUMNS, sharex=True)
    for row, task in zip(axes, tasks, strict=True):
        by_alpha = {alpha: select(study.table, task=task, alpha=alpha) for alpha in alphas}
        for sorter in study.settings.sorters:
            style = sorter_line(sorter)
            for panel, metric in zip((row[0], row[2], row[3]), (LOSS, test_metric(task), BOUND), strict=True):
                values = {alpha: by_seed(rows, sorter, metric) for alpha, rows in by_alpha.items()}
                plots.estimates(panel, values, **style)
            if sorter != BASELINE:
                plots.estimates(row[1], {alpha: difference(rows, sorter) for alpha, rows in by_alpha.items()}, **style)
        row[1].axhline(0, **plots.GREY)
        plots.log_ticks(row[3].yaxis)
        row[0].set_ylabel(task_name(task))
    for panel in axes[-1]:
        plots.log_x(panel, alphas, "alpha (more skew →)", labelrotation=60)
        panel.set_xlim(max(alphas) * 1.6, min(alphas) / 1.6)
    note = "mean over seeds with 95 % interval; differences paired over seeds"
    return plots.finish(figure, "Workers whose labels differ", f"{note} · {study.caption()}")


@text.table
def alpha_table(table: DataFrame, settings: DictConfig) -> Iterator[dict[str, str]]:
    """The actual skew; losses, test metrics and bounds of every sorter, and the difference from D-RR."""
    for task, alpha in product(settings.tasks, settings.alphas):
        some = select(table, task=task, alpha=alpha)
        distance, largest = (by_seed(some, PARTITION, measure).mean() for measure in (DISTANCE, LARGEST))
        skew = {"distance of mixes": f"{distance:.2f}", "largest class": f"{largest:.2f}"}
        for sorter in settings.sorters:
            row = {"task": task_name(task), "alpha": f"{alpha:g}", **skew, "sorter": sorter_label(sorter)}
            row["train loss"] = text.mean_std(by_seed(some, sorter), 5)
            row["against D-RR (%)"] = "" if sorter == BASELINE else str(estimate(difference(some, sorter)))
            row["test metric"] = text.mean_std(by_seed(some, sorter, test_metric(task)), 2)
            yield row | {"herding bound": str(estimate(by_seed(some, sorter, BOUND)))}
