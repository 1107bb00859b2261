"""Claims about curves, as tests: who is better in a figure, sooner, smoother, slower, and what its columns change.

What the paper's own curves show is computed the same way and stands beside its words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from experiments.report import measures
from experiments.report.claims import FIGURES, FROM_THEIR_WEIGHTS, NEGLIGIBLE, TIMED, TRENDS, Figure, Pair, Trend
from experiments.report.judging import IMPOSSIBLE, UNDECIDED, Claim, Evidence, Row
from experiments.report.kinds import Series
from experiments.report.manifests import variant, without
from experiments.report.names import (
    BASELINE,
    LOSS,
    OURS,
    PUBLISHED_SORTERS,
    column_title,
    higher_is_better,
    kind,
    metric_label,
    sorter_label,
)
from experiments.report.published import published
from experiments.report.runs import Group, evidence
from experiments.report.statistics import SAME_LOSS, estimate
from experiments.report.tables import BEST_EPOCH, ends, epochs_to, papers_ends
from experiments.report.text import plural, signed

Runs = dict[str, list[Group]]  # by experiment
Column = str | float | None
FROM_NEW_WEIGHTS = "random_gpt2"  # the encoder of runs beside those of Table 1
LEARNT = 1.0  # points above the commoner class


def finished() -> Runs:
    """All runs by which claims are judged."""
    return {figure.source: evidence(figure.source) for figure in (*FIGURES, FROM_THEIR_WEIGHTS)}


def groups_of(runs: Runs, figure: Figure, column: Column = None) -> list[Group]:
    """Of one column of a figure, or of all."""
    columns = figure.columns if column is None else (column,)
    found = [
        group
        for group in runs[figure.source]
        if (columns == (None,) or group.column in columns) and group.setting("task.encoder") != FROM_NEW_WEIGHTS
    ]
    return sorted(found, key=lambda group: 0 if columns == (None,) else columns.index(group.column))


def title(figure: Figure, group: Group) -> str:
    """Figure 4, 64 workers; Figure 3c, schedule.factor=0.1"""
    changed = [] if figure.runs else without(group.source, group.columns).split(",")[1:]
    column = [] if figure.columns == (None,) else [column_title(group.columns, group.column)]
    return ", ".join([figure.name, *column, *changed])


def better(runs: Runs) -> Iterator[Claim | Row]:
    """In every column and metric of every figure and table, whether the one sorter is better than the other."""
    for figure in FIGURES:
        for column in figure.columns:
            groups = groups_of(runs, figure, column)
            own = any(group.manifests[0]["data"]["papers_own"] for group in groups)
            if not groups or (figure.own_data and not own):
                yield _nothing(figure, column)
            for group in groups:
                for metric in (metric for metric in figure.metrics if metric in group.metrics):
                    yield from (_better(figure, group, metric, pair) for pair in _pairs(figure, group))


def pretraining(runs: Runs) -> Iterator[Claim]:
    """Whether a pretrained model gets further than the same one with new weights, by sorter."""
    figure, metric = FIGURES[-1], "val_accuracy"
    new = {g.column: g for g in runs.get(figure.source, ()) if g.setting("task.encoder") == FROM_NEW_WEIGHTS}
    for group in (group for group in groups_of(runs, figure) if group.column in new):
        for sorter in (OURS, BASELINE):
            scores = [some.best(sorter, metric) for some in (group, new[group.column])]
            yield Claim(
                f"{title(figure, group)}, {sorter_label(sorter)}",
                "a pretrained model is fine-tuned; what it has over new weights is not said",
                f"pretraining, {group.column}",
                (scores[0] - scores[1]).dropna(),
                _evidence(figure, new[group.column], ()),
                figure.seeds,
                below=False,
                unit="points",
                beside=" and ".join(f"{some.mean():.2f} ± {some.std():.2f}" for some in scores) + " %",
            )


def sooner(runs: Runs) -> Iterator[Claim]:
    """In epochs, counted; and in seconds, which only runs that had the machine for themselves can tell."""
    for figure, group, pair in _against_baseline(runs, FIGURES):
        curves = group.on_the_same_seeds(pair, LOSS)
        words = f"{group.label(pair[0])} is sooner at {group.label(pair[1])}'s last loss"
        where, never = _evidence(figure, group, pair), measures.never_there(group, pair)
        yield Claim(
            title(figure, group),
            f"{words}, in epochs: {_counts(_papers(figure, group.column, pair))}",
            f"sooner, {where.figure}",
            measures.sooner(group, pair),
            where,
            figure.seeds,
            unit="epochs",
            beside=f"not reached on {plural(never, 'seed')}; " * bool(never) + f"{_counts(curves)} on the mean curves",
            censored=never,
        )
        if figure in TIMED and (seconds := _seconds(group, pair, measures.sooner_in_seconds)):
            where_timed, unit = f"{title(figure, group)}, seconds", f"seconds, {_ratio(group, *reversed(pair))}"
            timed = _evidence(figure, group, pair, timed=True)
            about = {"family": f"sooner in seconds, {where.figure}", "evidence": timed, "wanted": figure.seeds}
            late = measures.never_there(group.alone, pair) if len(seconds["values"]) else 0
            yield Claim(where_timed, words, below=False, shown=math.exp, unit=unit, censored=late, **about, **seconds)


def smoother(runs: Runs) -> Iterator[Claim]:
    for figure, group, pair in _against_baseline(runs, FIGURES):
        theirs, where = _papers(figure, group.column, pair), _evidence(figure, group, pair)
        ratio = f": on its mean curves {_scatter_ratio(theirs):.3g} times, not comparable in size" if theirs else ""
        yield Claim(
            title(figure, group),
            f"{group.label(pair[1])} scatters more from epoch to epoch than {group.label(pair[0])}{ratio}",
            f"smoother, {where.figure}",
            measures.smoother(group, pair),
            where,
            figure.seeds,
            below=False,
            shown=math.exp,
            unit=_ratio(group, *reversed(pair)),
        )


def slower(runs: Runs) -> Iterator[Claim]:
    """What an epoch takes beside one of the baseline, which only runs that had the machine for themselves can tell."""
    for figure, group, pair in _against_baseline(runs, TIMED):
        if seconds := _seconds(group, pair, measures.slower):
            yield Claim(
                f"overhead, {title(figure, group)}",
                overhead_said(figure, pair),
                f"overhead, {figure.name}",
                evidence=_evidence(figure, group, pair, timed=True),
                wanted=figure.seeds,
                limit=math.log(NEGLIGIBLE),
                shown=math.exp,
                unit=_ratio(group, *pair),
                **seconds,
            )


def overhead_said(figure: Figure, pair: Pair) -> str:
    """Seconds per epoch come from the distances between the points of the paper's time axis."""
    curves = published(figure.experiment, LOSS, "seconds")
    first, second = (curves[sorter_label(sorter)]["x"].diff().mean() for sorter in pair)
    return f"negligible overhead; on its own time axis an epoch takes {first / second:.3g} times D-RR's"


