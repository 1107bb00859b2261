"""Sign rules, reordering and their fast kernels: pure mathematics."""

from __future__ import annotations

import builtins
import importlib
from types import ModuleType

PRINT = builtins.print  # Python's own: scripts replace it to print on one process only, and numba fails to load then


def optional(name: str) -> ModuleType | None:
    """A module of `kernels`, or None if what it needs is not installed."""
    replaced, builtins.print = builtins.print, PRINT
    try:
        return importlib.import_module(f"{__name__}.kernels.{name}")
    except ImportError:
        return None
    finally:
        builtins.print = replaced
