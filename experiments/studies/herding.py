"""Figure 10 of the CD-GraB paper: the parallel herding bound of fixed random vectors, reordered round after round."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import product

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from cdgrab import streams
from cdgrab.errors import CdgrabError
from cdgrab.herding import parallel_herding_bound
from cdgrab.sorters import SORTERS, make_sorter
from experiments.report import names, plots, text
from experiments.report.kinds import Axes, DataFrame, Figure
from experiments.report.names import ALONE, OURS, sorter_label
from experiments.report.published import published
from experiments.report.statistics import estimate, power_exponents
from experiments.store.records import significant
from experiments.studies.base import Study
from experiments.studies.parts import Part
from experiments.studies.verdicts import Verdict, judge, judge_every, select

PUBLISHED_VECTORS = 1_000_000  # over all workers, in every panel of Figure 10
FLOOR_ROUNDS = 5  # the floor is the mean bound of this many last rounds
FAR_ABOVE = 3  # a bound above this many floors is still falling


def parts(settings: DictConfig) -> Iterator[Part]:
    """One part for every sorter, worker count and seed; and one worker with all vectors for every seed."""
    for workers in settings.workers:
        if settings.vectors % workers:
            raise CdgrabError(f"{settings.vectors} vectors cannot be split evenly over {workers} workers")
    cases = [*product(settings.workers, settings.sorters), (1, ALONE)]
    for seed, (workers, sorter) in product(range(settings.seeds), cases):
        key = {"sorter": sorter, "workers": workers, "seed": seed}
        yield Part(key, partial(_bounds, settings, sorter, workers, seed))


def bounds_by_round(vectors: Tensor, sorter: str, seed: int, rounds: int) -> list[float]:
    """The bound of the first order and after every reorder round; vectors [workers, units, dim]."""
    workers, units, dim = vectors.shape
    chosen = make_sorter(sorter, workers=workers, units=units, dim=dim, seed=seed)
    rows, first_row, positions = vectors.flatten(0, 1), units * torch.arange(workers)[:, None], torch.arange(units)
    bounds = []
    for epoch in range(rounds + 1):
        visited = rows[(chosen.order(epoch) + first_row).flatten()].view_as(vectors)
        bounds.append(parallel_herding_bound(visited))
        chosen.observe(positions, visited)
    return bounds


@lru_cache(maxsize=1)
def random_vectors(vectors: int, dim: int, seed: int) -> Tensor:
    """Unif(0, 1), centred, then each of length 1: [vectors, dim], float64."""
    drawn = torch.from_numpy(streams.stream(seed, "study", 2).random((vectors, dim)))
    drawn -= drawn.mean(0)
    return drawn / drawn.norm(dim=1, keepdim=True)


def _bounds(settings: DictConfig, sorter: str, workers: int, seed: int) -> dict[str, list]:
    vectors = random_vectors(settings.vectors, settings.dim, seed).view(workers, -1, settings.dim)
    bounds = bounds_by_round(vectors, sorter, seed, settings.rounds)
    return {"round": list(range(len(bounds))), "bound": significant(bounds)}


# -- what it says -----------------------------------------------------------------------------------------------------


def verdicts(table: DataFrame, settings: DictConfig) -> Iterator[Verdict]:
    levels, balancing = floors(table), _descending(settings)
    yield from (_halving(table, levels, sorter) for sorter in (*balancing, ALONE))
    if OURS in balancing:
        yield _growth(levels, OURS, "CD-GraB's floor does not grow with the workers", most=0.05)
        yield _as_low_as_alone(levels)
    for sorter in balancing:
        if sorter != OURS:
            grows = f"{sorter_label(sorter)}'s floor grows"
            yield _growth(levels, sorter, f"{grows} like √workers", least=0.4, most=0.6)
            yield _growth(levels, sorter, f"{grows} linearly, as the paper's text says", least=0.9, most=1.1)
    yield from (_published_floor(levels, settings, sorter) for sorter in settings.sorters)


def floors(table: DataFrame) -> DataFrame:
    """The mean bound of the last rounds, by sorter, workers and seed; of all rounds for sorters that don't descend."""
    descends = table["sorter"].map(lambda sorter: SORTERS[sorter].needs_gradients)
    settled = table[~descends | (table["round"] > table["round"].max() - FLOOR_ROUNDS)]
    return settled.groupby(["sorter", "workers", "seed"], as_index=False)["bound"].mean()


