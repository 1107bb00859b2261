"""Several processes share the runs of a sweep: each carries out runs, or groups of runs, one after the other."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from multiprocessing.connection import Connection, wait

from cdgrab.errors import CdgrabError
from experiments import early, screen
from experiments.early import STATUS
from experiments.training.extensions import load_extensions
from experiments.training.launcher import Prepared, announced, grouped, launch
from experiments.training.memory import share_memory
from experiments.training.progress import Progress

_spawn = multiprocessing.get_context("spawn")


class _Worker:
    """A process, and the pipe on which it receives runs, tells how far they are, and answers with exit statuses."""

    def __init__(self, jobs: int) -> None:
        self.line, its_end = _spawn.Pipe()
        self.process = _spawn.Process(target=_carry_out_runs, args=(its_end, jobs))
        self.process.start()
        its_end.close()  # so that the pipe is closed when the process ends

    def answer(self) -> tuple | list[int]:
        """What it tells, or the exit statuses of the runs that it was sent."""
        try:
            return self.line.recv()
        except (EOFError, ConnectionError):  # it has ended
            self.process.join()
            return [self.process.exitcode if self.process.exitcode >= 0 else 128 - self.process.exitcode]


class _Printed(io.TextIOBase):
    """What a worker prints is sent to the first process, which alone writes to the screen."""

    def __init__(self, line: Connection, stream: str) -> None:
        self._line, self._stream, self._begun = line, stream, ""

    def write(self, text: str) -> int:
        whole, newline, self._begun = (self._begun + text).rpartition("\n")
        if newline:
            self._line.send(("printed", self._stream, whole + newline))
        return len(text)


class _Told(Progress):
    """Progress that is sent to the first process."""

    def __init__(self, line: Connection, total: int, first: int) -> None:
        super().__init__(total, first=first)
        self._line, self._next = line, 0.0

    def skip(self, runs: int) -> None:
        super().skip(runs)
        self._line.send(("skip", runs))

    def begin(self, *what: object) -> None:
        super().begin(*what)
        self._line.send(("begin", *what))

    def step(self, *what: object) -> None:
        if time.monotonic() >= self._next:  # often enough to be looked at
            self._line.send(("step", *what))
            self._next = time.monotonic() + screen.TICK

    def end(self, number: int) -> None:
        super().end(number)
        self._line.send(("end", number))

    def left(self) -> str:
        """Only the first process knows."""
        return ""


def _carry_out_runs(line: Connection, jobs: int) -> None:
    early.listen()
    load_extensions()
    share_memory(jobs)
    os.environ[screen.PLAIN] = "yes"  # for processes that it starts
    sys.stdout, sys.stderr = _Printed(line, "stdout"), _Printed(line, "stderr")
    while work := line.recv():
        together, names, first, total = work
        line.send(launch(together, _Told(line, total, first), names))


def launch_at_once(runs: list[Prepared], jobs: int) -> list[int]:
    """Returns exit statuses. A refused run ends the sweep; a signal also ends the runs under way."""
    groups, statuses, names, progress = grouped(runs, jobs), [], announced(runs), Progress(len(runs))
    starts = accumulate(map(len, groups), initial=1)
    waiting = deque((group, names, start, len(runs)) for group, start in zip(groups, starts, strict=False))
    workers: list[_Worker] = []
    idle: list[_Worker] = []
    with _ending_on_signals(workers, progress), screen.doing(f"starting {min(jobs, len(groups))} processes"):
        while waiting or len(idle) < len(workers):
            while waiting and (idle or len(workers) < jobs):
                if not idle:
                    workers.append(_Worker(jobs))
                    idle.append(workers[-1])
                idle.pop().line.send(waiting.popleft())
            answered = wait([worker.line for worker in workers])
            for worker in [worker for worker in workers if worker.line in answered]:
                answer = worker.answer()
                if isinstance(answer, tuple):
                    _pass_on(progress, *answer)
                    continue
                statuses += answer
                if worker.process.exitcode is None:
                    idle.append(worker)
                else:
                    workers.remove(worker)
                if CdgrabError.status in statuses:  # refused
                    waiting.clear()
        for worker in workers:
            worker.line.send(None)
    return statuses


def _pass_on(progress: Progress, what: str, *content: object) -> None:
    if what == "printed":
        stream, text = content
        print(text, end="", file=getattr(sys, stream), flush=True)
    else:
        getattr(progress, what)(*content)


@contextlib.contextmanager
def _ending_on_signals(workers: list[_Worker], progress: Progress) -> Iterator[None]:
    """On a signal, stop all workers before leaving, and show what they say."""
    before = {number: signal.signal(number, lambda number, _: sys.exit(STATUS[number])) for number in STATUS}
    try:
        yield
    except BaseException:
        for worker in workers:
            worker.process.terminate()
            os.kill(worker.process.pid, signal.SIGCONT)  # one that stands still would not hear it
        raise
    finally:
        with screen.doing("ending the processes"):
            for worker in workers:
                while isinstance(answer := worker.answer(), tuple):
                    _pass_on(progress, *answer)
                worker.process.join()
        for number, handler in before.items():
            signal.signal(number, handler)