def trends(runs: Runs) -> Iterator[Claim]:
    for trend in TRENDS:
        if groups := groups_of(runs, trend.figure):
            yield _trend(trend, groups)


def _pairs(figure: Figure, group: Group) -> list[Pair]:
    return [pair for pair in figure.pairs if set(pair) <= set(group.sorters)]


def _against_baseline(runs: Runs, figures: tuple[Figure, ...]) -> Iterator[tuple[Figure, Group, Pair]]:
    for figure in figures:
        if LOSS in figure.metrics:
            for group in groups_of(runs, figure):
                pairs = (pair for pair in _pairs(figure, group) if pair[1] == BASELINE and pair[0] == kind(pair[0]))
                yield from ((figure, group, pair) for pair in pairs)


def _seconds(group: Group, pair: Pair, measure: Callable[[Group, Pair], Series]) -> dict[str, object]:
    """What was measured, or why nothing was; empty for variants of a figure, of which nobody says anything then."""
    if set(pair) <= set(group.alone.sorters):
        return {"values": measure(group.alone, pair)}
    return {} if "," in group.source else {"values": [], "unless": "none of these runs had its machine for itself"}


def _evidence(figure: Figure, group: Group, pair: Pair, timed: bool = False) -> Evidence:
    first = group.manifests[0]
    own = "" if first["data"]["papers_own"] else ", not the paper's"
    source = without(group.source, group.columns)
    return Evidence(first["data"]["description"] + own, f"{figure.experiment}-{source}", command(group, pair, timed))


def command(group: Group, pair: Pair = (), timed: bool = False) -> str:
    """What makes these runs, `timed` ones alone; make itself cannot change all settings, nor the options of sorters."""
    first, (_, *changed) = group.manifests[0], without(group.source, group.columns).split(",")
    names = (setting.partition("=")[0] for setting in changed)
    settings = [s if name in first["science"] else f"task.{s}" for s, name in zip(changed, names, strict=True)]
    if timed:
        return _launch(group.alone if group.alone.manifests else group, *settings, "replicas=1")
    seeds = 1 + max(m["seed"] for m in group.manifests)
    make = f"make reproduce-{first['task'].replace('_', '-')} SIZE=paper SEEDS={seeds}"
    commands = [_launch(group, *settings) if settings else make]
    for sorter in (sorter for sorter in pair if "," in sorter):
        options = [f"sorter.{option}" for option in sorter.split(",")[1:]]
        commands.append(_launch(group, f"sorter={kind(sorter)}", *options, sorter=sorter))
    return " && ".join(commands)


