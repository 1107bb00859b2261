"""All sorters on two tasks, paired over seeds. Any registered sorter can take part: it is listed in `study.sorters`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
from omegaconf import DictConfig

from cdgrab.checks import look_up
from cdgrab.errors import CdgrabError
from cdgrab.sorters import SORTERS
from experiments.report import names, plots, text
from experiments.report.kinds import Axes, DataFrame, Figure, Series
from experiments.report.names import ALONE, BASELINE, ONE_WORKER, OURS, UNCOORDINATED
from experiments.report.statistics import estimate, paired_p
from experiments.studies.base import Study
from experiments.studies.parts import Part, trained
from experiments.studies.training import overrides, test_metric
from experiments.studies.verdicts import (
    Verdict,
    by_seed,
    difference,
    ends_lower,
    keeps_the_advantage,
    select,
)


def parts(settings: DictConfig) -> Iterator[Part]:
    """One training run each."""
    if BASELINE not in settings.sorters:
        raise CdgrabError(f"study.sorters must name {BASELINE}, which all others are compared with")
    for sorter in settings.sorters:
        look_up("sorter", names.kind(sorter), SORTERS)
    for task, seed, sorter in product(settings.tasks, range(settings.seeds), settings.sorters):
        one_worker = {"workers": 1} if names.kind(sorter) in ONE_WORKER else {}
        case = {"task": task, "sorter": sorter, "seed": seed}
        yield trained(case, overrides(settings, task, sorter, **one_worker), seed)


def verdicts(table: DataFrame, settings: DictConfig) -> Iterator[Verdict]:
    for task in settings.tasks:
        rows, name = select(table, task=task), names.task_name(task)
        ours = OURS in settings.sorters
        if ours:
            yield ends_lower(rows, name, OURS)
        if ours and UNCOORDINATED in settings.sorters:
            yield ends_lower(rows, name, OURS, UNCOORDINATED)
        for sorter in (sorter for sorter in settings.sorters if sorter != BASELINE):
            if ours and sorter.startswith(f"{OURS},"):
                yield keeps_the_advantage(rows, name, sorter)
            elif sorter != OURS:
                yield ends_lower(rows, name, sorter)
        if ours and ALONE in settings.sorters:
            yield ends_lower(rows, name, OURS, ALONE)


@text.table
def sorter_table(table: DataFrame, settings: DictConfig) -> Iterator[dict[str, str]]:
    """Every sorter on every task: loss, test metric, difference from D-RR, p value; adjusted ones are the verdicts'."""
    for task in settings.tasks:
        some = select(table, task=task)
        for sorter in settings.sorters:
            row = {"task": names.task_name(task), "sorter": names.sorter_label(sorter)}
            row["train loss"] = text.mean_std(by_seed(some, sorter), 5)
            row["test metric"] = text.mean_std(by_seed(some, sorter, test_metric(task)), 2)
            row |= dict.fromkeys(("against D-RR (%)", "lower on", "p by itself"), "")
            if sorter != BASELINE:
                against = difference(some, sorter)
                row |= {"against D-RR (%)": str(estimate(against))}
                row |= {"lower on": f"{(against < 0).sum()} of {len(against)}"}
                row |= {"p by itself": f"{paired_p(list(against)):.2g}"}
            yield row


@plots.styled
def differences(study: Study) -> Figure:
    """How far every sorter ends from D-RR, one panel per task: left of the line is better."""
    sorters, tasks = [s for s in study.settings.sorters if s != BASELINE], list(study.settings.tasks)
    figure, axes = plots.panels(1, len(tasks), 4.3 * len(tasks) + 1.2, 0.27 * len(sorters) + 1.8, sharey=True)
    for panel, task in zip(axes[0], tasks, strict=True):
        for row, sorter in enumerate(sorters):
            _draw(
                panel, difference(select(study.table, task=task), sorter), row, names.sorter_colour(names.kind(sorter))
            )
        panel.axvline(0, **plots.GREY, zorder=0)
        panel.set(title=names.task_name(task), xlabel="train loss against D-RR (%)")
        panel.set_yticks(range(len(sorters)), [names.sorter_label(sorter) for sorter in sorters])
        panel.set_ylim(len(sorters) - 0.5, -0.5)
    note = "dots: seeds; bar: mean and 95 % interval, paired over seeds; lower is better"
    return plots.finish(figure, "Where every sorter ends, against random reshuffling", f"{note} · {study.caption()}")


def _draw(panel: Axes, values: Series, row: int, colour: str) -> None:
    value = estimate(values)
    plots.interval(panel, value, row, color=colour, lw=2.2, solid_capstyle="butt")
    panel.plot(value.mean, row, "|", color=colour, ms=11, mew=2.2)
    panel.plot(values, np.full(len(values), row), "o", ms=2.6, mfc="white", mec=colour, mew=0.7)
