"""The study `sparsification` on real gradients: LeNet on CIFAR-10 and the LSTM on WikiText-2, with the sparsifier in
their training. Density, build-up, thresholds, balance and the time of selecting, as ExDyna's paper claims them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise, product

import numpy as np
from omegaconf import DictConfig

from experiments.report.kinds import DataFrame, Series
from experiments.studies.parts import Part
from experiments.studies.real_gradients import WINDOW, density, run_of, selection_seconds
from experiments.studies.sparsifiers import CLOSE, OURS, PUBLISHED, TOPK, method_label, part_key, task_label
from experiments.studies.verdicts import Verdict, judge, judge_every, repeated, select

LONG, CROWDS, TIME = "real density", "real build-up", "real time"  # measures
MICRO = "micro"
WARM_UP = 100  # iterations after which the density must hold, and in which a threshold must find it
LONG_SETTLED = 20  # a density that stays close for this many iterations has settled


def tasks(settings: DictConfig) -> dict[str, DictConfig]:
    """Those that are trained here; results that were made before there were any have none."""
    wanted = settings.get("real") or {}
    return {task: wanted[task] for task in ("cifar10", "lstm_wiki2") if task in settings.tasks and wanted.get(task)}


def parts(settings: DictConfig) -> Iterator[Part]:
    target = settings.densities[0]
    for seed in range(settings.real.seeds) if tasks(settings) else ():
        for task, own in tasks(settings).items():
            for method in own.methods:
                run = run_of(settings, task, method, own.workers, target)
                compute = partial(density, run, own.iterations, seed, drop_of(own))
                yield Part(part_key(LONG, method, own.workers, target, seed, task), compute)
            for workers, method in product(own.crowds, own.crowd_methods):
                compute = partial(density, run_of(settings, task, method, workers, target), own.crowd_iterations, seed)
                yield Part(part_key(CROWDS, method, workers, target, seed, task), compute)
            for workers in own.timed_workers:
                run = run_of(settings, task, OURS, workers, target)
                compute = partial(selection_seconds, list(own.timed_methods), run, target, seed)
                yield Part(part_key(TIME, "", workers, target, seed, task), compute, alone=True)


def drop_of(own: DictConfig) -> int:
    """The iteration in which gradients shrink: where a window begins, after two thirds."""
    return 2 * own.iterations // 3 // WINDOW * WINDOW


# -- what it says -----------------------------------------------------------------------------------------------------


def verdicts(table: DataFrame, settings: DictConfig) -> Iterator[Verdict]:
    for task, own in tasks(settings).items():
        rows = select(table, task=task)
        found = (*_holds(rows, task, own), *_builds_up(rows, task, own), *_settles(rows, task, own))
        found = (*found, *_balances(rows, task, own), *_cheaper(rows, task, own))
        yield from (repeated(verdict, settings.real.seeds) for verdict in found)


def settling_time(rows: DataFrame, after: int, until: int) -> Series:
    """Iterations until the density stays close for a while, one per seed; all iterations if it never does."""
    windows = LONG_SETTLED // WINDOW

    def first(near: Series) -> int:
        settled = (near == 1).rolling(windows).min()
        return WINDOW * (int(settled.argmax()) - windows + 1) if settled.any() else until - after

    rows = rows[rows["iteration"].between(after, until - 1)].sort_values("iteration")
    return rows.groupby("seed")["near"].agg(first)


def later_half(rows: DataFrame, column: str) -> Series:
    """The mean over the windows that begin in the last half of the iterations, one per seed."""
    length = rows["iteration"].max() + WINDOW
    return rows[2 * rows["iteration"] >= length].groupby("seed")[column].mean()


def _steady(rows: DataFrame, own: DictConfig, method: str, column: str) -> tuple[Series, str]:
    """The mean of a column per seed, after the start and before gradients shrink; and which iterations these are."""
    end = drop_of(own)
    start = min(WARM_UP, end // 2)
    some = select(rows, measure=LONG, method=method)
    some = some[some["iteration"].between(start, end - 1)]
    return some.groupby("seed")[column].mean(), f"iterations {start} to {end}, {own.workers} workers"


def _holds(rows: DataFrame, task: str, own: DictConfig) -> Iterator[Verdict]:
    for method in (OURS, PUBLISHED):
        words = f"{task_label(task)}, {method_label(method)}: mean relative error of the density"
        yield judge(words, *_steady(rows, own, method, "error"), most=CLOSE)
    most = max(own.crowds)
    some = later_half(select(rows, measure=CROWDS, method=OURS, workers=most), "error")
    words = f"{task_label(task)}, {method_label(OURS)}, {most} workers: mean relative error of the density"
    yield judge(words, some, f"the last half of {own.crowd_iterations} iterations", most=CLOSE)


def _builds_up(rows: DataFrame, task: str, own: DictConfig) -> Iterator[Verdict]:
    for method in (method for method in (OURS, PUBLISHED, TOPK) if method in own.crowd_methods):
        some = select(rows, measure=CROWDS, method=method)
        by_workers = {workers: later_half(select(some, workers=workers), "ratio") for workers in own.crowds}
        note = f"the last half of {own.crowd_iterations} iterations"
        if method == PUBLISHED:
            note += "; selections never overlap: it is the threshold that does not fit"
        where = f"{task_label(task)}, {method_label(method)}"
        yield from build_up(where, by_workers, note, grows=method == TOPK)


def build_up(where: str, by_workers: Mapping[int, Series], note: str, grows: bool) -> Iterator[Verdict]:
    """Judge actual densities over the target, by the number of workers: they are to grow with them, or not to leave the
    target."""
    fewest, most = min(by_workers), max(by_workers)
    if not grows:
        words = f"{where}: actual density / target with {fewest} to {most} workers"
        yield judge_every(words, by_workers, f"{{cell}} workers; {note}", most=1.1)
        return
    yield judge(f"{where}: actual density / target with {most} workers", by_workers[most], note, least=2.0)
    growth = {f"{before} to {after}": by_workers[after] / by_workers[before] for before, after in pairwise(by_workers)}
    words = f"{where}: actual density grows from every number of workers to the next, {fewest} to {most}"
    yield judge_every(words, growth, f"ratio from {{cell}} workers; {note}", least=1.0)


def _settles(rows: DataFrame, task: str, own: DictConfig) -> Iterator[Verdict]:
    drop = drop_of(own)
    for when, after, until in (("at the start", 0, drop), ("after a tenfold drop", drop, own.iterations)):
        for method in (OURS, PUBLISHED):
            times = settling_time(select(rows, measure=LONG, method=method), after, until)
            never = int((times >= until - after).sum())
            note = f"never within {until - after} on {never} of {len(times)} seeds" if never else ""
            words = f"{task_label(task)}, {method_label(method)}: iterations to ±{CLOSE:.0%} {when}"
            yield judge(words, times, note, most=WARM_UP)


def _balances(rows: DataFrame, task: str, own: DictConfig) -> Iterator[Verdict]:
    found = {method: _steady(rows, own, method, "imbalance") for method in (OURS, PUBLISHED, MICRO)}
    for method in (OURS, PUBLISHED):
        yield judge(f"{task_label(task)}, {method_label(method)}: imbalance", *found[method], most=0.2)
    if MICRO in own.methods:
        (ours, note), (static, _) = found[PUBLISHED], found[MICRO]
        words = f"{task_label(task)}: the paper's rule loads workers more evenly than equal partitions do"
        note = f"log ratio; mean imbalance {ours.mean():.2f} and {static.mean():.2f} (MiCRO); {note}"
        yield judge(words, np.log((ours / static).astype(float)), note, most=0.0)


def _cheaper(rows: DataFrame, task: str, own: DictConfig) -> Iterator[Verdict]:
    """A worker reads only its share, so selecting should be as many times faster as there are workers: on the mean, and
    for the slowest one, for which the exchange waits."""
    for workers in own.timed_workers:
        some = select(rows, measure=TIME, workers=workers)
        longest = some.groupby("timed")["longest"].mean()
        for method in (OURS, PUBLISHED):
            where, name = f"{task_label(task)}, selecting: Top-k's time / that of", method_label(method)
            notes = {
                "selection": (name, "mean over workers, one core"),
                "slowest": (
                    f"the slowest worker of {name}",
                    f"one core; the longest partition is {longest[method]:.2f} of the mean one",
                ),
            }
            for column, (whose, note) in notes.items():
                times = some.pivot(index="seed", columns="timed", values=column)
                yield judge(f"{where} {whose}, {workers} workers", times[TOPK] / times[method], note, least=workers)
