"""Kill and resume runs at random for some minutes, and compare each with an undisturbed one.

    python -m scripts.soak                       # `make soak`: ten minutes
    python -m scripts.soak --seconds 60 --seed 3

Tasks, sorters, sparsifiers and process counts are drawn at random, on embedded data; so are sweeps whose runs train
together. So are the moments, mostly during training, sometimes during the start, and what happens then: one rank is
killed (torchrun restarts all of them), everything is killed, or a scheduler asks the run to stop. In the end metrics,
orders and parameters must equal those of the undisturbed run to the last bit; no process may be left behind, hang, or
end in a traceback. Runs that trained together may train in other groups after a kill, and then round differently: they
are in float64, and must be equal to nine digits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.early import REQUEUE
from experiments.store import checkpoint
from experiments.store.files import ROOT
from scripts.arguments import Parser, positive

TASKS = {  # settings, and epochs that take some seconds
    "lr_hmda": (["task.limit=400"], 40),
    "mlp_m4": (["size=smoke", "task.batch=8"], 14),
    "cifar10": (["size=smoke", "task.batch=8"], 16),
    "lstm_wiki2": (["size=smoke"], 12),
}
SORTERS = ["cd_grab", "cd_grab", "id_grab_pair", "id_grab_bal", "kh", "d_rr", "riffle"]
SPARSIFIERS = [[], [], ["sparsifier=exdyna", "sparsifier.density=0.05"], ["sparsifier=topk", "sparsifier.density=0.05"]]
WORKERS, PROCESSES = 4, (1, 1, 1, 2, 4)
GROUPED = 0.3  # share of sweeps whose runs train together
SAME_DIGITS = 1e-9
LANES = 2  # runs under way at the same time
MOST = 12  # kills per run; after them it may finish
STARTING, TRAINING = "while starting", "in training"
EARLY = 0.2  # share of kills soon after the start, mostly before training begins
LONGEST = {STARTING: 8.0, TRAINING: 2.0}  # seconds until the next kill
LIMIT = 240.0  # seconds after which a process counts as hanging
TIMES = ("seconds", "phases", "replicas")  # what differs from run to run


@dataclass
class Case:
    """A run, or the runs of a sweep: settings on the command line, and the number of processes."""

    settings: list[str]
    processes: int = 1
    grouped: bool = False

    def start(self, folder: Path, *more: str) -> subprocess.Popen:
        """In a process group of its own."""
        run = ["-m", "experiments.train", *self.settings, f"run_dir={folder}", *more]
        if self.grouped:
            each = f"run_dir={folder}/${{sorter.name}}-${{seed}}"
            run = ["-m", "experiments.launch", "-m", *self.settings, each, *more]
        elif self.processes > 1:
            run = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=99", "--monitor-interval=0.1",
                   f"--nproc-per-node={self.processes}", *run]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with open(log_of(folder), "a") as log:
            return subprocess.Popen(
                [sys.executable, *run], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def __str__(self) -> str:
        how = "together" if self.grouped else f"{self.processes} process{'es' * (self.processes > 1)}"
        return f"{' '.join(self.settings)}, {how}"


def draw(generator: random.Random) -> Case:
    task, processes = generator.choice(list(TASKS)), generator.choice(PROCESSES)
    more, epochs = TASKS[task]
    settings = [f"task={task}", *more, f"workers={WORKERS}", "data=embedded", "timeout=30"]
    settings += [f"checkpoint.every_steps={generator.choice([5, 11, 20])}"]
    settings += [f"compile={generator.choice(['off', 'off', 'auto'])}"]
    if generator.random() < GROUPED:
        sorters, seeds = generator.sample(sorted(set(SORTERS)), 2), generator.sample(range(9), 2)
        swept = [f"{name}={','.join(map(str, values))}" for name, values in (("sorter", sorters), ("seed", seeds))]
        settings += [*swept, f"epochs={epochs // 4}", "task.dtype=float64", *generator.choice(SPARSIFIERS)]
        return Case(settings, grouped=True)
    settings += [f"epochs={epochs // 2 if processes > 2 else epochs}", f"seed={generator.randrange(9)}"]
    return Case([*settings, f"sorter={generator.choice(SORTERS)}", *generator.choice(SPARSIFIERS)], processes)


def disturbed(case: Case, folder: Path, generator: random.Random, over: threading.Event) -> Counter:
    """Kill and resume the run until it finishes; no more kills once time is `over`. Returns the kills by moment."""
    kills: Counter = Counter()
    while True:
        begun = _changed(folder)
        process = case.start(folder, "resume=true")
        while not over.is_set() and kills.total() < MOST and (moment := _wait(process, folder, begun, generator)):
            kills[moment] += 1
            begun = _changed(folder)
            if not _one_rank_killed(case, process, generator):
                _end(case, process, generator)
                break
        else:
            _finish(process, case)
        _expect(_left_behind(folder) == [], case, "left processes behind")
        if process.returncode == 0:
            return kills


def _wait(process: subprocess.Popen, folder: Path, begun: int, generator: random.Random) -> str | None:
    """Wait for the moment of a kill; None when the run ends before it. begun: when the manifest was last written."""
    moment = STARTING if generator.random() < EARLY else TRAINING
    hangs = time.monotonic() + LIMIT
    while moment == TRAINING and _changed(folder) == begun and process.poll() is None:
        if time.monotonic() > hangs:
            raise SystemExit(f"error: {folder} does not begin within {LIMIT:.0f} seconds: {log_of(folder).read_text()}")
        time.sleep(0.01)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(generator.uniform(0.0, LONGEST[moment]))
        return None
    return moment


def _one_rank_killed(case: Case, process: subprocess.Popen, generator: random.Random) -> bool:
    """Kill one rank, in a third of the cases where there are several."""
    ranks = _children(process.pid)
    if case.processes == 1 or len(ranks) < case.processes or generator.random() > 1 / 3:
        return False
    _kill(generator.choice(ranks), signal.SIGKILL)
    return True


def _end(case: Case, process: subprocess.Popen, generator: random.Random) -> None:
    """End the whole run, at once or with a scheduler's signal."""
    if generator.random() < 1 / 3:
        _kill(process.pid, signal.SIGTERM)
        early = {-signal.SIGTERM}  # before it listened
        plain_torchrun = {1} if case.processes > 1 else set()
        _finish(process, case, {0, REQUEUE} | early | plain_torchrun)
    else:
        for pid in (process.pid, *_children(process.pid)):
            _kill(pid, signal.SIGKILL)
        _finish(process, case, {-signal.SIGKILL, 0})


