"""Figures of runs as cards: curves by column, and what it takes to make them again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

from markupsafe import Markup

from experiments.report.claims import FIGURES, Figure
from experiments.report.curve_claims import command
from experiments.report.manifests import without
from experiments.report.names import LOSS, column_title, kind, task_name
from experiments.report.page import curves, markup
from experiments.report.page.card import Card, commits, hours, machines, saved_table
from experiments.report.runs import Group, evidence
from experiments.report.text import plural
from experiments.store.files import RESULTS, ROOT

NOT_METRICS = {"epoch", "seconds", "elapsed", "seed", "replicas"}


def cards() -> Iterator[Card]:
    """Every figure and table of the paper that has runs which are no trials, and then all other such runs."""
    names = dict.fromkeys(path.parent.name for path in sorted((RESULTS / "runs").glob("*/*/*/")))
    runs = {experiment: evidence(experiment) for experiment in names}
    known = {figure.experiment: figure for figure in reversed(FIGURES)}
    for figure in reversed(known.values()):
        for source, groups in _sweeps(runs.get(figure.source, []), figure.metrics).items():
            yield _figure(figure.experiment, source, groups, figure)
    for experiment in sorted(names.keys() - {figure.source for figure in FIGURES}):
        for source, groups in _sweeps(runs[experiment]).items():
            yield _figure(experiment, source, groups)


def _sweeps(groups: list[Group], metrics: Iterable[str] = ()) -> dict[str, list[Group]]:
    """By name of a figure: groups that are its columns, in order; those that log one of its metrics."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        if not metrics or any(metric in group.metrics for metric in metrics):
            found.setdefault(without(group.source, group.columns), []).append(group)
    return {source: sorted(some, key=lambda group: group.column or 0) for source, some in found.items()}


def _figure(experiment: str, source: str, groups: list[Group], figure: Figure | None = None) -> Card:
    first, manifests = groups[0].manifests[0], [m for group in groups for m in group.manifests]
    metrics = figure.metrics if figure else _logged(groups[0])
    title, about = notebook(experiment)
    changed = [setting for setting in re.split(r",(?=[\w.]+=)", source)[1:] if not setting.startswith("name=")]
    sorters = list(dict.fromkeys(sorter for group in groups for sorter in group.sorters))
    seeds = sorted({m["seed"] for m in manifests})
    return Card(
        f"{experiment}-{source}",
        f"{title or _readable(experiment, first['task'])}{' with ' * bool(changed)}{', '.join(changed)}",
        [first["task"]],
        list(dict.fromkeys(map(kind, sorters))),
        {
            "data": first["data"]["description"] + ("" if first["data"]["papers_own"] else ", not the paper’s"),
            "seeds": f"{_range(seeds)}; {plural(len(manifests), 'run')}",
            "machine": machines(manifests),
            "machine time": hours(sum(map(_seconds, groups))),
            "commit": commits(manifests),
        },
        max(m.get("ended", "") for m in manifests),
        command(groups[-1], tuple(groups[-1].sorters)) if figure else "",  # of others the experiment is not known
        about,
        saved_table(f"{experiment}-{source}"),
        columns={_column(group): _views(group, metrics, experiment) for group in groups},
    )


def _readable(experiment: str, task: str) -> str:
    """The name of runs that belong to no figure."""
    return f"{task_name(task)}: {' '.join(word for word in experiment.removeprefix(task).split('_') if word)}"


def _logged(group: Group) -> list[str]:
    """The metrics of runs that belong to no figure."""
    numbers = group.metrics.select_dtypes("number").columns
    return [LOSS, *(name for name in numbers if name not in NOT_METRICS | {LOSS})]


def _column(group: Group) -> str:
    return column_title(group.columns, group.column) if group.columns else ""


def _views(group: Group, metrics: Iterable[str], experiment: str) -> dict[str, list[curves.Panel]]:
    views: dict[str, list[curves.Panel]] = {}
    for metric in (metric for metric in metrics if metric in group.metrics):
        for name, panel in curves.views(group, metric, experiment).items():
            views.setdefault(name, []).append(panel)
    return views


def _seconds(group: Group) -> float:
    """Of training and evaluation. Runs that trained together share what their group took."""
    table = group.metrics
    together = table["replicas"].fillna(1) if "replicas" in table else 1
    evaluation = table["phases"].map(lambda phases: phases.get("evaluation", 0.0)) if "phases" in table else 0.0
    return float(((table["seconds"] + evaluation) / together).sum())


def notebook(experiment: str) -> tuple[str, Markup]:
    """The heading of a figure's notebook, and what it says below it."""
    path = ROOT / "notebooks" / f"{experiment}.ipynb"
    if not path.exists():
        return "", Markup("")
    heading, _, text = "".join(json.loads(path.read_text())["cells"][0]["source"]).partition("\n")
    return heading.lstrip("# "), markup.html(text)


def _range(seeds: list[int]) -> str:
    whole = len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1
    return f"{seeds[0]}–{seeds[-1]}" if whole else ", ".join(map(str, seeds))
