"""Several processes share the runs of a sweep: each carries out runs, or groups of runs, one after the other."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from multiprocessing.connection import Connection, wait

from cdgrab.errors import CdgrabError
from experiments import early
from experiments.early import STATUS
from experiments.training.extensions import load_extensions
from experiments.training.launcher import Prepared, grouped, launch
from experiments.training.memory import share_memory

_spawn = multiprocessing.get_context("spawn")


class _Worker:
    """A process, and the pipe on which it receives runs and answers with their exit statuses."""

    def __init__(self, jobs: int) -> None:
        self.line, its_end = _spawn.Pipe()
        self.process = _spawn.Process(target=_carry_out_runs, args=(its_end, jobs))
        self.process.start()
        its_end.close()  # so that the pipe is closed when the process ends

    def statuses(self) -> list[int]:
        """The exit statuses of the runs that it was sent."""
        try:
            return self.line.recv()
        except EOFError:  # it has ended
            self.process.join()
            return [self.process.exitcode if self.process.exitcode >= 0 else 128 - self.process.exitcode]


def _carry_out_runs(line: Connection, jobs: int) -> None:
    early.listen()
    load_extensions()
    share_memory(jobs)
    while together := line.recv():
        line.send(launch(*together))


def launch_at_once(runs: list[Prepared], jobs: int) -> list[int]:
    """Returns exit statuses. A refused run ends the sweep; a signal also ends the runs under way."""
    groups, statuses = grouped(runs, jobs), []
    starts = accumulate(map(len, groups), initial=1)
    waiting = deque((group, start, len(runs)) for group, start in zip(groups, starts, strict=False))
    workers: list[_Worker] = []
    idle: list[_Worker] = []
    with _ending_on_signals(workers):
        while waiting or len(idle) < len(workers):
            while waiting and (idle or len(workers) < jobs):
                if not idle:
                    workers.append(_Worker(jobs))
                    idle.append(workers[-1])
                idle.pop().line.send(waiting.popleft())
            answered = wait([worker.line for worker in workers])
            for worker in [worker for worker in workers if worker.line in answered]:
                statuses += worker.statuses()
                if worker.process.exitcode is None:
                    idle.append(worker)
                else:
                    workers.remove(worker)
                if CdgrabError.status in statuses:  # refused
                    waiting.clear()
        for worker in workers:
            worker.line.send(None)
    return statuses


@contextlib.contextmanager
def _ending_on_signals(workers: list[_Worker]) -> Iterator[None]:
    """On a signal, stop all workers before leaving."""
    before = {number: signal.signal(number, lambda number, _: sys.exit(STATUS[number])) for number in STATUS}
    try:
        yield
    except BaseException:
        for worker in workers:
            worker.process.terminate()
        raise
    finally:
        for worker in workers:
            worker.process.join()
        for number, handler in before.items():
            signal.signal(number, handler)
