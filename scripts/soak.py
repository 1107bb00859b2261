"""Kill and resume runs at random for some minutes, and compare each with one that was never disturbed.

    python -m scripts.soak                       # `make soak`: ten minutes
    python -m scripts.soak --seconds 60 --seed 3

Tasks, sorters, sparsifiers and process counts are drawn at random, on embedded data; so are the moments, and what
happens then: one rank is killed (torchrun starts all of them again), everything is killed, or a scheduler asks for the
end. At last metrics and orders must be those of the undisturbed run, to the last bit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from cdgrab.config import ROOT
from cdgrab.runlog import read_metrics
from cdgrab.signals import REQUEUE
from scripts.arguments import Parser, positive

TASKS = {
    "lr_hmda": ["task=lr_hmda", "epochs=40"],
    "mlp_m4": ["task=mlp_m4", "size=smoke", "task.batch=8", "epochs=40"],
    "cifar10": ["task=cifar10", "size=smoke", "task.batch=8", "epochs=20"],
    "lstm_wiki2": ["task=lstm_wiki2", "size=smoke", "epochs=40"],
}
SORTERS = ["cd_grab", "cd_grab", "id_grab_pair", "id_grab_bal", "kh", "d_rr", "riffle"]
SPARSIFIERS = [[], [], ["sparsifier=exdyna", "sparsifier.density=0.05"], ["sparsifier=topk", "sparsifier.density=0.05"]]
WORKERS, PROCESSES = 4, (1, 1, 2, 4)
WAYS = ("one rank", "everything", "everything", "SIGTERM")
LONGEST = 9.0  # seconds from a start to what happens next
TIMES = ("seconds", "phases")  # what differs from run to run


@dataclass
class Case:
    """A run, as it is told on the command line, and on how many processes."""

    settings: list[str]
    processes: int

    def start(self, folder: Path, *more: str) -> subprocess.Popen:
        """In a process group of its own."""
        run = ["-m", "experiments.train", *self.settings, f"run_dir={folder}", *more]
        if self.processes > 1:
            run = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=99", "--monitor-interval=0.1",
                   f"--nproc-per-node={self.processes}", *run]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with open(folder.with_suffix(".log"), "a") as log:
            return subprocess.Popen(
                [sys.executable, *run], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def __str__(self) -> str:
        return f"{' '.join(self.settings)}, {self.processes} process{'es' * (self.processes > 1)}"


def draw(generator: random.Random) -> Case:
    settings = [*TASKS[generator.choice(list(TASKS))], f"sorter={generator.choice(SORTERS)}"]
    settings += [
        *generator.choice(SPARSIFIERS),
        f"workers={WORKERS}",
        "data=embedded",
        f"seed={generator.randrange(9)}",
    ]
    settings += [f"checkpoint.every_steps={generator.choice([3, 7, 20])}", "timeout=30", "compile=off"]
    return Case(settings, generator.choice(PROCESSES))


def disturbed(case: Case, folder: Path, generator: random.Random, deadline: float) -> int:
    """Until the run is done, or until the deadline and then without more trouble; returns how often it was killed."""
    kills = 0
    while True:
        process = case.start(folder, "resume=true")
        kills += _disturb(case, process, generator, deadline)
        if process.returncode == 0:
            return kills


def _disturb(case: Case, process: subprocess.Popen, generator: random.Random, deadline: float) -> int:
    """Until it ends, by itself or because everything was ended; returns how often something was done to it."""
    kills = 0
    while True:
        undisturbed = time.monotonic() > deadline
        try:
            process.wait(None if undisturbed else generator.uniform(0.2, LONGEST))
            _expect(process.returncode == 0, case, f"ended with status {process.returncode}")
            return kills
        except subprocess.TimeoutExpired:
            kills += 1
        way, ranks = generator.choice(WAYS), _children(process.pid)
        if way == "one rank" and case.processes > 1 and ranks:
            _kill(generator.choice(ranks), signal.SIGKILL)
            continue
        if way == "SIGTERM":
            _kill(process.pid, signal.SIGTERM)
            status = process.wait()
            fine = (0, REQUEUE, -signal.SIGTERM, 1)  # before it listened; and what torchrun makes of it
            _expect(status in fine, case, f"ended with status {status} at SIGTERM")
        else:
            for pid in (process.pid, *ranks):
                _kill(pid, signal.SIGKILL)
            process.wait()
        return kills


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _expect(right: bool, case: Case, words: str) -> None:
    if not right:
        raise SystemExit(f"error: {case}: {words}")


def without_times(folder: Path) -> list[dict]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def main(command_line: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--seconds", type=positive, default=600, help="how long (default: 600)")
    parser.add_argument("--seed", type=int, default=None, help="of what is drawn (default: the time)")
    arguments: argparse.Namespace = parser.parse_args(command_line)
    seed = time.time_ns() % 10**6 if arguments.seed is None else arguments.seed
    generator, deadline = random.Random(seed), time.monotonic() + arguments.seconds
    kills = differences = cases = 0
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        while time.monotonic() < deadline:
            started, (case, folder) = time.monotonic(), (draw(generator), Path(scratch) / f"run{cases}")
            oracle = folder.with_name(f"oracle{cases}")
            _expect(
                case.start(oracle).wait() == 0, case, f"failed undisturbed:\n{oracle.with_suffix('.log').read_text()}"
            )
            here = disturbed(case, folder, generator, deadline)
            same = without_times(folder) == without_times(oracle)
            kills, differences, cases = kills + here, differences + (not same), cases + 1
            took = time.monotonic() - started
            print(f"{'same' if same else 'DIFFERENT'} after {here} kills, {took:.0f} s: {case}", flush=True)
    print(f"{cases} runs, {kills} kills survived, {differences} differences")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
