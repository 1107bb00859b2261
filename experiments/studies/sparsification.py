"""Sparse gradients: what ExDyna and its peers select, send and cost, and the losses that training with them reaches.

Synthetic gradients (heavy-tailed, layered, with error feedback) answer the questions about density, balance,
thresholds, time and bytes; tasks of the suite and a small sparse model those about convergence. What is asked of
synthetic gradients is asked again of real ones (`sparsification_real`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, pairwise, product

import numpy as np
from omegaconf import DictConfig

from experiments.report.kinds import DataFrame, Series
from experiments.report.names import BASELINE, LOSS, sorter_label
from experiments.report.names import OURS as BALANCED
from experiments.report.statistics import estimate
from experiments.studies import sparsification_real, sparsifiers
from experiments.studies.parts import Part, trained
from experiments.studies.sparsifiers import (
    CLOSE,
    DENSE,
    FAR,
    OURS,
    SAME_DENSITY,
    TOPK,
    TRAINED_DENSITY,
    layered,
    method_label,
    part_key,
    task_label,
)
from experiments.studies.training import overrides
from experiments.studies.verdicts import Verdict, judge, repeated, select

LAST = 20  # a settled value is the mean over this many last iterations
WARM_UP, WINDOW = 100, 50  # iterations after which the density must hold; over which it is averaged at 0.001
CHEAPER = 8  # how many times faster selecting should be with ExDyna
SAME_RATIO = 0.01  # a ratio of losses that is nearer to 1 does not matter
LONG_SETTLED = 20  # a density that stays close for this many iterations has settled


def parts(settings: DictConfig) -> Iterator[Part]:
    """Seed by seed; within a seed what takes long comes last. Seeds are added to the training only: what is measured
    on synthetic gradients varies little, or has a number of its own."""
    own, synthetic_seeds = _own_seeds(settings), settings.get("synthetic_seeds", settings.seeds)
    for seed in range(max(synthetic_seeds, *own.values())):
        synthetic = (_part(seed, *case) for case in _cases(settings))
        for part in (*synthetic, *_timings(settings, seed), *_trainings(settings, seed)):
            if seed < own.get(part.key["measure"], synthetic_seeds):
                yield part
    yield from sparsification_real.parts(settings)


def _own_seeds(settings: DictConfig) -> dict[str, int]:
    """Results that were made before there were numbers for single measures have as many seeds of everything."""
    timed = settings.get("timed_seeds", settings.seeds)
    return {"imbalance": settings.balance_seeds, "time": timed, "training": settings.seeds}


def _cases(settings: DictConfig) -> Iterator[tuple]:
    """For synthetic gradients: the measure, the function that computes it, and its arguments except the seed."""
    densities, methods = settings.densities, settings.methods
    dim, length, usual = settings.dim, settings.iterations, (settings.workers, densities[0])
    even_layers = partial(layered, layers=24, decades=1.0)  # for the balance: so that every partition can be balanced
    settling = partial(layered, shrinks=True)
    for density, method in product(densities, methods):
        yield "density", layered, method, settings.workers, density, dim, length
    for density, workers in product(densities, settings.held_workers):
        yield "held", layered, OURS, workers, density, settings.held_dim, length
    for crowd, method in product(settings.crowds, (*methods, DENSE)):
        some = length if method == sparsifiers.PUBLISHED else 3 * LAST  # the paper's threshold takes long to settle
        yield "build-up", layered, method, crowd, densities[0], dim, some
    for rule in sparsifiers.RULES:
        yield "imbalance", even_layers, rule, *usual, dim, length
    for rule in sparsifiers.THRESHOLDS:
        yield "settling", settling, rule, *usual, dim, settings.settling
    for method in sparsifiers.ABLATED:
        yield "sparse model", sparsifiers.sparse_model, method, *usual, settings.sparse_steps


def _timings(settings: DictConfig, seed: int) -> Iterator[Part]:
    timed = [method for method in settings.methods if method != sparsifiers.PUBLISHED]  # it selects like `exdyna`
    for workers in settings.timed_workers:
        case = (workers, settings.densities[0])
        compute = partial(sparsifiers.selection_seconds, timed, *case, settings.timed_dim, seed)
        yield Part(part_key("time", "", *case, seed), compute, alone=True)


def _trainings(settings: DictConfig, seed: int) -> Iterator[Part]:
    """The first two methods with all sorters, the others with the last one."""
    tasks = {task: (task, settings.trained, {}) for task in settings.tasks}
    if settings.resnet and "cifar10" in tasks:
        tasks[sparsifiers.RESNET] = ("cifar10", settings.resnet_trained, settings.resnet)
    for name, (task, methods, changes) in tasks.items():
        for method in methods:
            for sorter in settings.sorters if method in settings.trained[:2] else settings.sorters[-1:]:
                run = overrides(settings, task, sorter, **changes)
                key = part_key("training", method, 0, TRAINED_DENSITY, seed, name, sorter)
                yield trained(key, sparsifiers.sparsified(run, method), seed, sparsifiers.by_epoch)


def _part(seed: int, measure: str, compute: Callable, method: str, workers: int, density: float, *more: int) -> Part:
    key = part_key(measure, method, workers, density, seed)
    return Part(key, partial(compute, method, workers, density, *more, seed))


# -- what it says -----------------------------------------------------------------------------------------------------


def verdicts(table: DataFrame, settings: DictConfig) -> Iterator[Verdict]:
    held = product(settings.densities, settings.held_workers)
    synthetic = chain(
        *(_holds(select(table, measure="held", workers=some, target=density), density, some) for density, some in held),
        _build_up(table, settings),
        _settles(table, settings),
        (_fewer_bytes(table, settings),),
        _sparse_verdicts(table),
    )
    own = _own_seeds(settings)
    yield from (repeated(verdict, settings.get("synthetic_seeds", settings.seeds)) for verdict in synthetic)
    yield from (repeated(verdict, own["imbalance"]) for verdict in _balance(table, settings))
    timed = chain(*(_cheaper(table, workers, settings) for workers in settings.timed_workers))
    yield from (repeated(verdict, own["time"]) for verdict in timed)
    for task, rows in select(table, measure="training").groupby("task", sort=False):
        yield from _converges(rows, task, settings)
    yield from sparsification_real.verdicts(table, settings)


def settled_mean(rows: DataFrame, column: str) -> Series:
    """The mean over the last iterations, one per seed."""
    last = rows[rows["iteration"] > rows["iteration"].max() - LAST]
    return last.groupby("seed")[column].mean()


def settled_window(rows: DataFrame) -> str:
    length = int(rows["iteration"].max()) + 1
    return f"the last {min(LAST, length)} of {length} iterations"


def settling_time(rows: DataFrame, after: int, until: int) -> Series:
    """Iterations until the density stays close for a while, one per seed; all iterations if it never does."""

    def first(ratios: Series) -> int:
        near = ((ratios - 1).abs() <= CLOSE).rolling(LONG_SETTLED).min()
        return int(near.argmax()) - LONG_SETTLED + 1 if near.any() else len(near)

    rows = rows[rows["iteration"].between(after, until - 1)].sort_values("iteration")
    return rows.groupby("seed")["ratio"].agg(first)


def ends(rows: DataFrame) -> Series:
    """The mean loss over the last half of the epochs, one per seed."""
    return rows[2 * rows["epoch"] > rows["epoch"].max()].groupby("seed")[LOSS].mean()


def _holds(rows: DataFrame, density: float, workers: int) -> Iterator[Verdict]:
    """The density of ExDyna with its default options, and how evenly the workers are loaded."""
    length = int(rows["iteration"].max()) + 1
    start = min(WARM_UP, length // 2)
    later = rows[rows["iteration"] >= start]
    error, seed = (later["ratio"] - 1).abs(), later["seed"]
    where, note = f"ExDyna, density {density:g}, {workers} workers", f"iterations {start} to {length}"

    def within(limit: float, least: float) -> Verdict:
        words = f"{where}: iterations within ±{limit:.0%} of the target"
        return judge(words, (error <= limit).groupby(seed).mean(), note, least=least)

    if density >= 0.01:
        yield within(CLOSE, 0.95)
    else:
        windows = later.groupby(["seed", (later["iteration"] - start) // WINDOW])["ratio"].mean()
        worst = (windows - 1).abs().groupby("seed").max()
        words = f"{where}: error of the mean density of {WINDOW} iterations, where it is largest"
        yield judge(words, worst, note, most=CLOSE)
        yield within(FAR, 0.9)
    words = f"{where}: imbalance, by which padding lengthens what is sent"
    yield judge(words, later["imbalance"].groupby(seed).mean(), note, most=0.2)


def _build_up(table: DataFrame, settings: DictConfig) -> Iterator[Verdict]:
    for method in (OURS, TOPK):
        rows = select(table, measure="build-up", method=method, target=settings.densities[0])
        by_workers = {workers: settled_mean(select(rows, workers=workers), "ratio") for workers in settings.crowds}
        yield from sparsification_real.build_up(
            method_label(method), by_workers, settled_window(rows), grows=method == TOPK
        )


def _balance(table: DataFrame, settings: DictConfig) -> Iterator[Verdict]:
    """Each rule against the one before, seed by seed: imbalances of different layouts of layers differ by factors."""
    rows = select(table, measure="imbalance")
    for before, rule in pairwise(sparsifiers.RULES):
        less, more = (settled_mean(select(rows, method=method), "imbalance") for method in (rule, before))
        names = [sparsifiers.variant(method) for method in (rule, before)]
        words = f"the {names[0]} rule loads workers more evenly than the {names[1]} one"
        note = f"mean imbalance {less.mean():.2f} and {more.mean():.2f}, {settings.workers} workers"
        ratio = np.log((less / more).astype(float))
        yield judge(f"{words}: log ratio of the imbalance", ratio, f"{note}; {settled_window(rows)}", most=0.0)


def _settles(table: DataFrame, settings: DictConfig) -> Iterator[Verdict]:
    drop = settings.settling // 3
    for when, after, until in (("at the start", 0, drop), ("after a tenfold drop", drop, settings.settling)):
        length = until - after
        counted, proportional, paper = (
            settling_time(select(table, measure="settling", method=method), after, until)
            for method in sparsifiers.THRESHOLDS[:3]
        )
        yield judge(f"threshold by counting: iterations to ±{CLOSE:.0%} {when}", counted, most=LAST)
        yield judge(f"the paper's threshold: iterations to ±{CLOSE:.0%} {when}", paper, most=WARM_UP)
        note = f"iterations: {_spelt(proportional, length)} − {_spelt(paper, length)}"
        if (paper >= length).any():
            note += "; what never settled counts as all of them, so that the difference is at least this"
        unless = "neither settles" if (proportional >= length).all() and (paper >= length).all() else ""
        words = f"the proportional rule settles sooner than the paper's {when}"
        yield judge(words, proportional - paper, note, unless, most=0.0)


def _spelt(times: Series, length: int) -> str:
    """The mean, and how many seeds never settled."""
    never = int((times >= length).sum())
    if never == len(times):
        return f"never within {length}"
    return f"{times.mean():.0f}" + f" (never within {length} on {never} of {len(times)} seeds)" * bool(never)


def _cheaper(table: DataFrame, workers: int, settings: DictConfig) -> Iterator[Verdict]:
    """For the mean worker and for the slowest one: the exchange waits for all."""
    rows = select(table, measure="time", workers=workers)
    means = select(rows, timed=OURS)[["longest", "ratio"]].mean()
    notes = {
        "selection": f"{settings.timed_dim:,} coordinates, mean over workers",
        "slowest": "ExDyna's longest partition is {longest:.2f} of the mean one, its density {ratio:.3f} of the target",
    }
    for column, whose in (("selection", "a worker"), ("slowest", "the slowest worker")):
        times = rows.pivot(index="seed", columns="timed", values=column)
        words = f"selecting: Top-k's time / ExDyna's for {whose} of {workers}, one core"
        yield judge(words, times[TOPK] / times[OURS], notes[column].format(**means), least=CHEAPER)


def _fewer_bytes(table: DataFrame, settings: DictConfig) -> Verdict:
    workers, density = settings.workers, settings.densities[0]
    rows = select(table, measure="build-up", workers=workers, target=density)
    rows = {method: select(rows, method=method) for method in (OURS, DENSE)}
    ours, dense = (settled_mean(some, "bytes") for some in rows.values())
    words = f"ExDyna's bytes / dense ones with {workers} workers at density {density:g}"
    note = "workers gather k indices of four bytes, which costs half of summing k values: 1.5 · density, and padding"
    return judge(words, ours / dense, f"{note}; {settled_window(rows[OURS])}", most=1.7 * density)


def _sparse_verdicts(table: DataFrame) -> Iterator[Verdict]:
    """An embedding layer: a worker's gradient is zero except in a few rows."""
    rows = select(table, measure="sparse model")
    ours, dense, forgetful = (select(rows, method=method) for method in (OURS, DENSE, sparsifiers.FORGETFUL))
    what = f"sparse model ({ours['nonzero'].mean():.1%} of a worker's gradient is not zero)"
    density = ours.groupby("seed")["density"].mean() / ours["target"].iloc[0]
    yield judge(f"{what}: ExDyna's loss / dense loss", ends(ours) / ends(dense), most=1.05)
    yield judge(f"{what}: density / target", density, least=0.9, most=1.1)
    forgot = f"{what}: without error feedback the loss ends higher than with it, ratio"
    yield judge(forgot, ends(forgetful) / ends(ours), least=1.0, margin=SAME_RATIO)


