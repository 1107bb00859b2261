"""Sparse gradients: what ExDyna and its peers select, send and cost, and where training with them ends.

Synthetic gradients (heavy-tailed, layered, with error feedback) answer the questions about density, balance,
thresholds, time and bytes; tasks of the suite and a small sparse model those about convergence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise, product

import numpy as np
from omegaconf import DictConfig

from experiments.report.kinds import DataFrame, Series
from experiments.report.names import BASELINE, LOSS, sorter_label
from experiments.report.names import OURS as BALANCED
from experiments.report.statistics import estimate
from experiments.studies import sparsifiers
from experiments.studies.base import Part
from experiments.studies.paired import select
from experiments.studies.sparsifiers import (
    DENSE,
    OURS,
    PUBLISHED,
    RESNET,
    TOPK,
    TRAINED_DENSITY,
    layered,
    method_label,
    task_label,
    variant,
)
from experiments.studies.training import overrides
from experiments.studies.verdicts import Verdict, judge

LAST = 20  # iterations over which a settled value is taken
WARM_UP, WINDOW = 100, 50  # iterations after which the density must hold; over which its mean is taken at 0.001
CLOSE, FAR = 0.1, 0.3  # relative errors of the density
CHEAPER = 8  # times that selecting should be with ExDyna
SAME_DENSITY = 0.15  # relative difference of densities that still counts as the same
LONG_SETTLED = 20  # iterations that a density has to stay close to have settled


def parts(settings: DictConfig) -> list[Part]:
    """Seed by seed; within a seed what takes long comes last."""
    cases, found = _cases(settings), []
    for seed in range(settings.seeds):
        found += [_part(seed, *case) for case in cases]
        found += [*_timings(settings, seed), *_trainings(settings, seed)]
    for seed in range(settings.seeds, settings.balance_seeds):
        found += [_part(seed, *case) for case in cases if case[0] == "imbalance"]
    return found


def _cases(settings: DictConfig) -> list[tuple]:
    """Of synthetic gradients: the measure, what computes it, and its arguments but for the seed."""
    densities, methods = settings.densities, settings.methods
    dim, length, usual = settings.dim, settings.iterations, (settings.workers, densities[0])
    even_layers = partial(layered, layers=24, decades=1.0)  # for the balance: no partition is hopeless
    cases = [("density", layered, m, settings.workers, d, dim, length) for d, m in product(densities, methods)]
    held = product(densities, settings.held_workers)
    cases += [("held", layered, OURS, workers, density, settings.held_dim, length) for density, workers in held]
    for crowd, method in product(settings.crowds, (*methods, DENSE)):
        some = length if method == PUBLISHED else 3 * LAST  # the paper's threshold is long on its way
        cases.append(("build-up", layered, method, crowd, densities[0], dim, some))
    cases += [("imbalance", even_layers, rule, *usual, dim, length) for rule in sparsifiers.RULES]
    cases += [("settling", sparsifiers.settling, m, *usual, dim, settings.settling) for m in sparsifiers.THRESHOLDS]
    cases += [("sparse model", sparsifiers.sparse_model, m, *usual, settings.sparse_steps) for m in sparsifiers.ABLATED]
    return cases


def _timings(settings: DictConfig, seed: int) -> list[Part]:
    timed = [method for method in settings.methods if method != PUBLISHED]  # which selects as `exdyna` does
    density, dim, compute = settings.densities[0], settings.timed_dim, sparsifiers.selection_seconds
    return [
        Part(_key("time", "", workers, density, seed), partial(compute, timed, workers, density, dim, seed), alone=True)
        for workers in settings.timed_workers
    ]


def _trainings(settings: DictConfig, seed: int) -> list[Part]:
    """The first two methods with all sorters, the others with the last one."""
    tasks = {task: (task, settings.trained, {}) for task in settings.tasks}
    if settings.resnet and "cifar10" in tasks:
        tasks[RESNET] = ("cifar10", settings.resnet_trained, settings.resnet)
    found = []
    for name, (task, methods, changes) in tasks.items():
        for method in methods:
            for sorter in settings.sorters if method in settings.trained[:2] else settings.sorters[-1:]:
                run = overrides(settings, task, sorter, **changes)
                key = _key("training", method, 0, TRAINED_DENSITY, seed, name, sorter)
                found.append(Part(key, partial(sparsifiers.sparse_training, run, method, seed)))
    return found


def _part(seed: int, measure: str, compute: Callable, method: str, workers: int, density: float, *more: int) -> Part:
    key = _key(measure, method, workers, density, seed)
    return Part(key, partial(compute, method, workers, density, *more, seed))


def _key(measure: str, method: str, workers: int, density: float, seed: int, task: str = "", sorter: str = "") -> dict:
    key = {"measure": measure, "method": method, "workers": workers, "target": density, "task": task, "sorter": sorter}
    return key | {"seed": seed}


# -- what it says -----------------------------------------------------------------------------------------------------


def verdicts(table: DataFrame, settings: DictConfig) -> list[Verdict]:
    lines = []
    for density in settings.densities:
        for workers in settings.held_workers:
            lines += _holds(select(table, measure="held", workers=workers, target=density), density, workers)
    lines += [*_build_up(table, settings), *_balance(table, settings), *_settles(table, settings)]
    for workers in settings.timed_workers:
        lines += _cheaper(table, workers, settings)
    lines += [_fewer_bytes(table, settings), *_sparse_verdicts(table)]
    for task, rows in select(table, measure="training").groupby("task", sort=False):
        lines += _converges(rows, task, settings)
    return lines


def settled_mean(rows: DataFrame, column: str) -> Series:
    """Over the last iterations, one per seed."""
    last = rows[rows["iteration"] > rows["iteration"].max() - LAST]
    return last.groupby("seed")[column].mean()


def settling_time(rows: DataFrame, after: int, until: int) -> Series:
    """Iterations until the density stays close for a while, one per seed; the whole time where it never does."""

    def first(ratios: Series) -> int:
        near = ((ratios - 1).abs() <= CLOSE).rolling(LONG_SETTLED).min()
        return int(near.argmax()) - LONG_SETTLED + 1 if near.any() else len(near)

    rows = rows[rows["iteration"].between(after, until - 1)].sort_values("iteration")
    return rows.groupby("seed")["ratio"].agg(first)


def ends(rows: DataFrame) -> Series:
    """The last loss, one per seed."""
    return select(rows, epoch=rows["epoch"].max()).set_index("seed")[LOSS]


def _holds(rows: DataFrame, density: float, workers: int) -> list[Verdict]:
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
        lines = [within(CLOSE, 0.95)]
    else:
        windows = later.groupby(["seed", (later["iteration"] - start) // WINDOW])["ratio"].mean()
        worst = (windows - 1).abs().groupby("seed").max()
        words = f"{where}: error of the mean density of {WINDOW} iterations, where it is largest"
        lines = [judge(words, worst, note, most=CLOSE), within(FAR, 0.9)]
    words = f"{where}: imbalance, by which padding lengthens what is sent"
    return [*lines, judge(words, later["imbalance"].groupby(seed).mean(), note, most=0.2)]


def _build_up(table: DataFrame, settings: DictConfig) -> list[Verdict]:
    most, density = max(settings.crowds), settings.densities[0]

    def with_most(method: str, **limits: float) -> Verdict:
        rows = select(table, measure="build-up", method=method, workers=most, target=density)
        words = f"{method_label(method)}: actual density / target with {most} workers"
        return judge(words, settled_mean(rows, "ratio"), **limits)

    return [with_most(OURS, most=1.1), with_most(TOPK, least=2.0)]


def _balance(table: DataFrame, settings: DictConfig) -> list[Verdict]:
    """Each rule against the one before, seed by seed: imbalances of different layouts of layers differ by factors."""
    rows, lines = select(table, measure="imbalance"), []
    for before, rule in pairwise(sparsifiers.RULES):
        less, more = (settled_mean(select(rows, method=method), "imbalance") for method in (rule, before))
        words = f"the {variant(rule)} rule loads workers more evenly than the {variant(before)} one"
        note = f"mean imbalance {less.mean():.2f} and {more.mean():.2f}, {settings.workers} workers, {len(less)} seeds"
        ratio = np.log((less / more).astype(float))
        lines.append(judge(f"{words}: log ratio of the imbalance", ratio, note, most=0.0))
    return lines


def _settles(table: DataFrame, settings: DictConfig) -> list[Verdict]:
    drop, lines = settings.settling // 3, []
    for when, after, until in (("at the start", 0, drop), ("after a tenfold drop", drop, settings.settling)):
        length = until - after
        counted, proportional, paper = (
            settling_time(select(table, measure="settling", method=method), after, until)
            for method in sparsifiers.THRESHOLDS[:3]
        )
        words = f"threshold by counting: iterations to ±{CLOSE:.0%} {when}"
        lines.append(judge(words, counted, most=LAST))
        note = f"iterations: {_spelt(proportional, length)} − {_spelt(paper, length)}"
        if (paper >= length).any():
            note += "; what never settled counts as all of them, so that the difference is at least this"
        unless = "neither settles" if (proportional >= length).all() and (paper >= length).all() else ""
        words = f"the proportional rule settles sooner than the paper's {when}"
        lines.append(judge(words, proportional - paper, note, unless, most=0.0))
    return lines


def _spelt(times: Series, length: int) -> str:
    """37, or how many of the seeds never came to an end."""
    never = int((times >= length).sum())
    if never == len(times):
        return f"never within {length}"
    return f"{times.mean():.0f}" + f" (never within {length} on {never} of {len(times)} seeds)" * bool(never)


def _cheaper(table: DataFrame, workers: int, settings: DictConfig) -> list[Verdict]:
    """On the mean, and for the slowest: the exchange waits for everybody."""
    rows, lines = select(table, measure="time", workers=workers), []
    longest = rows.set_index("timed")["longest"][OURS]
    notes = {
        "selection": f"{settings.timed_dim:,} coordinates, mean over workers",
        "slowest": f"ExDyna's longest partition is {longest.mean():.2f} of the mean one",
    }
    for column, whose in (("selection", "a worker"), ("slowest", "the slowest worker")):
        times = rows.pivot(index="seed", columns="timed", values=column)
        words = f"selecting: Top-k's time / ExDyna's for {whose} of {workers}, one core"
        lines.append(judge(words, times[TOPK] / times[OURS], notes[column], least=CHEAPER))
    return lines


def _fewer_bytes(table: DataFrame, settings: DictConfig) -> Verdict:
    workers, density = settings.workers, settings.densities[0]
    rows = select(table, measure="build-up", workers=workers, target=density)
    ours, dense = (settled_mean(select(rows, method=method), "bytes") for method in (OURS, DENSE))
    words = f"ExDyna's bytes / dense ones with {workers} workers at density {density:g}"
    note = "workers gather k indices of four bytes, which costs half of summing k values: 1.5 · density, and padding"
    return judge(words, ours / dense, note, most=1.7 * density)


def _sparse_verdicts(table: DataFrame) -> list[Verdict]:
    """An embedding layer: a worker's gradient is zero but for a few rows."""
    rows = select(table, measure="sparse model")
    ours, dense, forgetful = (select(rows, method=method) for method in (OURS, DENSE, sparsifiers.FORGETFUL))
    what = f"sparse model ({ours['nonzero'].mean():.1%} of a worker's gradient is not zero)"
    density = ours.groupby("seed")["density"].mean() / ours["target"].iloc[0]
    forgot = f"{what}: without error feedback the loss ends higher than with it, ratio"
    return [
        judge(f"{what}: ExDyna's loss / dense loss", ends(ours) / ends(dense), most=1.05),
        judge(f"{what}: density / target", density, least=0.9, most=1.1),
        judge(forgot, ends(forgetful) / ends(ours), least=1.0),
    ]


