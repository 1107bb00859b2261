"""Curves of the report page: what the figures of the notebooks draw, as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from experiments.report.figures import papers_curves
from experiments.report.kinds import DataFrame, Series
from experiments.report.names import BASELINE, PUBLISHED_SORTERS, kind, metric_label, sorter_colour, sorter_label
from experiments.report.published import published
from experiments.report.runs import Group
from experiments.report.text import FEWEST_SEEDS

DIGITS = 7  # significant ones
EPOCHS, LESS, SECONDS = "by epoch", "less D-RR’s", "by seconds"


@dataclass(frozen=True)
class Line:
    """A mean over seeds and its band, which may be missing; or a curve of the paper."""

    label: str
    sorter: str
    x: list[float]
    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]
    paper: bool = False

    def numbers(self) -> dict[str, object]:
        """As the page's script wants them."""
        band = {"low": self.low, "high": self.high} if self.low else {}
        about = {"label": self.label, "sorter": kind(self.sorter), "colour": sorter_colour(self.sorter)}
        return about | {"paper": self.paper, "x": self.x, "mean": self.mean} | band


@dataclass(frozen=True)
class Panel:
    x: str
    y: str
    lines: tuple[Line, ...]
    logarithmic: bool = False  # its x axis

    def numbers(self) -> dict[str, object]:
        axes = {"x": self.x, "y": self.y, "log": self.logarithmic}
        return axes | {"lines": [line.numbers() for line in self.lines]}


def views(group: Group, metric: str, experiment: str) -> dict[str, Panel]:
    """One metric of a group of runs: against epochs; against seconds, where they are meaningful; and less D-RR's, seed
    by seed. The paper's curves only beside runs on its own data, its differences beside others too."""
    found = {EPOCHS: Panel("epoch", metric_label(metric), tuple(_by_epoch(group, metric, experiment)))}
    if BASELINE in group.sorters and len(group.sorters) > 1:
        words = f"{metric_label(metric)} less {group.label(BASELINE)}’s"
        found[LESS] = Panel("epoch", words, tuple(_differences(group, metric, experiment)))
    if group.alone.manifests:
        lines = tuple(_by_seconds(group, metric, experiment))
        beside = any(line.paper for line in lines)  # whose machine is more than ten times slower
        found[SECONDS] = Panel(metric_label("elapsed"), metric_label(metric), lines, logarithmic=beside)
    return {name: panel for name, panel in found.items() if panel.lines}


def _by_epoch(group: Group, metric: str, experiment: str) -> Iterator[Line]:
    yield from _own(group, metric, "epoch")
    if group.on_the_papers_data:
        yield from _published(published(experiment, metric, column=group.column))


def _by_seconds(group: Group, metric: str, experiment: str) -> Iterator[Line]:
    yield from _own(group.alone, metric, "elapsed")
    if group.on_the_papers_data:
        yield from _published(published(experiment, metric, "seconds", group.column))


def _own(group: Group, metric: str, axis: str) -> Iterator[Line]:
    for sorter in group.sorters:
        curve = group.curve(sorter, metric)
        if not curve.empty:  # empty: a metric that these runs did not log
            x = curve.index if axis == "epoch" else curve["elapsed"]
            yield _with_std(group.label(sorter), sorter, x, curve["mean"], curve["std"])


def _differences(group: Group, metric: str, experiment: str) -> Iterator[Line]:
    for sorter in (sorter for sorter in group.sorters if sorter != BASELINE):
        found = group.differences(sorter, BASELINE, metric)
        if not found.empty:
            std = found.std(axis="columns") * (found.shape[1] >= FEWEST_SEEDS)
            yield _with_std(group.label(sorter), sorter, found.index, found.mean(axis="columns"), std.fillna(0.0))
    curves, own = papers_curves(group, metric, experiment), group.on_the_papers_data
    for sorter in (sorter for sorter in curves if sorter != BASELINE and BASELINE in curves):
        difference = (curves[sorter] - curves[BASELINE]).dropna()
        label = f"{sorter_label(sorter)}, paper" + ", on its own data" * (not own)
        yield _line(label, sorter, difference.index, difference, paper=True)


def _published(curves: dict[str, DataFrame]) -> Iterator[Line]:
    for series, curve in curves.items():
        label = f"{series}, paper" + ", best epoch" * (len(curve) == 1)
        low, high = (curve["low"], curve["high"]) if curve["low"].notna().any() else ((), ())
        yield _line(label, PUBLISHED_SORTERS[series], curve["x"], curve["mean"], low, high, paper=True)


def _with_std(label: str, sorter: str, x: Iterable, mean: Series, std: Series) -> Line:
    low, high = (mean - std, mean + std) if (std > 0).any() else ((), ())  # 0: too few seeds
    return _line(label, sorter, x, mean, low, high)


def _line(
    label: str, sorter: str, x: Iterable, mean: Iterable, low: Iterable = (), high: Iterable = (), paper: bool = False
) -> Line:
    return Line(label, sorter, *map(rounded, (x, mean, low, high)), paper=paper)


def rounded(values: Iterable[float]) -> list[float | None]:
    """With as many digits as anybody can see; None where there is no number."""
    numbers = [float(f"{value:.{DIGITS}g}") for value in values]
    return [int(n) if n.is_integer() and abs(n) < 1e15 else n if math.isfinite(n) else None for n in numbers]
