"""Tables of README.md and docs/ that are computed from results/, each between `<!-- results: name -->` and
`<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cdgrab.errors import CdgrabError
from experiments.report import costs, figures_link
from experiments.report.names import BASELINE, LOSS, OURS, metric_label, sorter_label
from experiments.report.runs import Group, groups, sweeps
from experiments.report.statistics import paired_p
from experiments.report.tables import LAST_EPOCH, LAST_HALF, compared_by_seed, ends, epochs_to, p_value, papers_ends
from experiments.report.text import markdown, mean_std, minus, narrow, plural
from experiments.store.files import RESULTS, ROOT

WHEN = {LAST_HALF: "mean over the last half of the epochs", LAST_EPOCH: "last epoch"}
HMDA, CIFAR10 = "fig3a_lr_hmda", "fig4_cifar10_workers"
NAMES = {OURS: sorter_label(OURS), BASELINE: sorter_label(BASELINE)}
BETTER, DIFFERENCE = f"{NAMES[OURS]} better on", f"{NAMES[OURS]} − {NAMES[BASELINE]}"
MARKED = re.compile(r"^( *)<!-- results: (\S+) -->$.*?^ *<!-- end -->$", re.M | re.S)


def files() -> list[Path]:
    """README.md and the pages of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(page: str) -> str:
    """The page with its tables computed anew."""
    return MARKED.sub(_block, page)


def hmda() -> str:
    """Of the first experiment: who is better, and how much sooner."""
    group = next(group for group in groups(HMDA) if "," not in group.source)
    seeds = plural(len(group.final(OURS, LOSS)), "seed")
    title = f"HMDA New Jersey 2017, {group.setting('workers')} workers, {group.setting('epochs')} epochs, {seeds}"
    rows = [_compared(title, group, metric, when) for metric in (LOSS, "test_accuracy") for when in ends(metric)]
    curves = {sorter: group.curve(sorter, LOSS)["mean"] for sorter in NAMES}
    sooner = {NAMES[sorter]: f"{epochs_to(curve, curves[BASELINE].iloc[-1]):g}" for sorter, curve in curves.items()}
    papers = papers_ends(HMDA, LOSS, None, LAST_EPOCH)
    paper = {NAMES[sorter]: f"{papers[sorter]:.6f}" for sorter in NAMES}
    rows += [
        {title: f"epochs to {NAMES[BASELINE]}'s last loss, counted on the mean curves", **sooner, BETTER: ""},
        {title: f"the paper, on New York 2017: {metric_label(LOSS)}, {LAST_EPOCH}", **paper, BETTER: ""},
    ]
    return markdown(rows)


def cifar10() -> str:
    """By number of workers."""
    sweep = next(sweep for sweep in sweeps(CIFAR10, "workers") if "," not in sweep.source)
    return markdown([_by_workers(group) for group in sweep.groups])


def scoreboard() -> str:
    """How many rows of PAPER.md have which verdict."""
    return _table(RESULTS / "PAPER.md")


def study(name: str, which: int = 0) -> str:
    """A table of a study."""
    return _table(next((RESULTS / "figures").glob(f"study_{name}-*.md")), which)


def _table(path: Path, which: int = 0) -> str:
    return [block for block in path.read_text().split("\n\n") if block.startswith("|")][which]


TABLES: dict[str, Callable[[], str]] = {
    "lr-hmda": hmda,
    "cifar10": cifar10,
    "compression": partial(study, "compression"),
    "compression-orders": partial(study, "compression", 1),
    "compression-density": partial(study, "compression", 2),
    "compression-remedies": partial(study, "compression", 3),
    "costs": costs.table,
    "dropin": costs.dropin,
    "links": figures_link.fastest,
    "links-steps": figures_link.steps,
    "links-early": figures_link.early,
    "practice": partial(study, "practice"),
    "practice-settings": partial(study, "practice", 2),
    "scoreboard": scoreboard,
}


def _compared(title: str, group: Group, metric: str, when: str) -> dict[str, str]:
    values = {sorter: ends(metric)[when](group, sorter, metric) for sorter in NAMES}
    words = {NAMES[sorter]: mean_std(some, 6 if metric == LOSS else 3) for sorter, some in values.items()}
    better = compared_by_seed(values[OURS] - values[BASELINE], metric)["better on"]
    return {title: f"{metric_label(metric)}, {WHEN[when]}", **words, BETTER: better}


def _by_workers(group: Group) -> dict[str, str]:
    halves = {sorter: group.last_half(sorter, LOSS) for sorter in NAMES}
    last = [f"{group.final(sorter, LOSS).mean():.3f}" for sorter in NAMES]
    difference = (halves[OURS] - halves[BASELINE]).dropna()
    accuracy = (group.last_half(OURS, "test_accuracy") - group.last_half(BASELINE, "test_accuracy")).dropna()
    papers = papers_ends(CIFAR10, LOSS, group.column, LAST_HALF)
    return {
        "workers": f"{group.column}",
        "seeds": str(len(difference)),
        **{name: mean_std(halves[sorter], 4) for sorter, name in NAMES.items()},
        DIFFERENCE: minus(mean_std(difference, 4)),
        "p": p_value(paired_p(difference.tolist())).removeprefix("p ").removeprefix("= "),
        "the paper's": minus(f"{papers[OURS] - papers[BASELINE]:.4f}"),
        f"last epoch: {', '.join(NAMES.values())}": ", ".join(last),
        f"test accuracy (%), {DIFFERENCE}": mean_std(accuracy, 2, "+"),
    }


def _block(found: re.Match) -> str:
    indent, name = found.groups()
    if name not in TABLES:
        raise CdgrabError(f"a page wants the results {name!r}; there are {', '.join(TABLES)}")
    lines = [f"<!-- results: {name} -->", *narrow(TABLES[name]()).splitlines(), "<!-- end -->"]
    return "\n".join(indent + line for line in lines)
