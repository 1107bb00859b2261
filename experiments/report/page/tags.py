"""What lines of results are about, so that they can be filtered: tasks, sorters and sparsifiers, kinds of verdicts."""

from __future__ import annotations

import re

from cdgrab.sorters import LABELS
from experiments.report.claims import FIGURES
from experiments.report.judging import CONTRADICTED, IMPOSSIBLE, REPRODUCED, UNDECIDED
from experiments.report.names import BASELINE, GLUE, OURS, TASKS, sorter_label, task_name

NO_TASK = "none"
WORDS = {  # by which a task is known besides its name
    "lr_hmda": ("HMDA",),
    "lstm_wiki2": ("LSTM", "WikiText-2"),
    "mlp_m4": ("M4",),
    "cifar10": ("CIFAR-10", "LeNet"),
    "gpt2_wiki103": ("WikiText-103", "novels"),
    "glue": ("GLUE", *GLUE),
}
SPARSIFIERS = ("ExDyna", "Top-k", "CLT-k", "DEFT", "SIDCo", "MiCRO", "hard threshold")
NAMES = {label: name for name, label in LABELS.items()} | {sorter_label(name): name for name in LABELS}
NAMES |= {name: name.lower().replace(" ", "-") for name in SPARSIFIERS}
NAMED = re.compile(rf"(?<![\w-])(?:{'|'.join(re.escape(name) for name in sorted(NAMES, key=len, reverse=True))})")
KINDS = {  # what the page colours; the verdicts of PAPER.md, and those of studies
    REPRODUCED: ("good", REPRODUCED),
    "holds": ("good", "holds"),
    CONTRADICTED: ("bad", CONTRADICTED),
    "fails": ("bad", "fails"),
    "equal": ("equal", "equal"),
    UNDECIDED: ("open", UNDECIDED),
    "undecided": ("open", "undecided"),
    IMPOSSIBLE: ("none", IMPOSSIBLE),
}
CHOICES = {
    "good": "reproduced, holds",
    "bad": "contradicted, fails",
    "equal": "equal, within the margin",
    "open": "cannot decide, undecided",
    "none": "not possible here",
}


def kind(verdict: str) -> str:
    """Of a verdict in any page: good, bad, equal, open or none."""
    return KINDS[verdict][0]


def tasks(*texts: str) -> list[str]:
    """The tasks that the first text names which names any."""
    for text in texts:
        if found := [task for task in TASKS if _about(task, text)]:
            return found
    return [NO_TASK]


def sorters(text: str) -> list[str]:
    """The sorters and sparsifiers that a text names, without their options."""
    return list(dict.fromkeys(NAMES[name] for name in NAMED.findall(text)))


def of_figure(where: str) -> str:
    """The experiment of the figure or table that a line of PAPER.md is about; empty if it is about something else."""
    known = [figure for figure in FIGURES if where.partition(",")[0] == figure.name.partition(",")[0]]
    return known[0].experiment if known else ""


def task_choices(used: set[str]) -> dict[str, str]:
    known = {task: task_name(task) for task in TASKS} | {NO_TASK: "no task: vectors, signs, bytes"}
    return {task: label for task, label in known.items() if task in used} | {
        task: task_name(task) for task in sorted(used - known.keys())
    }


def sorter_choices(used: set[str]) -> dict[str, str]:
    """CD-GraB and D-RR first; sparsifiers last."""
    labels = {name: label for label, name in reversed(NAMES.items())}
    order = [OURS, BASELINE, *dict.fromkeys(NAMES.values())]
    return {name: labels[name] for name in order if name in used}


def _about(task: str, text: str) -> bool:
    names = (task, task.replace("_", "-"), task_name(task), *WORDS[task])
    return any(re.search(rf"(?<![A-Za-z]){re.escape(name)}(?![A-Za-z0-9])", text) for name in names)
