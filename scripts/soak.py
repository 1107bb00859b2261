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
    "lr_hmda": ["task=lr_hmda", "epochs=12"],
    "mlp_m4": ["task=mlp_m4", "size=smoke", "task.batch=8", "epochs=6"],
    "cifar10": ["task=cifar10", "size=smoke", "task.batch=8", "epochs=4"],
    "lstm_wiki2": ["task=lstm_wiki2", "size=smoke", "epochs=4"],
}
SORTERS = ["cd_grab", "cd_grab", "id_grab_pair", "id_grab_bal", "kh", "d_rr", "riffle"]
SPARSIFIERS = [[], [], ["sparsifier=exdyna", "sparsifier.density=0.05"], ["sparsifier=topk", "sparsifier.density=0.05"]]
WORKERS, PROCESSES = 4, (1, 1, 2, 4)
WAYS = ("one rank", "everything", "everything", "SIGTERM")
LONGEST = 12.0  # seconds from a start to what happens next
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
        status = _disturb(case, process, generator, deadline)
        kills += status is None or status == "killed a rank"
        if process.returncode == 0:
            return kills


def _disturb(case: Case, process: subprocess.Popen, generator: random.Random, deadline: float) -> str | None:
    """Let it run for a while, then do something; None when everything was ended by it."""
    ranks_killed = False
    while True:
        try:
            process.wait(max(1.0, deadline - time.monotonic()) if time.monotonic() > deadline else _moment(generator))
            _expect(process.returncode in (0, REQUEUE), case, f"ended with status {process.returncode}")
            return "killed a rank" if ranks_killed else "undisturbed"
        except subprocess.TimeoutExpired:
            pass
        if time.monotonic() > deadline:
            continue
        way = generator.choice(WAYS)
        if way == "one rank" and case.processes > 1:
            ranks = _children(process.pid)
            if ranks:
                _kill(generator.choice(ranks), signal.SIGKILL)
                ranks_killed = True
            continue
        if way == "SIGTERM":
            _kill(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                _expect(False, case, "did not end a minute after SIGTERM")
        else:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for rank in _children(process.pid):
            _kill(rank, signal.SIGKILL)
        return None


def _moment(generator: random.Random) -> float:
    return generator.uniform(0.2, LONGEST)


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
            case, folder = draw(generator), Path(scratch) / f"run{cases}"
            oracle = folder.with_name(f"oracle{cases}")
            _expect(
                case.start(oracle).wait() == 0, case, f"failed undisturbed:\n{oracle.with_suffix('.log').read_text()}"
            )
            here = disturbed(case, folder, generator, deadline)
            same = without_times(folder) == without_times(oracle)
            kills, differences, cases = kills + here, differences + (not same), cases + 1
            print(f"{'same' if same else 'DIFFERENT'} after {here} kills: {case}", flush=True)
    print(f"{cases} runs, {kills} kills survived, {differences} differences")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
