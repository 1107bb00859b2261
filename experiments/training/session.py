"""One run, from a checked configuration to its last epoch: its folder, its log, its signals, its exit status."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from cdgrab.errors import CdgrabError, CollectiveError, DivergedError, MissingError, Stopped, file_error, warn
from cdgrab.runtime import group as workers
from cdgrab.runtime import heartbeat, rendezvous
from experiments.store import checkpoint
from experiments.store.lock import locked
from experiments.store.records import read_manifest, read_metrics
from experiments.tasks import make_task
from experiments.training import runlog, signals
from experiments.training.config import Run, refuse_other_settings
from experiments.training.loop import Trainer
from experiments.training.memory import keep_freed_memory

log = logging.getLogger("cdgrab")
REFUSED, DIVERGED, MISSING, INTERRUPTED = 2, 3, 4, 130  # exit statuses
OUT_OF_MEMORY = "memory|alloc|Storage size|overflow"  # in what torch and numpy say then


def exit_status(action: Callable[[], int | None]) -> int:
    """What `action` returns, or: 2 refused, 3 diverged, 4 another process is missing (one sentence on stderr each), 75
    stopped by a scheduler and to be started again, 130 interrupted."""
    try:
        return action() or 0
    except Stopped as stop:
        return signals.STATUS[stop.number]
    except CdgrabError as error:
        _say(str(error))
        return {DivergedError: DIVERGED, MissingError: MISSING}.get(type(error), REFUSED)
    except OSError as error:
        _say(file_error(error))
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        workers.disconnect()


def _say(sentence: str) -> None:
    """Most errors reach all ranks alike: rank 0 speaks, and torchrun ends the others while they wait."""
    if workers.launched_rank():
        time.sleep(3)
    print(f"error: {sentence}", file=sys.stderr, flush=True)


def carry_out(run: Run) -> None:
    """Train, unless the run is complete. All processes of a run call this."""
    keep_freed_memory()
    group = workers.connect(run.config.workers, run.config.timeout)
    with heartbeat.watching(group, run.config.timeout), contextlib.ExitStack() as stack:
        # only on the host on which a process has died does torchrun count that it starts them again
        again = int(group.gather(torch.tensor([_attempt()])).max()) > 0
        again = again and rendezvous.has_begun(str(run.directory))  # what was refused at first is refused again
        run.config.resume = run.config.resume or again
        wanted = may_start(run, speak=group.rank == 0, again=again)
        if wanted and group.rank == 0:
            stack.enter_context(_own_folder(run.directory, patience=60.0 if again else 0.0))
            wanted = may_start(run, again=again)  # another process may have completed it meanwhile
            rendezvous.note_beginning(str(run.directory))
        if group.gather(torch.tensor([int(wanted)]))[0]:  # nobody writes before all have looked
            with _torch_settings(run):
                _train(run, group)


def may_start(run: Run, speak: bool = True, again: bool = False) -> bool:
    """False (and says so) when the run is complete; refuses a folder that holds something else. `again`: torchrun
    starts it once more."""
    manifest = read_manifest(run.directory)
    done = len(read_metrics(run.directory / "metrics.jsonl"))
    if not manifest:
        if done:
            raise CdgrabError(f"{run.directory} holds metrics without a manifest; choose another run_dir")
        return True
    if not {"science", "status"} <= manifest.keys():
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
    if done > 1 and not checkpoint.exists(run.directory):
        raise CdgrabError(f"{run.directory} has {done} epochs but no checkpoint to go on from; choose another run_dir")
    return True


def build_trainer(run: Run, group: workers.WorkerGroup, device: torch.device) -> Trainer:
    """Everything in place for the first step. Refuses settings for which there is not enough memory."""
    try:
        return Trainer(run, make_task(run.config, run.source, device), group, device)
    except (MemoryError, RuntimeError) as error:
        words = str(error).partition("\n")[0] or "out of memory"
        if isinstance(error, CollectiveError) or not re.search(OUT_OF_MEMORY, words):
            raise
        raise CdgrabError(f"there is not enough memory for these settings ({words})") from error


def _train(run: Run, group: workers.WorkerGroup) -> None:
    device = workers.pick_device(run.config.device)
    trainer = build_trainer(run, group, device)
    warnings: list[str] = []
    if run.config.resume:
        trainer.load(warnings.append)
    run_log = runlog.RunLog(run, active=group.rank == 0)
    with signals.listening() as stop_request, _told_to_end(stop_request):  # from here on there is something to save
        run_log.begin(run, trainer.task.rows, trainer.sizes, group.world_size, device, trainer.metrics)
        group.barrier()  # the folder is there
        with _log_file(run, group.rank):
            for warning in warnings:
                warn(warning)
                log.warning("%s", warning)
            _fit(run, trainer, run_log, stop_request)


def _fit(run: Run, trainer: Trainer, run_log: runlog.RunLog, stop_request: signals.StopRequest) -> None:
    done, epochs = trainer.epochs_done, run.config.epochs
    log.info("%s on %s, %d of %d epochs done", run.directory, run.source.description, done, epochs)
    try:
        trainer.fit(run_log, stop=stop_request)
    except DivergedError as error:
        run_log.finish("diverged", str(error))
        log.error("%s", error)
        raise
    except Stopped as stop:
        run_log.finish(signals.NAMES[stop.number])
        log.info("%s", stop)
        if run_log.active:
            print(f"{stop}; everything is saved: resume=true goes on", file=sys.stderr)
        raise
    except KeyboardInterrupt:
        run_log.finish("interrupted")
        log.info("interrupted")
        if run_log.active:
            done = trainer.epochs_done
            print(f"interrupted at once, after {done} of {epochs} epochs; resume=true goes on", file=sys.stderr)
        raise
    except CollectiveError as error:
        log.error("%s", error)
        raise
    except Exception:
        log.exception("stopped")
        raise
    run_log.finish("finished")
    log.info("finished")


def _attempt() -> int:
    """How often torchrun has started this run again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


@contextlib.contextmanager
def _torch_settings(run: Run) -> Iterator[None]:
    """Those of torch that hold for a whole process. The next run in it may want others."""
    settings = torch.backends.cudnn, torch.backends.cuda.matmul
    threads, tf32 = torch.get_num_threads(), [setting.allow_tf32 for setting in settings]
    torch.set_num_threads(run.config.threads)
    for setting in settings:
        setting.allow_tf32 = run.config.tf32
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for setting, before in zip(settings, tf32, strict=True):
            setting.allow_tf32 = before


@contextlib.contextmanager
def _told_to_end(stop_request: signals.StopRequest) -> Iterator[None]:
    """torchrun ends the others when a process dies: nobody need find out which one that was."""
    try:
        yield
    except CollectiveError as error:
        if not stop_request():
            raise
        raise Stopped(stop_request(), "ended because another process has died") from error


@contextlib.contextmanager
def _own_folder(directory: Path, patience: float) -> Iterator[None]:
    """Nobody else writes there meanwhile. Folders that are made here and stay empty are removed."""
    new = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with locked(directory, patience):  # the process before this one may be ending
            yield
    finally:
        with contextlib.suppress(OSError):  # the first that is not empty ends this
            for path in new:
                path.rmdir()


@contextlib.contextmanager
def _log_file(run: Run, rank: int) -> Iterator[None]:
    """Every rank writes its own log, crashes of the interpreter included."""
    folder = run.directory / "logs"
    folder.mkdir(exist_ok=True)
    handler = logging.FileHandler(folder / f"rank{rank}.log")
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
