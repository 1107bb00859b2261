"""Rows of the benchmark `fleet` that need whole commands: single runs against those of the code in which runs could not
train together yet, and `make reproduce-lr-hmda` from the command to the figure. Each takes a copy of a commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from experiments.store.files import ROOT
from scripts.bench.measure import rounded, summary

BEFORE = "5897529c5aad098b4de91b3902212d80baaf3548"  # the last commit in which every run trained alone
PAIRS = 5  # processes of the same code differ by some percent, so that the fastest epoch of several is compared
ONE_RUN = {  # long enough epochs, given the real data
    "lr_hmda": ["size=quick", "epochs=3"],
    "mlp_m4": ["size=quick", "epochs=3"],
    "cifar10": ["size=quick", "epochs=4"],
    "lstm_wiki2": ["size=quick", "epochs=3", "task.limit=10", "task.test_chunks=2"],
    "gpt2_wiki103": ["size=quick", "epochs=3", "task.limit=400"],
    "glue": ["size=quick", "epochs=3", "task.encoder=frozen", "task.limit=8000"],
}


def rows(repeats: int) -> Iterator[dict]:
    """Nothing where there is no history to compare with."""
    if subprocess.run(["git", "-C", ROOT, "cat-file", "-e", BEFORE], capture_output=True).returncode:
        print("  no single runs: this copy of the code has no history", flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        before, now = (_copy(commit, Path(folder, name)) for name, commit in (("before", BEFORE), ("now", "HEAD")))
        for task, settings in ONE_RUN.items():
            seconds = [(_train(now, task, settings), _train(before, task, settings)) for _ in range(PAIRS)]
            ours, theirs = (min(each) for each in zip(*seconds, strict=True))
            pairs = summary("pair", [one / other for one, other in seconds])
            row = {"task": task, "device": "cpu", "replicas": 1, "ratio": rounded(ours / theirs), "s": rounded(ours)}
            yield row | pairs | {"against": BEFORE[:10]}
        taken = [_reproduce(Path(folder, f"fresh{number}")) for number in range(repeats)]
        row = {"task": "lr_hmda", "device": "cpu", "replicas": 10, "command": "make reproduce-lr-hmda"}
        yield row | summary("s", taken) | {"data": "embedded"}


def _copy(commit: str, into: Path) -> Path:
    into.mkdir()
    archive = subprocess.run(["git", "-C", ROOT, "archive", commit], stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "x", "-C", into], input=archive.stdout, check=True)
    return into


def _run(code: Path, *command: str) -> None:
    settings = os.environ | {"PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", *command], cwd=code, env=settings, check=True, capture_output=True)


def _train(code: Path, task: str, settings: list[str]) -> float:
    """Seconds of the fastest epoch but for the first, in which functions are traced and compiled."""
    with tempfile.TemporaryDirectory() as folder:
        _run(code, "experiments.train", f"task={task}", "device=cpu", *settings, f"run_dir={folder}")
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return min(json.loads(line)["seconds"] for line in lines[1:])


def _reproduce(fresh: Path) -> float:
    """In a copy without results; the environment is there already."""
    _copy("HEAD", fresh)
    start = time.perf_counter()
    _run(fresh, "scripts.reproduce", "lr-hmda", "--data", "embedded")
    return time.perf_counter() - start