def _finish(process: subprocess.Popen, case: Case, statuses: Iterable[int] = (0,)) -> None:
    try:
        status = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"error: {case}: hangs") from None
    _expect(status in statuses, case, f"ended with status {status}")


def _changed(folder: Path) -> int:
    """When a manifest was last written, which every start does when training begins."""
    return max((path.stat().st_mtime_ns for path in folder.rglob("manifest.json")), default=0)


def _left_behind(folder: Path) -> list[int]:
    """Processes of this run that are still there after a while."""
    deadline = time.monotonic() + 20
    while True:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if f"run_dir={folder}".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


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


def log_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")


def tracebacks(folder: Path) -> int:
    """How many were printed, not counting torchrun's own when it gets a signal."""
    _, *found = log_of(folder).read_text().split("Traceback (most recent call last)")
    return sum("SignalException" not in words for words in found)


def outcomes(folder: Path) -> list[tuple]:
    """What must be equal, of every run in the folder: its name, the metrics without times, and the checkpoint."""
    runs = sorted(path.parent for path in folder.rglob("manifest.json"))
    return [(run.relative_to(folder).name, *_outcome(run)) for run in runs]


def _outcome(folder: Path) -> tuple:
    text = (folder / "metrics.jsonl").read_text()
    lines = [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in text.splitlines()]
    saved = checkpoint.load(folder)
    return lines, text.endswith("\n"), saved["epochs_done"], saved["position"], saved["parameters"], saved["optimiser"]


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


def soak(scratch: Path, seed: str, over: threading.Event) -> Counter:
    """One run after another until time is over: counts kills by moment, runs and differences."""
    generator, found = random.Random(seed), Counter()
    try:
        while not over.is_set():
            started, case = time.monotonic(), draw(generator)
            folder, oracle = (scratch / f"{kind}{seed}.{found['runs']}" for kind in ("run", "oracle"))
            _finish(case.start(oracle), case)
            kills = disturbed(case, folder, generator, over)
            errors = tracebacks(folder)
            _expect(errors == 0, case, f"{errors} tracebacks:\n{log_of(folder).read_text()}")
            equal = same(outcomes(folder), outcomes(oracle), SAME_DIGITS * case.grouped)
            found += kills + Counter({"runs": 1, "differences": not equal})
            took = time.monotonic() - started
            print(f"{'same' if equal else 'DIFFERENT'} after {kills.total()} kills, {took:.0f} s: {case}", flush=True)
    finally:
        over.set()  # for the others too, when something went wrong
    return found


def main(command_line: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--seconds", type=positive, default=600, help="how long (default: 600)")
    parser.add_argument("--seed", type=int, default=None, help="of what is drawn (default: the time)")
    arguments: argparse.Namespace = parser.parse_args(command_line)
    seed = time.time_ns() % 10**6 if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    over = threading.Event()
    timer = threading.Timer(arguments.seconds, over.set)
    timer.start()
    try:
        with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(LANES) as pool:
            lanes = [pool.submit(soak, Path(scratch), f"{seed}.{lane}", over) for lane in range(LANES)]
            found = sum((lane.result() for lane in lanes), Counter())
    finally:
        timer.cancel()
    kills, differences = found[STARTING] + found[TRAINING], found["differences"]
    when = f"{found[TRAINING]} {TRAINING}, {found[STARTING]} {STARTING}"
    print(f"{found['runs']} runs, {kills} kills survived ({when}), {differences} differences")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