def _converges(rows: DataFrame, task: str, settings: DictConfig) -> list[Verdict]:
    def loss(method: str, sorter: str = BALANCED) -> Series:
        return ends(select(rows, method=method, sorter=sorter))

    def actual(method: str, sorter: str = BALANCED) -> float:
        return select(rows, method=method, sorter=sorter)["density"].mean()

    name, lines = task_label(task), []
    for sorter in settings.sorters:
        words = f"{name}, {sorter_label(sorter)}: train loss with ExDyna / dense at density {TRAINED_DENSITY:g}"
        note = f"actual density {actual(OURS, sorter):.4f}"
        lines.append(judge(words, loss(OURS, sorter) / loss(DENSE, sorter), note, most=1.05))
    done = rows["method"].unique()
    for method in [method for method in settings.trained[2:] if method in done]:
        note = f"actual densities {actual(OURS):.4f} and {actual(method):.4f}"
        apart = abs(actual(method) / actual(OURS) - 1) > SAME_DENSITY
        notes = {"unless": f"not at the same density: {note}"} if apart else {"note": note}
        words = f"{name}: train loss with ExDyna / {method_label(method)}"
        lines.append(judge(words, loss(OURS) / loss(method), **notes, most=1.0))
    if {BASELINE, BALANCED} <= set(settings.sorters):
        lines.append(_adds_up(name, {m: 100 * (1 - loss(m, BALANCED) / loss(m, BASELINE)) for m in (DENSE, OURS)}))
    return lines


def _adds_up(name: str, gains: dict[str, Series]) -> Verdict:
    """gains: by how many per cent CD-GraB ends lower than D-RR, by method."""
    dense = estimate(gains[DENSE])
    unless = "" if dense.low > 0 else "dense training shows no gain of CD-GraB over D-RR in so few epochs"
    note = f"difference in points; {gains[OURS].mean():.2f} % of the train loss with ExDyna, {dense.mean:.2f} % without"
    words = f"{name}: CD-GraB's gain over D-RR is as large with ExDyna as without"
    return judge(words, gains[OURS] - gains[DENSE], note, unless, least=-0.5)
