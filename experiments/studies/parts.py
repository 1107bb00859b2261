"""The parts of a study, and how they are computed: one after the other, or by several processes at once.

Parts that are training runs and alike train together.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children, get_context, parent_process

import torch

from cdgrab.errors import CdgrabError
from experiments.studies.training import Columns, TrainingRun, alike, outcome, outcomes
from experiments.training.extensions import load_extensions
from experiments.training.memory import keep_freed_memory, share_memory


@dataclass(frozen=True)
class Part:
    """`key` names it, with the same names for all parts; `compute` gives further columns, lists of equal length."""

    key: dict
    compute: Callable[[], dict[str, list]]
    alone: bool = False  # it measures time: nothing else may run beside it
    run: TrainingRun | None = None  # what is trained where `compute` is its outcome: runs that are alike train together


def trained(key: dict, run_overrides: list[str], seed: int, columns: Columns = outcome) -> Part:
    """A training run. Its columns are what it is judged by."""
    run = TrainingRun(tuple(run_overrides), seed, columns)
    return Part(key, partial(_outcome, run), run=run)


def _outcome(run: TrainingRun) -> dict[str, list]:
    return outcomes([run])[0]


def computed(parts: list[Part], jobs: int) -> Iterator[tuple[Part, dict]]:
    """Parts with their columns, as soon as they are done: what is finished must not wait for what takes long."""
    work = _work(parts, jobs)
    if jobs == 1:
        for some in work:
            yield from zip(some, _timed(some), strict=True)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), _begin_worker, (jobs,)) as pool:
        try:
            by_future = {pool.submit(_timed, some): some for some in work}
            for future in as_completed(by_future):
                yield from zip(by_future[future], future.result(), strict=True)
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                process.terminate()
            if isinstance(error, BrokenProcessPool):
                reason = "perhaps because memory ran out; jobs=1 needs the least"
                raise CdgrabError(f"a process was killed, {reason}") from error
            raise


def _work(parts: list[Part], jobs: int) -> list[list[Part]]:
    """Parts that are computed together: runs that are alike, in portions for `jobs` processes; then the others, one by
    one, since small ones fill the gaps at the end."""
    runs = [part for part in parts if part.run]
    groups = [[runs[number] for number in group] for group in alike([part.run for part in runs], jobs)]
    return groups + [[part] for part in parts if not part.run]


def _begin_worker(jobs: int) -> None:
    load_extensions()
    keep_freed_memory()
    share_memory(jobs)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one gets it too, and ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """The process that started this one may be killed, and then ends nobody."""
    parent_process().join()
    os._exit(1)


def _timed(parts: list[Part]) -> list[dict]:
    """Their columns. Runs that train together have equal shares of the time."""
    started = time.perf_counter()
    computed = outcomes([part.run for part in parts]) if parts[0].run else [parts[0].compute()]
    seconds = round((time.perf_counter() - started) / len(parts), 3)
    return [columns | {"seconds": seconds} for columns in computed]