def published_bounds(workers: int, vectors: int) -> dict[str, DataFrame]:
    """The paper's curves by sorter; empty unless it had the same workers and vectors."""
    curves = published("study_herding", "bound", column=workers) if vectors == PUBLISHED_VECTORS else {}
    return {names.PUBLISHED_SORTERS[series]: curve for series, curve in curves.items()}


def published_floors(settings: DictConfig) -> DataFrame:
    """Like `floors` of the paper's means, in a table of its own; empty unless the settings are the paper's."""
    import pandas as pd

    curves = [
        curve.rename(columns={"x": "round", "mean": "bound"}).assign(sorter=sorter, workers=workers, seed=-1)
        for workers in settings.workers
        for sorter, curve in published_bounds(workers, settings.vectors).items()
    ]
    return floors(pd.concat(curves)) if curves else pd.DataFrame(columns=["sorter", "workers", "seed", "bound"])


def _descending(settings: DictConfig) -> list[str]:
    return [sorter for sorter in settings.sorters if SORTERS[sorter].needs_gradients]


def _halving(table: DataFrame, levels: DataFrame, sorter: str) -> Verdict:
    """H' = H/2 + c has the floor 2c, and halves the excess of a bound over its floor."""
    levels = levels.rename(columns={"bound": "floor"})
    rows = select(table, sorter=sorter).merge(levels, on=["sorter", "workers", "seed"])
    after = rows.groupby(["workers", "seed"])["bound"].shift(-1)
    ratio = ((after - rows["floor"]) / (rows["bound"] - rows["floor"]))[rows["bound"] >= FAR_ABOVE * rows["floor"]]
    words = f"{sorter_label(sorter)}: a round at least halves what the bound is above its floor"
    note = f"mean factor of {ratio.count()} rounds that begin above {FAR_ABOVE} floors"
    return judge(words, ratio.groupby(rows["seed"]).mean().dropna(), note, most=0.5)


def _growth(levels: DataFrame, sorter: str, words: str, **limits: float) -> Verdict:
    rows = select(levels, sorter=sorter)
    note = f"exponent of the floor in workers, fitted to {rows['workers'].min()} … {rows['workers'].max()} workers"
    return judge(words, power_exponents(rows, "workers", "bound"), note, **limits)


def _as_low_as_alone(levels: DataFrame) -> Verdict:
    alone = select(levels, sorter=ALONE).set_index("seed")["bound"]
    ours = select(levels, sorter=OURS).groupby("seed")["bound"].mean()
    words = "CD-GraB's floor is no higher than that of one worker with all vectors"
    return judge(words, ours / alone, "ratio, mean over worker counts", most=1.1)


def _published_floor(levels: DataFrame, settings: DictConfig, sorter: str) -> Verdict:
    theirs = select(published_floors(settings), sorter=sorter).set_index("workers")["bound"]
    what = f"{sorter_label(sorter)}'s {'floor' if SORTERS[sorter].needs_gradients else 'level'}"
    words = f"{what} is within 15 % of the published curve, at every worker count"
    ours = select(levels, sorter=sorter).set_index("workers")["bound"]
    ratios = (ours / theirs.reindex(ours.index)).dropna()
    note = "ours / published where it decides, {cell} workers"
    without = f"nothing was published for {settings.vectors:,} vectors"
    return judge_every(words, dict(list(ratios.groupby("workers"))), note, without, least=0.85, most=1.15)


# -- figure and table -------------------------------------------------------------------------------------------------


