"""How far the runs of a command are: the last line of the screen while they train, and one line for each that ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from tqdm import tqdm

from experiments import screen
from experiments.store.records import METRICS, read_metrics
from experiments.training.config import Run

VARIABLE = "CDGRAB_PROGRESS"  # tells a process that makes one run of a sweep about the others
BAR = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"  # with steps and their rate, losses would not fit 80 columns
PLAIN = "{desc}: {percentage:.0f}% after {elapsed}, {remaining} left{postfix}"

Watch = Callable[[float, int, str], None]  # told of the part of all steps that is done, the epoch, and the losses


@dataclass
class Group:
    """Runs that train together, perhaps only one: how many, how much of their steps is done, and where they are."""

    size: int
    name: str
    part: float
    epoch: int = 1
    loss: str = "?"


@dataclass
class Progress:
    """Of all runs of a command: times are those left for the whole, if runs take about equally long."""

    total: int
    done: float = 0.0  # runs
    given: float = 0.0  # of them, those made before
    since: float = field(default_factory=time.time)
    first: int = 1  # the number of the next run
    groups: dict[int, Group] = field(default_factory=dict)  # those under way, by their first number

    def skip(self, runs: int) -> None:
        """They are complete already."""
        self.given += runs
        self.add(runs)

    def add(self, runs: int) -> None:
        """They are done."""
        self.done, self.first = self.done + runs, self.first + runs

    @contextmanager
    def watching(self, size: int, name: str, part: float) -> Iterator[Watch]:
        """The next `size` runs, which train together. name: of one that is no part of a sweep. part: of their steps,
        done before."""
        number = self.first
        self.begin(number, size, name, part)
        try:
            yield partial(self.step, number)
        finally:
            self.end(number)

    def begin(self, number: int, size: int, name: str, part: float) -> None:
        self.given += size * part
        self.groups[number] = Group(size, name, part)
        screen.show(self.text)

    def step(self, number: int, part: float, epoch: int, loss: str) -> None:
        group = self.groups[number]
        group.part, group.epoch, group.loss = part, epoch, loss

    def end(self, number: int) -> None:
        self.add(self.groups.pop(number).size)
        screen.show(self.text if self.groups else None)

    def text(self, columns: int | None) -> str:
        """The last line of the screen; without columns, a plain one."""
        groups = dict(self.groups)  # another thread asks
        epochs = ", ".join(str(group.epoch) for group in groups.values())
        where = f"epoch {epochs}" + "".join(f", loss {group.loss}" for group in groups.values() if len(groups) == 1)
        how = {"ncols": columns, "prefix": self._title(groups), "bar_format": BAR if columns else PLAIN}
        elapsed = time.time() - self.since
        return tqdm.format_meter(self._now(), self.total, elapsed, initial=self.given, postfix=where, **how)

    def _title(self, groups: dict[int, Group]) -> str:
        if self.total == 1:
            return "".join(group.name for group in groups.values())
        runs = [f"{n}–{n + group.size - 1}" if group.size > 1 else str(n) for n, group in groups.items()]
        return f"run{'s' * any(len(runs) > 1 or '–' in run for run in runs)} {', '.join(runs)} of {self.total}"

    def left(self) -> str:
        """The time left for all runs: 01:23; empty if nothing is left, or nothing is known yet."""
        made, missing = self._now() - self.given, self.total - self._now()
        return tqdm.format_interval((time.time() - self.since) / made * missing) if made and missing else ""

    def _now(self) -> float:
        return self.done + sum(group.size * group.part for group in list(self.groups.values()))

    # -- other processes ----------------------------------------------------------------------------------------------

    def tell(self) -> dict[str, str]:
        """Variables for the environment of a process that makes the next run."""
        return {VARIABLE: f"{self.total} {self.done} {self.given} {self.since} {self.first}"}

    @classmethod
    def told(cls) -> Progress:
        """That of the sweep to which this process belongs; of one run, if it belongs to none."""
        with suppress(ValueError, OverflowError):  # not what `tell` writes
            total, done, given, since, first = map(float, os.environ.get(VARIABLE, "").split())
            return cls(int(total), done, given, since, int(first))
        return cls(1)


def result(run: Run, name: str, number: int = 1, total: int = 1) -> str:
    """The run's number of all, its name and its last metrics: of most runs in 80 columns."""
    last = read_metrics(run.directory / METRICS)[-1]
    shown = {key: value for key, value in last.items() if key.startswith(("train_", "test_", "val_"))}
    which = f"{number:>{len(str(total)) + 1}}/{total} " if total > 1 else ""
    return f"{which}{name}: " + ", ".join(f"{key} {value:.5g}" for key, value in shown.items())