def _launch(group: Group, *settings: str, sorter: str | None = None) -> str:
    """With the seeds of all runs, or of those of one sorter."""
    seeds = [m["seed"] for m in group.manifests if sorter in (None, variant(m))]
    experiment = f"experiment={group.directory.parent.name} size=paper {' '.join(settings)}"
    return f"python -m experiments.launch -m {experiment} 'seed=range({min(seeds)},{max(seeds) + 1})'"


def _nothing(figure: Figure, column: Column) -> Row:
    says = _said(figure, figure.metrics[0], column, figure.pairs[0])
    where = f"{figure.name}, {column or 'on its own data'}"
    if reason := figure.impossible.get(column) or figure.own_data:
        return Row(where, says, IMPOSSIBLE, reason)
    return Row(where, says, UNDECIDED, "no runs", seeds=f"0 of {figure.seeds}")


def _better(figure: Figure, group: Group, metric: str, pair: Pair) -> Claim:
    higher, (first, *others), where = higher_is_better(metric), ends(metric), _evidence(figure, group, pair)
    slack = figure.slack.get(group.column, 0.0)
    beside = [f"{when} {estimate(measures.difference(group, pair, metric, when))}" for when in others]
    unless = ""
    if first == BEST_EPOCH:
        levels, guess = [group.best(sorter, metric).mean() for sorter in pair], measures.majority(group) or 0.0
        beside.append(
            f"{levels[0]:.2f} and {levels[1]:.2f} %" + f", the commoner class has {guess:.2f} %" * bool(guess)
        )
        unless = "" if max(levels) > guess + LEARNT else "nothing was learnt but the commoner class"
    return Claim(
        f"{title(figure, group)}, {metric_label(metric)}",
        _said(figure, metric, group.column, pair, group.label) + (f"; at most {slack:g} worse" if slack else ""),
        f"{where.figure}, {metric}, {pair[1]}",
        measures.difference(group, pair, metric, first),
        where,
        figure.seeds,
        below=not higher,
        limit=(-slack if higher else slack) or 0.0,
        beside="; ".join(beside),
        unless=unless,
        margin=SAME_LOSS / 100 * ends(metric)[first](group, pair[1], metric).mean() if metric == LOSS else 0.0,
    )


def _said(figure: Figure, metric: str, column: Column, pair: Pair, label: Callable[[str], str] = sorter_label) -> str:
    by_end = {when: papers_ends(figure.experiment, metric, column, when) for when in ends(metric)}
    first, second = map(kind, pair)  # the paper's have no options
    numbers = [
        f"{when} {signed(values[first] - values[second])}"
        for when, values in by_end.items()
        if {first, second} <= set(values)
    ]
    return f"{label(pair[0])} − {label(pair[1])}: {'; '.join(numbers) or 'no number'}"


def _trend(trend: Trend, groups: list[Group]) -> Claim:
    (first, second), where = trend.pair, _evidence(trend.figure, groups[0], trend.pair)
    theirs = {}
    for column in trend.figure.columns:
        values = papers_ends(trend.figure.experiment, LOSS, column)
        theirs[math.log2(column)] = values[first] - values[second]
    return Claim(
        f"{trend.figure.name}, {sorter_label(first)} − {sorter_label(second)}",
        f"{trend.says}: {signed(measures.slope(theirs))} per doubling",
        f"trends, {where.figure}",
        measures.slopes(groups, groups[0].columns, trend.pair),
        where,
        trend.figure.seeds,
        below=trend.falls,
        unit="per doubling",
    )


def _papers(figure: Figure, column: Column, pair: Pair) -> list[Series]:
    """The paper's mean curves against epochs, of both sorters; empty if one is missing."""
    curves = published(figure.experiment, LOSS, column=column)
    by_sorter = {PUBLISHED_SORTERS[series]: curve.set_index("x")["mean"] for series, curve in curves.items()}
    sorters = list(map(kind, pair))
    return [by_sorter[sorter] for sorter in sorters] if set(sorters) <= set(by_sorter) else []


def _ratio(group: Group, first: str, second: str) -> str:
    return f"{group.label(first)}'s / {group.label(second)}'s"


def _scatter_ratio(curves: list[Series]) -> float:
    first, second = map(measures.scatter, curves)
    return second / first


def _counts(curves: list[Series]) -> str:
    """14 and 39. A point that stands for two epochs counts as the later one."""
    found = [epochs_to(curve, curves[1].iloc[-1]) for curve in curves]
    return " and ".join("never" if math.isnan(epoch) else f"{math.ceil(epoch)}" for epoch in found) or "unknown"