def _converges(rows: DataFrame, task: str, settings: DictConfig) -> Iterator[Verdict]:
    def loss(method: str, sorter: str = BALANCED) -> Series:
        return ends(select(rows, method=method, sorter=sorter))

    def density(method: str, sorter: str = BALANCED) -> Series:
        return select(rows, method=method, sorter=sorter).groupby("seed")["density"].mean()

    name = task_label(task)
    for sorter in settings.sorters:
        words = f"{name}, {sorter_label(sorter)}: train loss with ExDyna / dense at density {TRAINED_DENSITY:g}"
        note = f"actual density {density(OURS, sorter).mean():.4f}"
        yield judge(words, loss(OURS, sorter) / loss(DENSE, sorter), note, most=1.05)
    done = rows["method"].unique()
    for method in [method for method in settings.trained[2:] if method in done]:
        ours, theirs = density(OURS), density(method)
        note = f"actual densities {ours.mean():.4f} and {theirs.mean():.4f}"
        words = f"{name}: {method_label(method)} keeps ExDyna's density"
        yield judge(words, theirs / ours, f"ratio; {note}", least=1 - SAME_DENSITY, most=1 + SAME_DENSITY)
        words = f"{name}: train loss with ExDyna / {method_label(method)}"
        alike = abs(theirs.mean() / ours.mean() - 1) <= SAME_DENSITY
        unless = "" if alike else "the densities differ, with any number of seeds"
        verdict = judge(words, loss(OURS) / loss(method), note, unless, most=1.0, margin=SAME_RATIO)
        yield repeated(verdict, len(ours)) if unless else verdict  # more seeds would not make them comparable
    if {BASELINE, BALANCED} <= set(settings.sorters):
        yield _adds_up(name, {m: 100 * (1 - loss(m, BALANCED) / loss(m, BASELINE)) for m in (DENSE, OURS)})


def _adds_up(name: str, gains: dict[str, Series]) -> Verdict:
    """gains: by how many per cent CD-GraB ends lower than D-RR, by method."""
    dense = estimate(gains[DENSE])
    unless = "" if dense.low > 0 else "in so few epochs dense training shows no gain of CD-GraB: it takes more"
    note = f"difference in points; {gains[OURS].mean():.2f} % of the train loss with ExDyna, {dense.mean:.2f} % without"
    words = f"{name}: CD-GraB's gain over D-RR is as large with ExDyna as without"
    return judge(words, gains[OURS] - gains[DENSE], note, unless, least=-0.5)
