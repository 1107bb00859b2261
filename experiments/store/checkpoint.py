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
BEFORE = f".{FILE}.old"  # exists for a moment, while checkpoints are renamed
DAMAGED = "checkpoint.damaged"


def save(directory: Path, content: dict, keep: int = 1) -> None:
    """Whenever the machine stops, the newest checkpoint is either the old one or the complete new one. The `keep`
    newest are kept; if the disk is full, the old ones stay as they were."""
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
    """The newest checkpoint that can be read, on the CPU; None if there is none. Reports newer ones that are damaged.

    mend: put damaged ones aside, so that they do not displace good ones later.
    """
    damaged = []
    for path in _paths(directory):
        if not path.exists():
            continue
        try:
            content = _read(path)
        except Exception as error:  # a damaged file can raise nearly anything
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
    """There is a newest checkpoint at all times, and until it is replaced all others stay as they were."""
    directory, before = path.parent, path.parent / BEFORE
    names = [directory / FILE, *(directory / f"checkpoint.{age}.pt" for age in range(1, keep))]
    if keep > 1 and names[0].exists():
        before.unlink(missing_ok=True)
        try:
            os.link(names[0], before)
        except OSError:  # a file system without hard links
            os.replace(names[0], before)  # `load` looks for this name too
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
    """Write the names to the disk too, if directories can be synchronised."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