@plots.styled
def bounds_and_floors(study: Study) -> Figure:
    """The bound round by round for every worker count, and the floors against the workers; the paper's dashed."""
    workers = list(study.settings.workers)
    columns = -(-(len(workers) + 1) // 2)
    figure, axes = plots.panels(2, columns, 3.3 * columns, 6.2)
    axes = axes.flatten()
    for panel, count in zip(axes, workers, strict=False):
        _draw_rounds(panel, study, count)
        panel.sharey(axes[0])
    _draw_floors(axes[-1], study)
    for panel in axes[len(workers) : -1]:
        panel.set_axis_off()
    title = f"Parallel herding bound of {study.settings.vectors:,} random vectors, {study.settings.dim} dimensions"
    return plots.finish(figure, title, f"mean ± std over seeds; floor: mean of the last rounds · {study.caption()}")


@text.table
def floor_table(study: Study) -> Iterator[dict[str, str]]:
    """Ours with its interval, and the paper's where it has the same vectors and workers."""
    ours, theirs = floors(study.table), published_floors(study.settings).set_index(["sorter", "workers"])["bound"]
    for (workers, sorter), some in ours.groupby(["workers", "sorter"], sort=True):
        paper = f"{theirs[sorter, workers]:.3g}" if (sorter, workers) in theirs.index else "–"
        row = {"workers": str(workers), "sorter": sorter_label(sorter), "floor": str(estimate(some["bound"]))}
        yield row | {"the paper's": paper}


def _draw_rounds(panel: Axes, study: Study, workers: int) -> None:
    for sorter in (*study.settings.sorters, ALONE):
        rows = select(study.table, sorter=sorter, workers=1 if sorter == ALONE else workers)
        by_round = rows.groupby("round")["bound"]
        mean = by_round.mean()
        plots.mean_std(panel, mean.index, mean, by_round.std().fillna(0.0), **names.sorter_line(sorter))
    for sorter, curve in published_bounds(workers, study.settings.vectors).items():
        style = plots.PUBLISHED | {"color": names.sorter_colour(sorter), "label": f"{sorter_label(sorter)}, paper"}
        panel.plot(curve["x"], curve["mean"], **style)
    panel.set(title=f"{workers} workers", xlabel="reorder round", ylabel="herding bound")
    plots.whole_numbers(panel.xaxis, 5)
    plots.log_ticks(panel.yaxis)


def _draw_floors(panel: Axes, study: Study) -> None:
    """Log-log, each with the power law fitted to it."""
    ours, theirs = floors(study.table), published_floors(study.settings)
    for sorter in _descending(study.settings):
        some, paper, colour = select(ours, sorter=sorter), select(theirs, sorter=sorter), names.sorter_colour(sorter)
        mean = some.groupby("workers")["bound"].mean()
        exponent = power_exponents(some, "workers", "bound").mean()
        x = np.log(mean.index.to_numpy())
        fit = np.exp(np.log(mean).mean() + exponent * (x - x.mean()))
        panel.plot(mean.index, fit, color=colour, lw=1)
        panel.scatter(some["workers"], some["bound"], color=colour, s=14, zorder=3)
        hollow = {"facecolors": "none", "edgecolors": colour, "marker": "s", "s": 34, "zorder": 3}
        panel.scatter(paper["workers"], paper["bound"], **hollow)
        words = f"workers$^{{{exponent:.2f}}}$"
        panel.annotate(words, (mean.index[-1], fit[-1]), (7, 0), textcoords="offset points", va="center", color=colour)
    panel.axhline(select(ours, sorter=ALONE)["bound"].mean(), **names.sorter_style(ALONE))
    panel.set(title="floor", ylabel="herding bound")
    counts = list(study.settings.workers)
    plots.log_x(panel, counts, "workers (□ the paper's)")
    plots.log_ticks(panel.yaxis)
    panel.set_xlim(counts[0] / 1.2, counts[-1] * (counts[-1] / counts[0]) ** 0.4)  # room for the exponents
