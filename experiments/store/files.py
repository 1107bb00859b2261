"""Files that are either completely written or unchanged, even if the machine stops or the disk is full."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from cdgrab.errors import CdgrabError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
RUNS = RESULTS / "runs"


def home(trial: bool = False) -> Path:
    """results/; of what is no evidence, being small or made of embedded data, results/trial, which git ignores."""
    return RESULTS / "trial" if trial else RESULTS


def figures_folder() -> Path:
    """results/figures, or the folder named by CDGRAB_FIGURES."""
    return Path(os.environ.get("CDGRAB_FIGURES") or RESULTS / "figures")


@contextlib.contextmanager
def replacing(path: Path, put: Callable[[Path, Path], None] = os.replace) -> Iterator[BinaryIO]:
    """What is written in this context becomes the file when it ends. `put(new, path)` moves it there."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # left by a process that was killed; or a link that must not be followed
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        put(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error  # writing alone names no file


def open_itself(path: str | Path, flags: int) -> int:
    """The open file; a link that somebody else put in its place is not followed."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o644)


def own_folder(path: Path) -> Path:
    """The folder, which is made where it is missing; a link that somebody else put in its place is refused."""
    path.mkdir(exist_ok=True)
    if path.is_symlink():
        raise CdgrabError(f"{path} is a link, and nothing is written through links; choose another run_dir")
    return path


def append_line(path: Path, content: dict) -> None:
    """The line is on the disk before this returns. If the disk is full, nothing is written rather than a part."""
    line = (json.dumps(content) + "\n").encode()
    handle = open_itself(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    size = os.fstat(handle).st_size
    try:
        if os.write(handle, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(handle)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, size)
        raise OSError(error.errno, error.strerror, str(path)) from error  # writing alone names no file
    finally:
        os.close(handle)


def write_atomically(path: Path, text: str) -> None:
    """Whenever the machine stops, there is either the old file or the complete new one."""
    with replacing(path) as file:
        file.write(text.encode())
