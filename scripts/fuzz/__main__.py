"""Bad input, thousands of times: every answer must be one sentence, and nothing may be lost.

    python -m scripts.fuzz                       # `make fuzz`: ten thousand inputs, some minutes
    python -m scripts.fuzz --inputs 500 --seed 3

Settings, data files, archives, a run's files, gradients, states, arguments and sequences of calls are made up or
damaged at random. An input may be refused with an error of one sentence, or accepted: then it must give the result of
the input that it is equivalent to. Anything else, and any change to existing files or states, is a finding.

Every call is added to results/reliability.json (with changed code: results/trial/reliability.json).
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import logging
import math
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from cdgrab.errors import CdgrabError, file_error
from experiments.early import exit_status
from scripts.arguments import Parser, positive
from scripts.fuzz.archives import archives
from scripts.fuzz.arguments import arguments
from scripts.fuzz.calls import calls
from scripts.fuzz.files import files
from scripts.fuzz.gradients import gradients
from scripts.fuzz.runs import MADE, runs
from scripts.fuzz.samplers import samplers
from scripts.fuzz.settings import settings
from scripts.fuzz.states import states
from scripts.fuzz.tables import tables
from scripts.reliability import Record, cpu_seconds, die_with_parent

KINDS = {  # each with its share of all inputs
    "settings": (settings, 0.1),
    "files": (files, 0.05),
    "tables": (tables, 0.1),
    "archives": (archives, 0.1),
    "runs": (runs, 0.05),
    "gradients": (gradients, 0.2),
    "states": (states, 0.2),
    "samplers": (samplers, 0.05),
    "arguments": (arguments, 0.05),
    "calls": (calls, 0.1),
}
RIGHT = ("taken", "refused")
PORTION, LANES = 2000, 2  # inputs per process, processes at the same time


def fuzz(kind: str, inputs: int, generator: random.Random, scratch: Path) -> Counter:
    """Counts of inputs that were taken and refused, and of each finding."""
    found: Counter = Counter()
    with contextlib.closing(KINDS[kind][0](generator, scratch)) as attempts:
        for attempt in itertools.islice(attempts, inputs):
            try:
                attempt()
                found["taken"] += 1
            except (CdgrabError, OSError) as error:  # commands make one sentence of both
                words = file_error(error) if isinstance(error, OSError) else str(error)
                found["refused" if words and "\n" not in words else f"not one sentence: {words}"] += 1
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                found[f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {str(error)[:200]}"] += 1
    if os.path.exists(MADE):
        os.rmdir(MADE)
        found["a checkpoint was executed"] += 1
    return found


def portions(kinds: dict[str, int], seed: int) -> Iterator[tuple[str, Counter]]:
    """What is found in portions of so many inputs of each kind, each in a process of its own: a crash of the
    interpreter is a finding too."""
    waiting = [(kind, n, min(PORTION, inputs - n)) for kind, inputs in kinds.items() for n in range(0, inputs, PORTION)]
    random.Random(seed).shuffle(waiting)  # whenever it is interrupted, there is something of every kind
    context, running = multiprocessing.get_context("fork"), []
    while waiting or running:
        while waiting and len(running) < LANES:
            kind, first, inputs = waiting.pop(0)
            mine, other = context.Pipe(duplex=False)
            process = context.Process(target=_portion, args=(kind, inputs, f"{seed}.{first}", other))
            process.start()
            other.close()
            running.append((kind, first, process, mine))
        for each in [each for each in running if each[3].poll(0.01)]:
            kind, first, process, mine = each
            running.remove(each)
            try:
                yield kind, mine.recv()
            except EOFError:
                process.join()
                yield kind, Counter({f"inputs from {first} on: ended with status {process.exitcode}": 1})
            process.join()


def _portion(kind: str, inputs: int, seed: str, found: Connection) -> None:
    die_with_parent()
    faulthandler.enable()
    with tempfile.TemporaryDirectory() as scratch:
        found.send(fuzz(kind, inputs, random.Random(seed), Path(scratch)))


def main(command_line: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--inputs", type=positive, default=10_000, help="how many (default: 10000)")
    parser.add_argument("--seed", type=int, default=None, help="of what is drawn (default: the time)")
    parser.add_argument("--kind", choices=KINDS, help="only these (default: all)")
    arguments = parser.parse_args(command_line)
    seed = time.time_ns() % 10**6 if arguments.seed is None else arguments.seed
    shares = {arguments.kind: 1.0} if arguments.kind else {kind: share for kind, (_, share) in KINDS.items()}
    os.environ.pop("CDGRAB_DATA", None)
    resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))  # a cap on memory
    logging.getLogger("cdgrab").addHandler(logging.NullHandler())
    print(f"seed {seed}", flush=True)
    record, counts = Record("fuzz", seed), {kind: Counter() for kind in shares}
    wanted = {kind: math.ceil(share * arguments.inputs) for kind, share in shares.items()}
    for kind, found in portions(wanted, seed):
        counts[kind] += found
        inputs = {kind: counts[kind]["taken"] + counts[kind]["refused"] for kind in counts}
        findings = {f"{kind}: {words}": n for kind in counts for words, n in counts[kind].items() if words not in RIGHT}
        record.write(inputs=inputs, findings=findings, cpu_seconds=round(cpu_seconds(), 1))
    for kind, found in counts.items():
        print(f"{kind}: {found['taken']} taken, {found['refused']} refused")
    for words, times in findings.items():
        print(f"  {times} × {words}")
    print(f"{len(findings)} findings; {record.total('inputs').total()} inputs in all calls so far")
    return 1 if findings else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(exit_status(main, "interrupted: the inputs before are counted"))
