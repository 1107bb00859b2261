"""All sorters of the suite on two tasks, paired over seeds."""

from __future__ import annotations

from functools import partial

import pandas as pd
from omegaconf import DictConfig

from ..report import markdown
from ..significance import holm, paired_p
from .base import Part
from .looks import label, name_of
from .paired import BASELINE, LOSS, OURS, UNCOORDINATED, by_seed, difference, ends_lower, keeps_the_advantage
from .training import TASK_NAMES, TEST_METRICS, outcome, overrides, train
from .verdicts import Verdict, estimate

CENTRAL = ("grab", "grab_pair")  # one worker holds all units


def parts(settings: DictConfig) -> list[Part]:
    """One training run each."""
    return [
        Part({"task": task, "sorter": sorter, "seed": seed}, partial(_run, settings, task, sorter, seed))
        for task in settings.tasks
        for seed in range(settings.seeds)
        for sorter in settings.sorters
    ]


def verdicts(table: pd.DataFrame, settings: DictConfig) -> list[Verdict]:
    lines = []
    for task in settings.tasks:
        rows, name = table[table["task"] == task], TASK_NAMES[task]
        lines += [ends_lower(rows, name, OURS), ends_lower(rows, name, OURS, UNCOORDINATED)]
        for sorter in settings.sorters:
            if sorter.startswith(f"{OURS},"):
                lines.append(keeps_the_advantage(rows, name, sorter))
            elif sorter not in (BASELINE, OURS, UNCOORDINATED):
                lines.append(ends_lower(rows, name, sorter))
        if CENTRAL[-1] in settings.sorters:
            lines.append(ends_lower(rows, name, OURS, CENTRAL[-1]))
    return lines


def sorter_table(table: pd.DataFrame, settings: DictConfig) -> str:
    """Every sorter on every task: loss, test metric, difference from D-RR, p value; adjusted for all of a task."""
    rows = []
    for task in settings.tasks:
        some, metric = table[table["task"] == task], TEST_METRICS[task]
        others = [sorter for sorter in settings.sorters if sorter != BASELINE]
        p = {sorter: paired_p(list(difference(some, sorter))) for sorter in others}
        adjusted = dict(zip(p, holm(list(p.values())), strict=True))
        for sorter in settings.sorters:
            loss, test = by_seed(some, sorter, LOSS), by_seed(some, sorter, metric)
            against = difference(some, sorter)
            rows.append(
                {
                    "task": TASK_NAMES[task],
                    "sorter": label(sorter),
                    "train loss": f"{loss.mean():.5f} ± {loss.std():.5f}",
                    "test metric": f"{test.mean():.2f} ± {test.std():.2f}",
                    "against D-RR (%)": "" if sorter == BASELINE else str(estimate(against)),
                    "lower on": "" if sorter == BASELINE else f"{(against < 0).sum()} of {len(against)}",
                    "p": "" if sorter == BASELINE else f"{p[sorter]:.2g}",
                    "p (Holm)": "" if sorter == BASELINE else f"{adjusted[sorter]:.2g}",
                }
            )
    return markdown(rows)


def _run(settings: DictConfig, task: str, sorter: str, seed: int) -> dict[str, list]:
    one_worker = {"workers": 1} if name_of(sorter) in CENTRAL else {}
    return outcome(train(overrides(settings, task, sorter, **one_worker), seed))
