"""Files of a half-finished run: damaged, edited, or counterfeit with the right checksum."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from cdgrab.errors import CdgrabError, DivergedError
from experiments import train
from experiments.early import REQUEUE
from experiments.store import checkpoint
from experiments.store.records import read_manifest, read_metrics
from experiments.training import session, signals
from experiments.training.composition import choices
from experiments.training.config import compose
from scripts.fuzz.damage import contents, damage
from scripts.fuzz.gradients import DTYPES, NUMBERS
from scripts.fuzz.states import tampered

MADE = "made by a checkpoint"


def runs(generator: random.Random, scratch: Path) -> Iterator[Callable[[], object]]:
    """Read or resume such a run."""
    chosen = [f"{group}={generator.choice(choices(group))}" for group in ("sorter", "sparsifier")]
    overrides = [*chosen, "data=embedded", "size=smoke", "task.limit=64", "epochs=3", "compile=off"]
    good, whole = _half_done(scratch, overrides)
    names = [path.name for path in good.iterdir()]

    def attempt(folder: Path, counterfeit: bool, resume: bool) -> None:
        before = contents(folder)
        try:
            if resume:
                _resumed([*overrides, f"run_dir={folder}", "resume=true"])
                assert counterfeit or _losses(folder) == whole, "another result"
                epochs = [line["epoch"] for line in read_metrics(folder / "metrics.jsonl")]
                assert epochs == list(range(1, len(whole) + 1)), "metrics of other epochs"
            else:
                run = compose([*overrides, f"run_dir={folder}", "resume=true"])
                session.may_start(run, speak=False)
                read_manifest(folder), read_metrics(folder / "metrics.jsonl"), checkpoint.load(folder, lambda _: None)
        except DivergedError:  # it went on from a counterfeit
            raise
        except (CdgrabError, OSError):
            there = tuple(contents(folder).values())  # a damaged checkpoint may have been put aside
            if (folder / "logs").exists():  # training began and could not save; lines after the checkpoint may go
                assert _losses(folder)[:1] == whole[:1], "metrics were changed"
                before = {path: old for path, old in before.items() if not path.endswith(("manifest.json", ".jsonl"))}
            assert all(any(new.startswith(old) for new in there) for old in before.values()), "a file was changed"
            raise
        finally:
            shutil.rmtree(folder)

    while True:
        folder = scratch / f"run{generator.random()}"
        shutil.copytree(good, folder)
        counterfeit = generator.random() < 0.4
        if counterfeit:
            _counterfeit(folder, generator)
        elif generator.random() < 0.3:
            _edit(folder / "manifest.json", generator)
        else:
            for name in generator.sample(names, generator.choice((1, 1, 2))):
                damage(folder / name, generator)
        yield partial(attempt, folder, counterfeit, generator.random() < 0.4)


def _half_done(scratch: Path, overrides: list[str]) -> tuple[Path, list]:
    """The folder of a run that was stopped in its second epoch, and its losses when it is resumed."""
    folder = scratch / "good"
    asked, patience = signals.StopRequest.__call__, signals.PATIENCE
    signals.PATIENCE = 0  # it is asked after every step, however fast those are
    signals.StopRequest.__call__ = lambda stop_request: signal.SIGTERM * bool(read_metrics(folder / "metrics.jsonl"))
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            status = train.main([*overrides, f"run_dir={folder}", "checkpoint.every_steps=1"])
    finally:
        signals.StopRequest.__call__, signals.PATIENCE = asked, patience
    assert status == REQUEUE and len(read_metrics(folder / "metrics.jsonl")) == 1
    shutil.rmtree(folder / "logs")
    shutil.copytree(folder, scratch / "whole")
    assert train.main([*overrides, f"run_dir={scratch / 'whole'}", "resume=true"]) == 0
    return folder, _losses(scratch / "whole")


def _losses(folder: Path) -> list:
    return [(line["train_loss"], line["order_hash"]) for line in read_metrics(folder / "metrics.jsonl")]


def _resumed(arguments: list[str]) -> None:
    """Resume by the command itself; its refusal, one line, is raised."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
        status = train.main(arguments)
    *warnings, error = printed.getvalue().splitlines() or [""]
    assert all(line.startswith("warning: ") for line in warnings), printed.getvalue()
    if status:
        assert status in (CdgrabError.status, DivergedError.status) and error.startswith("error: "), printed.getvalue()
        raise CdgrabError(error) if status == CdgrabError.status else DivergedError(error)


class Malice:
    """Pickled: whoever loads it makes a folder."""

    def __reduce__(self) -> tuple:
        return os.mkdir, (MADE,)


def _edit(path: Path, generator: random.Random) -> None:
    with contextlib.suppress(ValueError):  # a list that holds itself
        path.write_text(json.dumps(tampered(json.loads(path.read_text()), generator), default=str))


def _counterfeit(folder: Path, generator: random.Random) -> None:
    """Write another checkpoint with the right checksum."""
    content = checkpoint.load(folder)
    key = generator.choice(list(content))
    way = generator.choice(("without", "other", "shape", "values", "program", "version", "inside", "inside", "inside"))
    if way == "inside":
        content = tampered(content, generator)
    elif way == "without":
        del content[key]
    elif way == "other":
        content[key] = generator.choice((None, "text", -1, 10**9, 0.5, [], {}, torch.zeros(0), torch.tensor(torch.nan)))
    elif way == "shape":
        content["parameters"] = torch.zeros(generator.randrange(100), dtype=generator.choice(DTYPES))
    elif way == "values":
        content["parameters"] = torch.full_like(content["parameters"], generator.choice(NUMBERS))
    elif way == "program":
        content = Malice()
    for path in folder.glob("checkpoint*.pt"):
        path.unlink()
    buffer = io.BytesIO()
    torch.save(content, buffer)
    first = b"cdgrab checkpoint 1 " if way == "version" else checkpoint.FORMAT
    signature = hashlib.sha256(buffer.getvalue()).hexdigest().encode()
    (folder / checkpoint.FILE).write_bytes(first + signature + b"\n" + buffer.getvalue())
