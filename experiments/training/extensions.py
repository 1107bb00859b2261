"""Your own sorters, sparsifiers and tasks, in every process: the files that CDGRAB_EXTEND names are loaded.

A process that a run or a study starts does not inherit its parent's imports, but it does inherit the environment.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from pathlib import Path

from cdgrab.errors import CdgrabError, first_line

VARIABLE = "CDGRAB_EXTEND"


def extend_with(path: str) -> None:
    """Let this process, and those it starts, load one more file."""
    os.environ[VARIABLE] = os.pathsep.join(filter(None, [path, os.environ.get(VARIABLE)]))


def load_extensions() -> None:
    """Load each file once. What it registers in SORTERS, SPARSIFIERS or TASKS can then be used by name."""
    for path in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        _load(Path(path).expanduser().resolve())


@cache
def _load(path: Path) -> None:
    name = str(path.with_suffix(""))  # the whole path: two files may have the same name
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None:
        raise CdgrabError(f"{VARIABLE} names {path}, which is not a file with Python code")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise CdgrabError(f"{path} of {VARIABLE} cannot be loaded ({reason})") from error
