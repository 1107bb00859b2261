"""One run, or several that train together, from checked configurations to the last epoch: folders, logs, signals, exit
statuses."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from omegaconf import DictConfig

from cdgrab.errors import CdgrabError, CollectiveError, DivergedError, Stopped, first_line, warn
from cdgrab.runtime import heartbeat, rendezvous
from cdgrab.runtime.connection import connect, disconnect, launched_rank, pick_device
from cdgrab.runtime.group import WorkerGroup
from experiments import early, screen
from experiments.store import checkpoint
from experiments.store.files import open_itself, own_folder
from experiments.store.lock import locked
from experiments.store.records import METRICS, read_manifest, read_metrics
from experiments.training import runlog, signals, snapshot
from experiments.training.config import Run, refuse_other_settings
from experiments.training.grouping import first_members
from experiments.training.loop import Trainer
from experiments.training.member import Member
from experiments.training.memory import keep_freed_memory
from experiments.training.progress import Progress

log = logging.getLogger("cdgrab")
# of what manifests hold
MORE_KINDS = {"config": dict, "reason": str, "resumed": list, "replicas": int, "trackers": dict}
OUT_OF_MEMORY = "memory|alloc|Storage size|overflow"  # words in the messages of torch and numpy


def exit_status(action: Callable[[], Any]) -> Any:
    """Like `early.exit_status`; then disconnects this process from the others of its run."""
    try:
        return early.exit_status(action, say=_say)
    finally:
        disconnect()


def _say(sentence: str) -> None:
    """Most errors occur on all ranks: rank 0 prints them, and torchrun ends the others while they wait."""
    if launched_rank():
        time.sleep(3)
    early.say(sentence)


def carry_out(*runs: Run, progress: Progress | None = None) -> list[int]:
    """Train those of these runs that are not complete, together. All processes of a run call this.

    Returns exit statuses. A run that diverges ends without the others; a run alone raises its error.
    progress: of the sweep that they belong to."""
    keep_freed_memory()
    config = runs[0].config
    group = connect(config.workers, config.timeout)
    with heartbeat.watching(group, config.timeout), contextlib.ExitStack() as stack:
        # torchrun counts restarts only on the host on which a process has died
        again = int(group.gather(torch.tensor([_attempt()])).max()) > 0
        wanted = [run for run in runs if _own(run, group, again, stack)]
        if not wanted:
            return [0] * len(runs)
        with _torch_settings(config):
            errors = _train(wanted, group, progress or Progress(len(runs)))
    return [errors[run.directory].status if run.directory in errors else 0 for run in runs]


def _own(run: Run, group: WorkerGroup, again: bool, stack: contextlib.ExitStack) -> bool:
    """Whether the run needs training. If so, its folder is locked until the stack is closed."""
    again = again and rendezvous.has_begun(str(run.directory))  # what was refused at first is refused again
    run.config.resume = run.config.resume or again
    wanted = may_start(run, speak=group.rank == 0, again=again)
    if wanted and group.rank == 0:
        stack.enter_context(_own_folder(run.directory, patience=60.0 if again else 0.0))
        wanted = may_start(run, again=again)  # another process may have completed it meanwhile
        rendezvous.note_beginning(str(run.directory))
    return bool(group.gather(torch.tensor([int(wanted)]))[0])  # nobody writes before all have checked


def may_start(run: Run, speak: bool = True, again: bool = False) -> bool:
    """False (and says so) if the run is complete; refuses a folder that holds something else. `again`: torchrun has
    restarted it."""
    manifest = read_manifest(run.directory)
    done = len(read_metrics(run.directory / METRICS))
    if not manifest:
        if done:
            raise CdgrabError(f"{run.directory} holds metrics without a manifest; choose another run_dir")
        return True
    kinds = {"science": dict, "status": str} | {name: kind for name, kind in MORE_KINDS.items() if name in manifest}
    if any(type(manifest.get(name)) is not kind for name, kind in kinds.items()):
        raise CdgrabError(f"{run.directory} holds the manifest of something else; choose another run_dir")
    refuse_other_settings(run, manifest["science"], run.directory)
    if manifest["status"] == "finished" and done >= run.config.epochs:
        if speak:
            print(
                f"already complete: {run.directory} ({done} epochs); delete the folder or set run_dir to run it again"
            )
        return False
    if not run.config.resume:
        raise CdgrabError(
            f"{run.directory} holds an unfinished run ({done} of {run.config.epochs} epochs); "
            "add resume=true to go on with it, or choose another run_dir"
        )
    if again and manifest["status"] == "diverged":
        raise DivergedError(manifest.get("reason", "training diverged"))  # as it would again
    then = manifest.get("config", {}).get("checkpoint")
    every = then.get("every_epochs") if isinstance(then, dict) else 1
    if done > (every if type(every) is int else 1) and not checkpoint.exists(run.directory):
        raise CdgrabError(f"{run.directory} has {done} epochs but no checkpoint to go on from; choose another run_dir")
    return True


@contextlib.contextmanager
def enough_memory() -> Iterator[None]:
    """Settings that need too much memory are refused in one sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        words = first_line(error) if str(error) else "out of memory"
        if isinstance(error, CollectiveError) or not re.search(OUT_OF_MEMORY, words):
            raise
        raise CdgrabError(f"there is not enough memory for these settings ({words})") from error


