"""Arrays that take long to make, kept in files. A cache file may be missing or damaged at any time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]
UNREADABLE = (OSError, EOFError, ValueError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error)


def cache_folder() -> Path:
    """The environment variable CDGRAB_CACHE, else ~/.cache/cdgrab."""
    return Path(os.environ.get("CDGRAB_CACHE") or "~/.cache/cdgrab").expanduser()


def cached(name: str, key: dict, build: Callable[[], Arrays]) -> Arrays:
    """The arrays of `build()`, from the cache if it has them.

    `key` names everything they depend on (checksums of sources, settings): other keys, other files. Missing and
    damaged files are made again; if the folder is not writable, the arrays are made every time.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = cache_folder() / f"{name}-{digest[:16]}.npz"
    with contextlib.suppress(*UNREADABLE):
        return _read(path)
    arrays = build()
    with contextlib.suppress(OSError):
        _write(path, arrays)
    return arrays


def _read(path: Path) -> Arrays:
    """Reads every array at once, so that the checksums of the zip format reveal damage before anything is used."""
    with np.load(path, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


def _write(path: Path, arrays: Arrays) -> None:
    """Whole or not at all, also when several processes make the same file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as folder:
        temporary = Path(folder) / path.name
        np.savez_compressed(temporary, **arrays)
        os.replace(temporary, path)
