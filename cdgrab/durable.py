"""Files that are whole and on the disk, or as they were: whenever the machine stops, and when the disk is full."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path, put: Callable[[Path, Path], None] = os.replace) -> Iterator[BinaryIO]:
    """What is written in here becomes the file at its end. `put(new, path)` moves it there."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        put(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error  # writing alone names no file
