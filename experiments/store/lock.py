"""One process at a time writes to a run's folder. The lock is released when its process ends, in whatever way."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

from cdgrab.errors import CdgrabError, warn
from experiments.store.files import open_itself

try:
    import fcntl
except ImportError:  # not a POSIX system: no lock there
    fcntl = None

FILE = ".lock"


@contextlib.contextmanager
def locked(directory: Path, patience: float = 0.0) -> Iterator[None]:
    """Hold the folder's lock, or refuse and name its owner; patience: seconds to wait for a process that is ending."""
    if not fcntl:
        yield
        return
    deadline = time.monotonic() + patience
    while (held := _try(directory / FILE)) is None:
        if time.monotonic() > deadline:
            owner = _owner(directory / FILE)
            raise CdgrabError(f"{directory} is being written by {owner}; wait for it, or choose another run_dir")
        time.sleep(0.1)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            (directory / FILE).unlink()
        os.close(held)


def _try(path: Path) -> int | None:
    """The open, locked file; None when another process has it."""
    while True:
        handle = open_itself(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:
            warn(f"{path.parent} is on a file system without locks: start this run only once at a time")
        if _still_there(handle, path):
            break
        os.close(handle)  # its owner has removed it in the meantime
    try:
        os.truncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {platform.node()}".encode(), 0)
    except OSError as error:
        os.close(handle)
        raise OSError(error.errno, error.strerror, str(path)) from error  # writing alone names no file
    return handle


def _still_there(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _owner(path: Path) -> str:
    try:
        return path.read_text().strip() or "another process"
    except OSError:
        return "another process"
