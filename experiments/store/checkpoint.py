"""Checkpoints: atomic, checksummed, the last few kept, independent of the process count; loading executes nothing.

A file is one line, which names the format and the SHA-256 of the rest, and then what torch.save makes of the content.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from cdgrab.errors import CdgrabError, first_line, warn
from experiments.store.files import replacing

FILE = "checkpoint.pt"
FORMAT = b"cdgrab checkpoint 4 "
BEFORE = f".{FILE}.old"  # for a moment, while checkpoints grow older
DAMAGED = "checkpoint.damaged"


def save(directory: Path, content: dict, keep: int = 1) -> None:
    """Either the old checkpoint or the whole new one is the newest, whenever the machine stops. The `keep` newest stay;
    a disk that is full leaves the old ones as they were."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    payload = buffer.getbuffer()
    with replacing(directory / FILE, partial(_put_in_place, keep)) as file:
        file.write(FORMAT + hashlib.sha256(payload).hexdigest().encode() + b"\n")
        file.write(payload)
    _sync(directory)


def exists(directory: Path) -> bool:
    return any(path.exists() for path in _paths(directory))


def load(directory: Path, say: Callable[[str], None] = warn, mend: bool = False) -> dict | None:
    """The newest checkpoint that can be read, on the CPU; None when there is none. Says which newer one is damaged.

    mend: put the damaged one aside, so that it takes no good one's place when those are aged.
    """
    damaged = []
    for path in _paths(directory):
        if not path.exists():
            continue
        try:
            content = _read(path)
        except Exception as error:  # whatever a damaged file makes of the reader
            damaged.append(f"{path} ({first_line(error)[:100]})")
            continue
        if damaged:
            say(f"{' and '.join(damaged)} cannot be read; going on from the one before, {path.name}")
            if mend:
                with contextlib.suppress(OSError):
                    os.replace(directory / FILE, directory / DAMAGED)
        return content
    if damaged:
        raise CdgrabError(
            f"the checkpoint {damaged[0]} cannot be read, and there is none before it; "
            "move the folder away to start this run again"
        )
    return None


def _read(path: Path) -> dict:
    with open(path, "rb") as file:
        line, payload = file.readline(len(FORMAT) + 65), file.read()
    if not line.startswith(FORMAT):
        raise ValueError("it is of another version, or no checkpoint")
    if line[len(FORMAT) :].strip() != hashlib.sha256(payload).hexdigest().encode():
        raise ValueError("its checksum is wrong")
    return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)


def _paths(directory: Path) -> list[Path]:
    """Newest first."""
    older = sorted(directory.glob("checkpoint.[0-9]*.pt"), key=lambda path: (len(path.name), path.name))
    return [directory / FILE, directory / BEFORE, *older]


def _put_in_place(keep: int, new: Path, path: Path) -> None:
    """There is a newest one all the time, and until it is replaced all the others are as they were."""
    directory, before = path.parent, path.parent / BEFORE
    names = [directory / FILE, *(directory / f"checkpoint.{age}.pt" for age in range(1, keep))]
    if keep > 1 and names[0].exists():
        before.unlink(missing_ok=True)
        try:
            os.link(names[0], before)
        except OSError:  # a file system without second names
            os.replace(names[0], before)  # which is found under this name too
    os.replace(new, names[0])
    for older in _paths(directory)[1:]:
        if older not in (names if keep == 1 else [*names, before]):
            older.unlink(missing_ok=True)
    if before.exists():
        for newer, older in reversed(list(zip(names[1:-1], names[2:], strict=True))):
            if newer.exists():
                os.replace(newer, older)
        os.replace(before, names[1])


def _sync(directory: Path) -> None:
    """Names are on the disk too, where directories can be synchronised."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
