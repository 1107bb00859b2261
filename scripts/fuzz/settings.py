"""Overrides of all keys."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import torch
from omegaconf import OmegaConf

from cdgrab.runtime.group import WorkerGroup
from experiments import launch
from experiments.training import session
from experiments.training.composition import choices, compose_config
from experiments.training.config import Run, compose, flatten
from experiments.training.grouping import make_member
from experiments.training.loop import Trainer

WORDS = ["", "null", "true", "-1", "0", "1", "2", "3.5", "1e309", "-0.0", "nan", "inf", "abc", "cd_grab", "[]", "[1,2]"]
WORDS += ["{}", "{a:1}", "${seed}", "${nothing}", "'", '"', "a b", "ü", "../..", "/", "0x10", "1_000", "\\", "~", "a=b"]
WORDS += ["3000000000", "2000000000", "99999999", "9" * 30, "-" + "9" * 30, "1e300", "1e-300"]
HYDRAS = ("hydra.callbacks", "hydra.run.dir", "hydra.job_logging", "hydra/launcher", "hydra.sweeper._target_")


def settings(generator: random.Random, scratch: Path) -> Iterator[Callable[[], object]]:
    """Compose runs of every task, sorter and sparsifier; some are built for training, on little data."""

    def sweep(overrides: list[str]) -> None:
        """All runs of a sweep, as the launcher understands it, are those that the same words name one by one."""
        for each in launch.expanded(["data=embedded", "size=smoke", *overrides], sweep=True)[0]:
            compose(each)

    def attempt(chosen: list[str], overrides: list[str], build: bool) -> None:
        limit = [] if "task=lr_hmda" in chosen else ["task.limit=16"]
        small = ["size=smoke", "compile=off", *limit] if build else []
        base = [*chosen, "data=embedded", f"run_dir={scratch / 'never made'}", *small]
        run = compose([*base, *overrides])
        assert compose([*base, *_as_understood(run, overrides)]).science == run.science, "another run"
        session.may_start(run, speak=False)
        if build:
            with session.enough_memory():
                Trainer([make_member(run, WorkerGroup(run.config.workers), torch.device("cpu"))])

    while True:
        chosen = [f"{group}={generator.choice(choices(group))}" for group in ("task", "sorter", "sparsifier")]
        names = sorted({name for choice in chosen for name in _keys(choice)})
        names = generator.sample([*names, *HYDRAS], generator.choice((1, 1, 2, 3)))
        overrides = [f"{_sign(generator)}{name}={_word(generator)}" for name in names]
        if generator.random() < 0.1:
            yield partial(sweep, [*chosen, *(f"{override},{_word(generator)}" for override in overrides)])
        else:
            yield partial(attempt, chosen, overrides, generator.random() < 0.05)


def _as_understood(run: Run, overrides: list[str]) -> list[str]:
    """The same settings, numbers written as they were understood."""
    values = ((override, OmegaConf.select(run.config, override.partition("=")[0])) for override in overrides)
    plain = (int, float, bool)
    return [f"{given.partition('=')[0]}={value!r}" if isinstance(value, plain) else given for given, value in values]


@cache
def _keys(choice: str) -> list[str]:
    """Keys of this choice with the default of the others; beside another choice some do not exist and are refused."""
    flat = flatten(dict(compose_config([choice])))
    return [key for key in flat if not key.startswith(("hydra.", "task.presets."))]


def _sign(generator: random.Random) -> str:
    """Hydra's: whether a setting is added, or deleted."""
    return generator.choice(("+", "++", "~")) if generator.random() < 0.1 else ""


def _word(generator: random.Random) -> str:
    if generator.random() < 0.7:
        return generator.choice(WORDS)
    if generator.random() < 0.5:
        return repr(generator.choice((generator.randint(-(10**6), 10**9), generator.uniform(-1e3, 1e3))))
    return "".join(chr(generator.randrange(32, 1000)) for _ in range(generator.randrange(8)))
