"""Carries out the runs of a sweep: in this process, those that are alike together, or by torchrun if a run needs
several processes."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch

from cdgrab.checks import auto_or_count
from cdgrab.errors import CdgrabError, MissingError, Stopped
from cdgrab.runtime.group import WorkerGroup
from experiments import screen
from experiments.early import STATUS, say
from experiments.store.files import ROOT
from experiments.training.config import Run, compose
from experiments.training.grouping import groups
from experiments.training.progress import VARIABLE, Progress, result
from experiments.training.session import carry_out, exit_status, may_start

Names = dict[Path, str]  # what runs are called, by their folders


def process_count(wanted: int | str, workers: int) -> int:
    """auto: one process per GPU, as far as they divide the workers; one process on a CPU."""
    auto_or_count("nproc", wanted)
    if wanted == "auto":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 1
        return max(n for n in range(1, min(max(gpus, 1), workers) + 1) if workers % n == 0)
    return wanted


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start: its configuration, its overrides, and its number of processes on each host."""

    run: Run
    overrides: list[str]
    processes: int


def prepare(overrides: list[str]) -> Prepared:
    """Compose and check a run; unless told otherwise, an interrupted run will be resumed."""
    if not any(override.startswith("resume=") for override in overrides):
        overrides = [*overrides, "resume=true"]
    run = compose(overrides)
    workers, hosts = run.config.workers, run.config.nnodes
    WorkerGroup(workers, world_size=hosts)  # refuses hosts and processes that do not divide the workers
    processes = process_count(run.config.nproc, workers // hosts)
    WorkerGroup(workers, world_size=hosts * processes)
    return Prepared(run, overrides, processes)


def grouped(runs: list[Prepared], jobs: int = 1) -> list[list[Prepared]]:
    """Runs that train together; `jobs`: processes that share the work."""
    alone = [not _in_this_process(prepared) for prepared in runs]
    return [[runs[number] for number in group] for group in groups([p.run for p in runs], alone, jobs)]


def launch(together: list[Prepared], progress: Progress | None = None, names: Names | None = None) -> list[int]:
    """Carry out those of these runs that are not complete: one run, or several that train together. Returns exit
    statuses; a signal ends the process, and so the sweep. progress, names: those of the sweep they belong to."""
    progress = progress or Progress(len(together))
    ended = exit_status(lambda: _launch(together, progress, names))  # statuses, or that of an error
    gc.collect()  # a run's tensors are in reference cycles: free them before the next run needs the memory
    if ended in STATUS.values():
        # Not an Exception: Hydra would take that for one failed run of a sweep and start the next.
        raise SystemExit(ended)
    return ended if isinstance(ended, list) else [ended]


def launch_all(runs: list[Prepared]) -> list[int]:
    """Returns exit statuses. A diverged run does not end a sweep. A refused one does, since others would be too."""
    statuses, progress, names = [], Progress(len(runs)), announced(runs)
    for together in grouped(runs):
        statuses += launch(together, progress, names)
        if CdgrabError.status in statuses:  # refused
            break
    return statuses


def announced(runs: list[Prepared]) -> Names:
    """Says what the sweep is. Returns what to call its runs: their folders, without what they have in common."""
    folders = [prepared.run.directory for prepared in runs]
    if len(runs) == 1:
        return {folders[0]: str(folders[0])}
    home = Path(os.path.commonpath([folder.parent for folder in folders]))
    data = dict.fromkeys(prepared.run.source.description for prepared in runs)
    print(
        f"{len(runs)} runs on {next(iter(data)) if len(data) == 1 else f'{len(data)} datasets'}\nin {home}", flush=True
    )
    return {folder: str(folder.relative_to(home)) for folder in folders}


def _launch(together: list[Prepared], progress: Progress, names: Names | None) -> list[int]:
    names, total, first = names or announced(together), progress.total, progress.first
    waiting = [prepared for prepared in together if may_start(prepared.run, speak=total == 1)]
    complete = [prepared.run for prepared in together if prepared not in waiting]
    for number, run in enumerate(complete if total > 1 else (), first):  # one alone has said so
        print(f"{result(run, names[run.directory], number, total)} (already complete)", flush=True)
    progress.skip(len(complete))
    if not waiting:
        return [0]
    _announce(waiting, progress)
    first = progress.first
    if _in_this_process(waiting[0]):
        statuses = carry_out(*(prepared.run for prepared in waiting), progress=progress)
    else:
        statuses = [_isolated(waiting[0], progress)]
    left = "" if screen.has_status_line() else progress.left()
    for number, (prepared, status) in enumerate(zip(waiting, statuses, strict=True), first):
        if status == 0:
            after = f" ({left} left)" if left and prepared is waiting[-1] else ""
            print(result(prepared.run, names[prepared.run.directory], number, total) + after, flush=True)
    return [status if status >= 0 else 128 - status for status in statuses]  # for a killed process, as shells do


def _announce(waiting: list[Prepared], progress: Progress) -> None:
    run, processes, hosts = waiting[0].run, waiting[0].processes, waiting[0].run.config.nnodes
    where = f"{processes} process{'es' * (processes > 1)}" + f" on each of {hosts} hosts" * (hosts > 1)
    if len(waiting) > 1:
        print(f"runs {progress.first}–{progress.first + len(waiting) - 1} train together, {where}", flush=True)
    elif progress.total == 1:
        print(f"running {run.directory} on {run.source.description}, {where}", flush=True)


def _in_this_process(prepared: Prepared) -> bool:
    return prepared.processes == prepared.run.config.nnodes == 1 and not _survives_its_death(prepared)


def _survives_its_death(prepared: Prepared) -> bool:
    """Whether the user asked for a run on one process to be restarted if that is killed."""
    return prepared.run.config.restarts > 0 and any(o.startswith("restarts=") for o in prepared.overrides)


def _isolated(prepared: Prepared, progress: Progress) -> int:
    """Its first process shows how far it is, and what has been made before."""
    run, processes, arguments = prepared.run, prepared.processes, ["-m", "experiments.train", *prepared.overrides]
    os.environ.update(progress.tell())
    try:
        with progress.watching(1, run.directory.name, 0.0):
            screen.show(None)
            return _by_torchrun(run, arguments, processes)
    finally:
        os.environ.pop(VARIABLE)


def _by_torchrun(run: Run, arguments: list[str], processes: int) -> int:
    if run.config.nnodes == 1:
        return _with_restarts(arguments, processes, run.config.restarts)
    name = hashlib.sha256(str(run.directory).encode()).hexdigest()[:16]  # the same on all hosts
    hosts = {"nnodes": run.config.nnodes, "rdzv": run.config.rdzv, "name": name, "restarts": run.config.restarts}
    return torchrun(arguments, processes, **hosts)


def _with_restarts(arguments: list[str], processes: int, restarts: int) -> int:
    """If a process dies or hangs, the run continues from its last checkpoint. A refused run is not restarted, which
    torchrun's own restarts would do."""
    for left in reversed(range(restarts + 1)):
        status = torchrun(arguments, processes)
        arguments = [*(argument for argument in arguments if not argument.startswith("resume=")), "resume=true"]
        if left == 0 or not (status < 0 or status == MissingError.status):
            break
        why = f"killed by signal {-status}" if status < 0 else "missing"
        print(f"  a process was {why}: going on from the last checkpoint ({left} more times)", flush=True)
    return status


def torchrun(arguments: list[str], processes: int, **hosts: object) -> int:
    """The first failing rank's status; see `cdgrab.runtime.torchrun`. Ranks find this checkout's packages."""
    from cdgrab.runtime import torchrun as runtime  # takes a second, and few runs need it

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "60")  # a stopped run first finishes some steps
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    handlers = {number: signal.getsignal(number) for number in STATUS}
    try:
        return runtime.torchrun(arguments, processes, **hosts)
    except MissingError as error:
        say(str(error))
        return error.status
    except Stopped as stop:
        raise SystemExit(STATUS.get(stop.number, 128 + stop.number)) from None
    finally:  # torchrun leaves its own handlers
        for number, handler in handlers.items():
            signal.signal(number, handler)
