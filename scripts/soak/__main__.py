"""Kill and resume runs at random for some minutes, and compare each with an undisturbed one.

    python -m scripts.soak                       # `make soak`: ten minutes
    python -m scripts.soak --seconds 60 --seed 3

What is disturbed (`victims`), what happens to it (`disturbances`) and when are drawn at random, on embedded data; for
some the time of day jumps as well. A victim is disturbed and started again until it has survived some twenty times. In
the end metrics, orders and parameters must equal those of the undisturbed one to the last bit; no process may hang,
end in a traceback, or with a status that is not right then. Runs that trained together may train in other groups after
a kill, and then round differently: they are in float64, and must be equal to nine digits.

Every call is added to results/reliability.json (with changed code: results/trial/reliability.json).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded

import gc
import math
import multiprocessing
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from cdgrab.errors import MissingError
from experiments.early import STATUS, exit_status
from scripts.arguments import Parser, positive
from scripts.reliability import Record, cpu_seconds, die_with_parent
from scripts.soak.disturbances import DISTURBANCES, draw
from scripts.soak.processes import HANGS, Processes, load_kernels
from scripts.soak.victims import VICTIMS, Victim, warm_up

LANES = 2  # victims at the same time
MOST = 20  # disturbances of a victim; after them it may finish
EARLY, START = 0.15, 0.3  # share of those before training begins, and within how many seconds after the start
SOON = 0.15  # seconds of training until the next one, at most
JUMPING = 0.2  # share of starts whose clock jumps
RIGHT = {0, MissingError.status, *STATUS.values(), -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT}


def disturbed(victim: Victim, folder: Path, generator: random.Random, over: float) -> tuple[Counter, list[str]]:
    """Disturb and resume the victim until it finishes; not any more once time is over. Returns kills by kind, and what
    went wrong."""
    kills, wrong = Counter(), []
    while True:
        jumps = not victim.command and generator.random() < JUMPING
        clock = random.Random(generator.random()) if jumps else None
        begun, kind = _changed(folder, victim), ""
        started = victim.start(folder, clock)
        wanted = kills.total() < MOST and time.monotonic() < over
        if wanted and (pids := _wait(started, victim, folder, begun, generator)):
            kind = draw(generator, len(pids))
            DISTURBANCES[kind].happen(pids, generator)
        statuses = started.settle()
        wrong += complaints(victim, kind, statuses, started.printed)
        if kind and (victim.command or statuses != {0}):  # else it came too late; a launcher starts processes again
            kills[f"{kind}, clock jumps" if clock else kind] += 1
        if statuses == {0} or not kind:
            return kills, wrong


def _wait(started: Processes, victim: Victim, folder: Path, begun: int, generator: random.Random) -> list[int]:
    """Wait for the moment of a disturbance; returns the processes then, none if the victim ends before it. begun: when
    it was last written that training begins."""
    early = generator.random() < EARLY
    until = time.monotonic() + generator.uniform(0.0, START) if early else math.inf
    while not started.over():
        if until == math.inf and _changed(folder, victim) != begun:
            until = time.monotonic() + generator.uniform(0.0, SOON)
        if time.monotonic() > until:
            return started.pids()
        time.sleep(0.002)
    return []


def _changed(folder: Path, victim: Victim) -> int:
    return max((path.stat().st_mtime_ns for path in folder.glob(victim.begun)), default=0)


def complaints(victim: Victim, kind: str, statuses: set[int], printed: str) -> list[str]:
    """What was wrong with its end. A script may fail in any way after a disturbance, but not crash."""
    right = RIGHT | ({DISTURBANCES[kind].status} if victim.ours else {*range(HANGS)}) if kind else {0}
    wrong = [f"ended with {statuses}"] * (not statuses <= right) + ["hangs"] * (HANGS in statuses)
    wrong += ["a traceback"] * ("Traceback" in printed and (victim.ours or not kind))
    return [f"{victim.words}, {kind or 'undisturbed'}: {', '.join(wrong)}\n{printed[-2000:]}"] if wrong else []


def same(one: object, other: object, rounding: float = 0.0) -> bool:
    """Equal up to this rounding."""
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=rounding, atol=rounding)
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=rounding, abs_tol=rounding)
    if isinstance(one, dict):
        return one.keys() == other.keys() and same(list(one.values()), [other[key] for key in one], rounding)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(*pair, rounding) for pair in zip(one, other, strict=True))
    return one == other


@dataclass
class Outcome:
    """Of one victim."""

    name: str
    words: str
    kills: Counter
    wrong: list[str]
    differs: bool
    seconds: float
    cpu_seconds: float

    def __str__(self) -> str:
        verdict = "DIFFERENT" if self.differs else "WRONG" if self.wrong else "same"
        used = f"{self.seconds:.0f} s, {self.cpu_seconds:.0f} CPU s"
        return "\n".join([f"{verdict} after {self.kills.total()} kills, {used}: {self.words}", *self.wrong])


def differ(victim: Victim, folders: list[Path]) -> bool:
    """Whether the victim in one folder came to another end than that in the other, or one of them to none."""
    try:
        return not same(*map(victim.outcome, folders), victim.rounding)
    except Exception:  # whatever it is that files lack of a victim that failed
        return True


def soak(seed: str, over: float, scratch: Path, told: Connection) -> None:
    """One victim after another until time is over; what comes of each is told."""
    die_with_parent()
    signal.signal(signal.SIGINT, lambda *_: None)  # the keyboard interrupts the parent, too, and that ends this
    generator, folders = random.Random(seed), [scratch / "oracle", scratch / "run"]
    while time.monotonic() < over:
        name = generator.choices(list(VICTIMS), [share for _, share in VICTIMS.values()])[0]
        victim, began, used = VICTIMS[name][0](generator), time.monotonic(), cpu_seconds()
        oracle = victim.start(folders[0])
        wrong = complaints(victim, "", oracle.settle(), oracle.printed)
        kills, more = disturbed(victim, folders[1], generator, over)
        differs = differ(victim, folders)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        words = f"{victim.words}, {victim.processes} process{'es' * (victim.processes > 1)}"
        times = time.monotonic() - began, cpu_seconds() - used
        told.send(Outcome(name, words, kills, wrong + more, differs, *times))


def outcomes(seed: int, over: float, scratch: Path) -> Iterator[Outcome]:
    """Of all lanes, as they come. Their processes are forks: nothing here may have threads."""
    context, lanes = multiprocessing.get_context("fork"), {}
    for lane in range(LANES):
        (own := scratch / str(lane)).mkdir()
        told, telling = context.Pipe(duplex=False)
        lanes[told] = context.Process(target=soak, args=(f"{seed}.{lane}", over, own, telling))
        lanes[told].start()
        telling.close()
    try:
        while lanes:
            for told in wait(lanes):
                try:
                    yield told.recv()
                except EOFError:
                    lane = lanes.pop(told)
                    lane.join()
                    if lane.exitcode:
                        raise RuntimeError(f"a lane ended with status {lane.exitcode}") from None
    finally:
        for lane in lanes.values():  # if this was interrupted
            lane.kill()  # and with it its victims
            lane.join()


def main(command_line: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--seconds", type=positive, default=600, help="how long (default: 600)")
    parser.add_argument("--seed", type=int, default=None, help="of what is drawn (default: the time)")
    arguments = parser.parse_args(command_line)
    seed = time.time_ns() % 10**6 if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    record, over, found = Record("soak", seed), time.monotonic() + arguments.seconds, []
    load_kernels()
    warm_up()
    gc.freeze()  # else collecting garbage in a fork copies the memory that it shares with this process
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:  # killed victims may take a moment
        for outcome in outcomes(seed, over, Path(scratch)):
            print(outcome, flush=True)
            found.append(outcome)
            record.write(**summary(found))
    print(f"{sum(record.total('kills').values())} kills so far, {dict(record.total('differences'))}")
    return 1 if any(outcome.differs or outcome.wrong for outcome in found) else 0


def summary(found: list[Outcome]) -> dict:
    """Kills by what happened, of victims of every kind."""
    kills = sum((outcome.kills for outcome in found), Counter())
    by_victim = sum((Counter({outcome.name: outcome.kills.total()}) for outcome in found), Counter())
    return {
        "victims": len(found),
        "kills": dict(sorted(kills.items())),
        "kills_by_victim": dict(sorted(by_victim.items())),
        "differences": sum(outcome.differs for outcome in found),
        "findings": [words.partition("\n")[0] for outcome in found for words in outcome.wrong],  # not what was printed
        "cpu_seconds": round(sum(outcome.cpu_seconds for outcome in found), 1),
    }


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(exit_status(main, "interrupted: the victims before are counted"))
