"""Progress bars."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from tqdm import tqdm


def progress(iterable: Iterable | None = None, **options: object) -> tqdm:
    """A bar on a terminal; nothing elsewhere."""
    return tqdm(iterable, disable=not sys.stderr.isatty(), **options)
