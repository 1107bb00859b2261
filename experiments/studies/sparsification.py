"""Sparse gradients: what ExDyna and its peers select, send and cost, and where training with them ends.

Synthetic gradients (heavy-tailed, layered, with error feedback) answer the questions about density, balance,
thresholds, time and bytes; tasks of the suite and a small sparse model those about convergence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from omegaconf import DictConfig

from experiments.studies import sparsifiers
from experiments.studies.base import Part
from experiments.studies.sparsification_verdicts import LAST, verdicts
from experiments.studies.sparsifiers import DENSE, OURS, PUBLISHED, RESNET, TRAINED_DENSITY, layered
from experiments.studies.training import overrides

EVEN_LAYERS = {"layers": 24, "decades": 1.0}  # for the balance: no partition is hopeless

__all__ = ["parts", "verdicts"]


def parts(settings: DictConfig) -> list[Part]:
    """Seed by seed; within a seed what takes long comes last."""
    found = []
    for seed in range(settings.seeds):
        found += [*_synthetic(settings, seed), *_trainings(settings, seed)]
    for seed in range(settings.seeds, settings.balance_seeds):
        found += _balances(settings, seed)
    return found


def _synthetic(settings: DictConfig, seed: int) -> list[Part]:
    dim, workers, length, density = settings.dim, settings.workers, settings.iterations, settings.densities[0]
    cases = [("density", m, workers, d, dim, length) for d in settings.densities for m in settings.methods]
    cases += [
        ("held", OURS, w, d, settings.held_dim, length) for d in settings.densities for w in settings.held_workers
    ]
    for crowd in settings.crowds:  # the paper's threshold is long on its way to where it stays
        lengths = {method: length if method == PUBLISHED else 3 * LAST for method in (*settings.methods, DENSE)}
        cases += [("build-up", method, crowd, density, dim, some) for method, some in lengths.items()]
    found = [_part(partial(layered, *case[1:], seed), *case[:4], seed) for case in cases]
    shared = (workers, density)
    found += _balances(settings, seed)
    for rule in sparsifiers.THRESHOLDS:
        compute = partial(sparsifiers.settling, rule, *shared, dim, settings.settling, seed)
        found.append(_part(compute, "settling", rule, *shared, seed))
    for method in sparsifiers.ABLATED:
        compute = partial(sparsifiers.sparse_model, method, *shared, settings.sparse_steps, seed)
        found.append(_part(compute, "sparse model", method, *shared, seed))
    timed = [method for method in settings.methods if method != PUBLISHED]  # which selects as `exdyna` does
    for count in settings.timed_workers:
        compute = partial(sparsifiers.selection_seconds, timed, count, density, settings.timed_dim, seed)
        found.append(replace(_part(compute, "time", "", count, density, seed), alone=True))
    return found


def _balances(settings: DictConfig, seed: int) -> list[Part]:
    shared = (settings.workers, settings.densities[0])
    compute = partial(layered, dim=settings.dim, iterations=settings.iterations, seed=seed, **EVEN_LAYERS)
    return [_part(partial(compute, rule, *shared), "imbalance", rule, *shared, seed) for rule in sparsifiers.RULES]


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
                compute = partial(sparsifiers.sparse_training, run, method, seed)
                found.append(_part(compute, "training", method, 0, TRAINED_DENSITY, seed, name, sorter))
    return found


def _part(
    compute: Callable[[], dict[str, list]],
    measure: str,
    method: str,
    workers: int,
    density: float,
    seed: int,
    task: str = "",
    sorter: str = "",
) -> Part:
    key = {"measure": measure, "method": method, "workers": workers, "target": density, "task": task, "sorter": sorter}
    return Part(key | {"seed": seed}, compute)
