"""Sign rules, reordering and their fast kernels: pure mathematics."""

from __future__ import annotations

import importlib
from types import ModuleType


def optional(name: str) -> ModuleType | None:
    """A module of `kernels`, or None if what it needs is not installed."""
    try:
        return importlib.import_module(f"{__name__}.kernels.{name}")
    except ImportError:
        return None
