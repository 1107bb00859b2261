"""Does it pay, and when not? Models that people train, in scripts as they write them, with the drop-in sampler.

A cell is a model with its base settings, or with one of them changed. What people do today, `shuffle=True`, is one
control, the same fixed batches in random order are the other. Learning rates are chosen with the first control alone,
on seeds that do not count. Losses are those of the whole training part, as it is: without augmentation and dropout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

from omegaconf import DictConfig, OmegaConf

from experiments.report.kinds import DataFrame, Series
from experiments.report.names import LOSS
from experiments.report.statistics import SAME_LOSS, Estimate, counted, estimate, looking, median
from experiments.report.text import minus
from experiments.studies.parts import Part
from experiments.studies.practice_training import BATCH, COIN, EXAMPLE, FIXED, REFORMED, ROTATED, SHUFFLE, cost, train
from experiments.studies.verdicts import Verdict, beyond_chance, judge, looks_at, repeated, select

PILOT, TRAINED, COST = "pilot", "trained", "cost"  # kinds of parts
PILOT_SEEDS = 1000  # the first of those that do not count
SCORE = "score"  # on the validation part
SAME_SCORE = 0.25  # points: a smaller difference of scores does not matter
CHEAP = 1.1  # times a step without orders
MEASURABLE = 1e6  # parameters whose memory is told from other things
ARMS = {
    SHUFFLE: "fresh batches",
    FIXED: "fixed batches at random",
    COIN: "batches by coins",
    BATCH: "CD-GraB's batches",
    ROTATED: "CD-GraB's batches, rotated",
    EXAMPLE: "CD-GraB's examples",
    REFORMED: "CD-GraB's reformed batches",
}
CHANGES = {  # of a base setting, in words
    "augment": "augmented",
    "batch": "batch {:g}",
    "dropout": "dropout {:g}",
    "epochs": "{:g} epochs",
    "examples": "{:,} examples",
    "half": "float32",
    "optimiser": "{}",
    "rate": "rate × {:g}",
    "schedule": "{} rate",
    "weight_decay": "weight decay {:g}",
}


def parts(settings: DictConfig) -> Iterator[Part]:
    """Pilots first; then cell by cell, the most valuable first, so that whoever stops early has whole ones; then what a
    step costs, alone."""
    for base in _bases(settings):
        for rate, seed in product(settings.tried[base], range(PILOT_SEEDS, PILOT_SEEDS + settings.pilots)):
            yield _part(PILOT, _base(settings, base), base, SHUFFLE, seed, rate)
    for name in cells(settings):
        chosen = cell(settings, name)
        for seed, arm in product(range(looks_at(settings, settings.cells[name])[-1]), chosen["arms"]):
            yield _part(TRAINED, chosen, name, arm, seed, _rate(settings, name))
    for name in cells(settings):
        chosen = cell(settings, name)
        for arm in [arm for arm in (BATCH, EXAMPLE) if arm in chosen["arms"]] if chosen["timed"] else ():
            yield _part(COST, chosen, name, arm, 0, _rate(settings, name))


def _part(kind: str, chosen: dict, name: str, arm: str, seed: int, rate: float) -> Part:
    key = {"kind": kind, "cell": name, "rate": rate, "arm": arm, "seed": seed}
    return Part(key, partial(cost if kind == COST else train, chosen, arm, seed, rate), alone=kind == COST)


def cells(settings: DictConfig) -> list[str]:
    """Those whose data is there, the most valuable first."""
    return [name for name, own in settings.cells.items() if settings.models[own.base].task in settings.tasks]


def cell(settings: DictConfig, name: str) -> dict:
    """All settings of a cell."""
    own = OmegaConf.to_container(settings.cells[name])
    return {"timed": not own.keys() & CHANGES} | _base(settings, own["base"]) | own


def cell_label(settings: DictConfig, name: str) -> str:
    """LeNet, CIFAR-10: batch 16, rate × 0.25"""
    own = settings.cells[name]
    changes = ", ".join(words.format(own[key]) for key, words in CHANGES.items() if key in own)
    return settings.models[own.base].label + f": {changes}" * bool(changes)


def _bases(settings: DictConfig) -> list[str]:
    """The models of the cells."""
    return list(dict.fromkeys(settings.cells[name].base for name in cells(settings)))


def _base(settings: DictConfig, base: str) -> dict:
    own = OmegaConf.to_container(settings.models[base])
    data = "embedded" if settings.sources[own["task"]] == "embedded" else "auto"
    return (
        OmegaConf.to_container(settings.usual)
        | own
        | {"data": data, "device": settings.device, "timed_steps": settings.timed_steps}
    )


def _rate(settings: DictConfig, name: str) -> float:
    own = settings.cells[name]
    return float(f"{settings.chosen[own.base] * own.get('rate', 1):.6g}")


# -- what it says -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """One arm with another in one cell. gains: by seed, above 0 where `arm` is better, in % of the control's loss or in
    points of the score; looks: after how many seeds it is judged."""

    cell: str
    arm: str
    control: str
    metric: str
    gains: Series
    looks: list[int]

    @property
    def gain(self) -> Estimate:
        with looking(len(self.looks)):
            return estimate(self.gains)


def ends(table: DataFrame) -> DataFrame:
    """Means over the second half of the epochs, by cell, arm and seed; "last" and the name: after the last one."""
    runs = (
        select(table, kind=TRAINED).sort_values("epoch").groupby(["cell", "arm", "seed"])[[LOSS, SCORE, "train_score"]]
    )
    return runs.mean().join(runs.last().add_prefix("last "))


def compared(means: DataFrame, settings: DictConfig, name: str, arm: str, control: str, metric: str) -> Comparison:
    """means: as of `ends`."""
    ours, theirs = (means.loc[(name, which), metric] for which in (arm, control))
    gains = ours - theirs if metric == SCORE else 100 * (theirs - ours) / theirs.mean()
    return Comparison(name, arm, control, metric, gains, looks_at(settings, settings.cells[name]))


def comparisons(means: DataFrame, settings: DictConfig) -> Iterator[Comparison]:
    """Of every cell, all that are judged."""
    for name in cells(settings):
        of_cell = partial(compared, means, settings, name)
        yield of_cell(FIXED, SHUFFLE, LOSS)
        for arm in (arm for arm in cell(settings, name)["arms"] if arm not in (SHUFFLE, FIXED)):
            yield of_cell(arm, SHUFFLE, LOSS)
            yield of_cell(arm, FIXED, LOSS)
            yield of_cell(arm, SHUFFLE, SCORE)
            if arm == COIN:
                yield of_cell(BATCH, COIN, LOSS)
            if arm == ROTATED:
                yield of_cell(ROTATED, BATCH, LOSS)


def judged(means: DataFrame, settings: DictConfig) -> Iterator[tuple[Comparison, Verdict]]:
    """Every comparison, with p values adjusted for all of them; other claims have none."""
    found = list(comparisons(means, settings))
    return zip(found, beyond_chance(_better(each, settings) for each in found), strict=True)


def verdicts(table: DataFrame, settings: DictConfig) -> Iterator[Verdict]:
    yield from (_better(each, settings) for each in comparisons(ends(table), settings))
    yield from (_cheap(table, settings, name) for name in cells(settings) if cell(settings, name)["timed"])
    yield from _rates(table, settings)


def _better(each: Comparison, settings: DictConfig) -> Verdict:
    loss, where = each.metric == LOSS, cell_label(settings, each.cell)
    words = f"{where}: {ARMS[each.arm]} beat {ARMS[each.control]} in {'train loss' if loss else 'validation score'}"
    note = "gain in % of the loss" if loss else "gain in points"
    with looking(len(each.looks)):
        verdict = judge(words, each.gains, note, least=0.0, margin=SAME_LOSS if loss else SAME_SCORE)
    return repeated(verdict, each.looks[-1]) if "seeds" in settings.cells[each.cell] else verdict


def _cheap(table: DataFrame, settings: DictConfig, name: str) -> Verdict:
    rows, trained = select(table, kind=COST, cell=name, arm=BATCH), select(table, kind=TRAINED, cell=name)
    words = f"{cell_label(settings, name)}: a step with ordered batches takes at most {CHEAP:g} times as long"
    memory = memory_of(rows, trained["dim"].iloc[0])
    note = f"median of {len(rows)} rounds; plain {rows['plain_us'].median():.0f} µs"
    note += f"; {memory:.1f} floats per parameter more" if memory == memory else ""
    return repeated(judge(words, median(list(rows["ours_us"] / rows["plain_us"])), note, most=CHEAP))


def memory_of(costs: DataFrame, dim: float) -> float:
    """Floats per parameter; NaN for models so small that the allocator's own rounding decides."""
    return costs["floats_per_parameter"].iloc[0] if dim >= MEASURABLE else math.nan


def pilots(table: DataFrame, base: str) -> Series:
    """Scores of a model by rate, the mean over the seeds that do not count."""
    return select(table, kind=PILOT, cell=base).groupby("rate")[SCORE].mean()


def _rates(table: DataFrame, settings: DictConfig) -> Iterator[Verdict]:
    for base in (base for base in _bases(settings) if settings.tried[base]):
        scores = pilots(table, base)
        words = f"{settings.models[base].label}: the rate is the best of those tried with shuffle=True"
        tried = ", ".join(f"{rate:g}: {minus(f'{score:.2f}')}" for rate, score in scores.items())
        ratio = counted(settings.chosen[base] / scores.idxmax())
        yield repeated(judge(words, ratio, f"chosen / best; scores of pilots {tried}", least=1, most=1))