def _train(runs: Sequence[Run], group: WorkerGroup, progress: Progress) -> dict[Path, CdgrabError]:
    """Train the runs, as many at a time as fit into memory. Returns the errors of those that ended early, by folder."""
    device, errors = pick_device(runs[0].config.device), {}
    while runs:
        with enough_memory(), screen.doing("reading data"):
            members = first_members(runs, group, device)
        if len(members) < len(runs):
            print(f"  memory has room for {len(members)} of these {len(runs)} runs at once", flush=True)
        errors |= _train_members(members, progress)
        runs = runs[len(members) :]
        del members  # before the next ones are made
    return errors


def _train_members(members: list[Member], progress: Progress) -> dict[Path, CdgrabError]:
    """Members that were stopped at the same step continue together."""
    warnings: list[str] = []
    saved = {m: snapshot.load(m.run, m.group, warnings.append) if m.config.resume else None for m in members}
    together: dict[tuple[int, int], list[Member]] = {}
    for member in members:
        together.setdefault(snapshot.progress(saved[member]), []).append(member)
    for same in together.values():
        with enough_memory(), screen.doing("preparing the steps"):
            trainer = Trainer(same)
        if any(saved[member] for member in same):
            with snapshot.fitting([member.run for member in same]):
                trainer.load_state_dicts([saved[member] for member in trainer.members])
        _carry_on(trainer, saved, warnings, progress)
    return {member.run.directory: member.error for member in members if member.error}


def _carry_on(trainer: Trainer, saved: dict[Member, dict | None], warnings: list[str], progress: Progress) -> None:
    group, members = trainer.group, trainer.members
    with signals.listening() as stop_request, _told_to_end(stop_request):  # from here on a signal saves
        for member in members:
            member.log = runlog.RunLog(member.run, active=group.rank == 0)
            state = saved[member]
            before = (state["metrics"], state["epochs_done"]) if state else None
            member.log.begin(
                member.run, member.task.rows, member.sizes, group.world_size, trainer.device, before, trainer.replicas
            )
        group.barrier()  # now the folders exist
        with contextlib.ExitStack() as stack:
            for member in members:
                stack.enter_context(_log_file(member.run, group.rank))
            for warning in warnings:
                warn(warning)
                log.warning("%s", warning)
            _fit(trainer, stop_request, progress)


def _fit(trainer: Trainer, stop_request: signals.StopRequest, progress: Progress) -> None:
    logs, done, epochs = [m.log for m in trainer.members], trainer.epochs_done, trainer.config.epochs
    for member in trainer.members:
        log.info("%s on %s, %d of %d epochs done", member.run.directory, member.run.source.description, done, epochs)
    name = f"{trainer.config.task.name} {trainer.config.sorter.name} seed {trainer.config.seed}"
    try:
        with progress.watching(trainer.replicas, name, trainer.part_done) as watch:
            trainer.fit(watch, stop_request)
    except DivergedError as error:
        log.error("%s", error)
        if trainer.replicas == 1:
            raise
    except Stopped as stop:
        _finish(trainer, early.NAMES[stop.number])
        log.info("%s", stop)
        if logs[0].active:
            print(f"{stop}; everything is saved: resume=true goes on", file=sys.stderr)
        raise
    except KeyboardInterrupt:
        _finish(trainer, "interrupted")
        log.info("interrupted")
        if logs[0].active:
            done = trainer.epochs_done
            print(f"interrupted at once, after {done} of {epochs} epochs; resume=true goes on", file=sys.stderr)
        raise
    except CollectiveError as error:
        log.error("%s", error)
        raise
    except Exception:
        log.exception("stopped")
        raise
    _finish(trainer, "finished")
    log.info("finished")


def _finish(trainer: Trainer, status: str) -> None:
    for member in trainer.members:
        if member.error:
            _say(f"{member.run.directory.name}: {member.error}")  # of several runs: one alone raises its error
        else:
            member.log.finish(status)


def _attempt() -> int:
    """How often torchrun has started this run again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


@contextlib.contextmanager
def _torch_settings(config: DictConfig) -> Iterator[None]:
    """torch's settings for the whole process, restored at the end: the next run may want others."""
    settings = torch.backends.cudnn, torch.backends.cuda.matmul
    threads, tf32 = torch.get_num_threads(), [setting.allow_tf32 for setting in settings]
    torch.set_num_threads(config.threads)
    for setting in settings:
        setting.allow_tf32 = config.tf32
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for setting, before in zip(settings, tf32, strict=True):
            setting.allow_tf32 = before


@contextlib.contextmanager
def _told_to_end(stop_request: signals.StopRequest) -> Iterator[None]:
    """When a process dies, torchrun ends the others: then nobody needs to find out which one died."""
    try:
        yield
    except CollectiveError as error:
        if not stop_request():
            raise
        raise Stopped(stop_request(), "ended because another process has died") from error


@contextlib.contextmanager
def _own_folder(directory: Path, patience: float) -> Iterator[None]:
    """Lock the folder. Folders that are made here and stay empty are removed."""
    new = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with locked(directory, patience):  # the process before this one may be ending
            yield
    finally:
        with contextlib.suppress(OSError):  # stops at the first that is not empty
            for path in new:
                path.rmdir()


class _LogFile(logging.FileHandler):
    def _open(self) -> TextIO:
        return open(self.baseFilename, "a", opener=open_itself)


@contextlib.contextmanager
def _log_file(run: Run, rank: int) -> Iterator[None]:
    """Every rank writes its own log, crashes of the interpreter included."""
    handler = _LogFile(own_folder(run.directory / "logs") / f"rank{rank}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.handleError = lambda record: None  # a full disk is reported once, in one sentence
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    faulthandler.enable(handler.stream)
    try:
        yield
    finally:
        faulthandler.disable()
        log.removeHandler(handler)
        handler.close()
