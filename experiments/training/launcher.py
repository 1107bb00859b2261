"""The launcher that make and sweeps go through: one run, through torchrun, on this machine or on several."""

from __future__ import annotations

import hashlib
import os
import sys

import torch

from cdgrab.errors import CdgrabError, MissingError, Stopped, file_error
from cdgrab.runtime import torchrun as runtime
from cdgrab.runtime.group import WorkerGroup
from experiments.store.files import ROOT
from experiments.store.records import read_metrics
from experiments.train import MISSING, REFUSED, may_start
from experiments.training.config import compose
from experiments.training.signals import STATUS


def process_count(wanted: int | str, workers: int) -> int:
    """auto: one process per GPU as far as that divides the workers; one process on a CPU."""
    if wanted == "auto":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 1
        return max(n for n in range(1, min(max(gpus, 1), workers) + 1) if workers % n == 0)
    if not isinstance(wanted, int) or wanted < 1:
        raise CdgrabError(f"nproc must be auto or a whole number of at least 1, got {wanted!r}")
    return wanted


def launch(overrides: list[str]) -> int:
    """Carry out one run unless it is complete; an interrupted one goes on. Returns the exit status."""
    if not any(override.startswith("resume=") for override in overrides):
        overrides = [*overrides, "resume=true"]
    try:
        run = compose(overrides)
        hosts = run.config.nnodes
        WorkerGroup(run.config.workers, world_size=hosts)  # refuses hosts and processes that do not divide the workers
        processes = process_count(run.config.nproc, run.config.workers // hosts)
        WorkerGroup(run.config.workers, world_size=hosts * processes)
        if not may_start(run):
            return 0
    except CdgrabError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"error: {file_error(error)}", file=sys.stderr)
        return REFUSED
    where = f"{processes} process{'es' * (processes > 1)}" + f" on each of {hosts} hosts" * (hosts > 1)
    print(f"running {run.directory} on {run.source.description}, {where}", flush=True)
    arguments = ["-m", "experiments.train", *overrides]
    if hosts > 1:
        name = hashlib.sha256(str(run.directory).encode()).hexdigest()[:16]  # the same on all hosts
        meeting = {"nnodes": hosts, "rdzv": run.config.rdzv, "name": name, "restarts": run.config.restarts}
        status = torchrun(arguments, processes, **meeting)
    else:
        status = _with_restarts(arguments, processes, run.config.restarts)
    if status == 0:
        last = read_metrics(run.directory / "metrics.jsonl")[-1]
        shown = {key: value for key, value in last.items() if key.startswith(("train_", "test_", "val_"))}
        print("  " + ", ".join(f"{key} {value:.6g}" for key, value in shown.items()), flush=True)
    return status if status >= 0 else 128 - status  # of a process that was killed, as shells have it


def _with_restarts(arguments: list[str], processes: int, restarts: int) -> int:
    """A run in which a process dies, or stands still, goes on from its last checkpoint. What is refused stays so,
    which torchrun's own restarts would not respect."""
    for left in reversed(range(restarts + 1)):
        status = torchrun(arguments, processes)
        arguments = [*(argument for argument in arguments if not argument.startswith("resume=")), "resume=true"]
        if left == 0 or not (status < 0 or status == MISSING):
            break
        why = f"killed by signal {-status}" if status < 0 else "missing"
        print(f"  a process was {why}: going on from the last checkpoint ({left} more times)", flush=True)
    return status


def torchrun(arguments: list[str], processes: int, **hosts: object) -> int:
    """The first failing rank's status; see `cdgrab.runtime.torchrun`. Ranks find this checkout's packages."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "60")  # what is asked to end first finishes some steps
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        return runtime.torchrun(arguments, processes, **hosts)
    except MissingError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISSING
    except Stopped as stop:
        # Not an Exception: Hydra would take that for one failed run of a sweep and start the next.
        raise SystemExit(STATUS.get(stop.number, 128 + stop.number)) from None
