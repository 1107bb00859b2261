"""Figure 10: the parallel herding bound of fixed random vectors, reordered round after round."""

from __future__ import annotations

import math
from functools import lru_cache, partial

import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor

from cdgrab import streams
from cdgrab.errors import CdgrabError
from cdgrab.herding import parallel_herding_bound
from cdgrab.sorters import SORTERS, make_sorter
from experiments.report.published import SORTERS as PUBLISHED_SERIES
from experiments.report.published import published
from experiments.studies.base import Part, significant
from experiments.studies.style import ALONE, label
from experiments.studies.verdicts import Claim, Verdict, estimate, judge, judge_every, power_exponents

FLOOR_ROUNDS = 5  # the floor is the mean bound of so many last rounds
FAR_ABOVE = 3  # a bound of so many floors is still on its way down


def parts(settings: DictConfig) -> list[Part]:
    """One for every sorter, worker count and seed; and one worker with all vectors for every seed."""
    for workers in settings.workers:
        if settings.vectors % workers:
            raise CdgrabError(f"{settings.vectors} vectors cannot be split evenly over {workers} workers")
    cases = [(sorter, workers) for workers in settings.workers for sorter in settings.sorters] + [(ALONE, 1)]
    return [
        Part({"sorter": sorter, "workers": workers, "seed": seed}, partial(_bounds, settings, sorter, workers, seed))
        for seed in range(settings.seeds)
        for sorter, workers in cases
    ]


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


# -- what it says -----------------------------------------------------------------------------------------------------


def verdicts(table: pd.DataFrame, settings: DictConfig) -> list[Verdict]:
    levels = floors(table)
    balancing = [sorter for sorter in settings.sorters if SORTERS[sorter].needs_gradients]
    lines = [_halving(table, sorter) for sorter in (*balancing, ALONE)]
    if "cd_grab" in balancing:
        lines += [_growth(levels, "cd_grab", "CD-GraB's floor does not grow with the workers", most=0.05)]
        lines += [_as_low_as_alone(levels)]
    for sorter in balancing:
        if sorter != "cd_grab":
            lines += [_growth(levels, sorter, f"{label(sorter)}'s floor grows like √workers", 0.4, 0.6)]
            lines += [
                _growth(levels, sorter, f"{label(sorter)}'s floor grows linearly, as the paper's text says", 0.9, 1.1)
            ]
    return lines + [_published_floor(levels, settings, sorter) for sorter in settings.sorters]


def floors(table: pd.DataFrame) -> pd.DataFrame:
    """The mean bound of the last rounds, by sorter, workers and seed; of sorters that don't descend, of all rounds."""
    descends = table["sorter"].map(lambda sorter: SORTERS[sorter].needs_gradients)
    settled = table[~descends | (table["round"] > table["round"].max() - FLOOR_ROUNDS)]
    return settled.groupby(["sorter", "workers", "seed"], as_index=False)["bound"].mean()


def published_bounds(workers: int, vectors: int) -> dict[str, pd.DataFrame]:
    """The paper's curves by sorter; empty unless it had the same workers and vectors."""
    panel = f"m={workers} n={vectors // workers:.0e}".replace("e+0", "e")
    return {
        PUBLISHED_SERIES[series]: curve for series, curve in published("study_herding", "bound", column=panel).items()
    }


def published_floors(settings: DictConfig) -> pd.DataFrame:
    """Like `floors` of the paper's means, in a table of its own; empty unless the settings are the paper's."""
    curves = [
        curve.rename(columns={"x": "round", "mean": "bound"}).assign(sorter=sorter, workers=workers, seed=-1)
        for workers in settings.workers
        for sorter, curve in published_bounds(workers, settings.vectors).items()
    ]
    return floors(pd.concat(curves)) if curves else pd.DataFrame(columns=["sorter", "workers", "seed", "bound"])


def _halving(table: pd.DataFrame, sorter: str) -> Verdict:
    """H' = H/2 + c has the floor 2c, and what a bound has above its floor is halved."""
    rows = table[table["sorter"] == sorter].merge(
        floors(table).rename(columns={"bound": "floor"}), on=["sorter", "workers", "seed"]
    )
    after = rows.groupby(["workers", "seed"])["bound"].shift(-1)
    ratio = ((after - rows["floor"]) / (rows["bound"] - rows["floor"]))[rows["bound"] >= FAR_ABOVE * rows["floor"]]
    claim = Claim(f"{label(sorter)}: a round at least halves what the bound is above its floor", most=0.5)
    by_seed = ratio.groupby(rows["seed"]).mean().dropna()
    return judge(claim, estimate(by_seed), f"mean factor of {ratio.count()} rounds that begin above {FAR_ABOVE} floors")


def _growth(levels: pd.DataFrame, sorter: str, words: str, least: float = -math.inf, most: float = math.inf) -> Verdict:
    exponents = power_exponents(levels[levels["sorter"] == sorter], "workers", "bound")
    return judge(Claim(words, least, most), estimate(exponents), "exponent of the floor in workers")


def _as_low_as_alone(levels: pd.DataFrame) -> Verdict:
    alone = levels[levels["sorter"] == ALONE].set_index("seed")["bound"]
    ours = levels[levels["sorter"] == "cd_grab"].groupby("seed")["bound"].mean()
    claim = Claim("CD-GraB's floor is no higher than that of one worker with all vectors", most=1.1)
    return judge(claim, estimate(ours / alone), "ratio, mean over worker counts")


def _published_floor(levels: pd.DataFrame, settings: DictConfig, sorter: str) -> Verdict:
    theirs = published_floors(settings).query("sorter == @sorter").set_index("workers")["bound"]
    level = "floor" if SORTERS[sorter].needs_gradients else "level"
    claim = Claim(f"{label(sorter)}'s {level} is within 15 % of the published curve, at every worker count", 0.85, 1.15)
    ours = levels[(levels["sorter"] == sorter) & levels["workers"].isin(theirs.index)].set_index("workers")
    if ours.empty:
        return judge(claim, estimate([]), unless=f"nothing was published for {settings.vectors:,} vectors")
    ratios = ours["bound"] / theirs.reindex(ours.index)
    by_workers = {workers: estimate(some) for workers, some in ratios.groupby("workers")}
    return judge_every(claim, by_workers, "ours / published where it decides, {cell} workers")


def _bounds(settings: DictConfig, sorter: str, workers: int, seed: int) -> dict[str, list]:
    vectors = random_vectors(settings.vectors, settings.dim, seed).view(workers, -1, settings.dim)
    bounds = bounds_by_round(vectors, sorter, seed, settings.rounds)
    return {"round": list(range(len(bounds))), "bound": significant(bounds)}
