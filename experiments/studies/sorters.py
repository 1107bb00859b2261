"""All sorters of the suite on two tasks, paired over seeds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pandas as pd
from omegaconf import DictConfig

from experiments.report.statistics import holm, paired_p
from experiments.report.tables import markdown
from experiments.studies.base import Part
from experiments.studies.paired import (
    BASELINE,
    LOSS,
    OURS,
    UNCOORDINATED,
    by_seed,
    difference,
    ends_lower,
    keeps_the_advantage,
)
from experiments.studies.style import label, name_of
from experiments.studies.training import TASK_NAMES, TEST_METRICS, outcome, overrides, train
from experiments.studies.verdicts import Verdict, estimate

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
    """Answers are those of single tests; what adjusting for all sorters of a task makes of them is in the notes."""
    lines = []
    for task in settings.tasks:
        rows, name = table[table["task"] == task], TASK_NAMES[task]
        p = p_values(rows, settings)
        lines += [_against_baseline(rows, name, OURS, p), ends_lower(rows, name, OURS, UNCOORDINATED)]
        for sorter in settings.sorters:
            if sorter.startswith(f"{OURS},"):
                lines.append(keeps_the_advantage(rows, name, sorter))
            elif sorter not in (BASELINE, OURS):
                lines.append(_against_baseline(rows, name, sorter, p))
        if CENTRAL[-1] in settings.sorters:
            lines.append(ends_lower(rows, name, OURS, CENTRAL[-1]))
    return lines


def p_values(rows: pd.DataFrame, settings: DictConfig) -> pd.DataFrame:
    """Of every sorter's difference from D-RR on one task: single, and adjusted for testing all of them (Holm)."""
    p = {sorter: paired_p(list(difference(rows, sorter))) for sorter in settings.sorters if sorter != BASELINE}
    return pd.DataFrame({"single": p.values(), "adjusted": holm(list(p.values()))}, index=list(p))


def sorter_table(table: pd.DataFrame, settings: DictConfig) -> str:
    """Every sorter on every task: loss, test metric, difference from D-RR, p value; adjusted for all of a task."""
    rows = []
    for task in settings.tasks:
        some, metric = table[table["task"] == task], TEST_METRICS[task]
        p = p_values(some, settings)
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
                    "p": "" if sorter == BASELINE else f"{p.single[sorter]:.2g}",
                    "p (Holm)": "" if sorter == BASELINE else f"{p.adjusted[sorter]:.2g}",
                }
            )
    return markdown(rows)


def _against_baseline(rows: pd.DataFrame, name: str, sorter: str, p: pd.DataFrame) -> Verdict:
    verdict = ends_lower(rows, name, sorter)
    note = f"p = {p.single[sorter]:.2g}, adjusted for {len(p)} sorters (Holm) {p.adjusted[sorter]:.2g}"
    return replace(verdict, note=f"{verdict.note}; {note}")


def _run(settings: DictConfig, task: str, sorter: str, seed: int) -> dict[str, list]:
    one_worker = {"workers": 1} if name_of(sorter) in CENTRAL else {}
    return outcome(train(overrides(settings, task, sorter, **one_worker), seed))
