"""Warnings that name the line of the script."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

LIBRARIES = tuple(f"{Path(path).parent}/" for path in (torch.__file__, Path(__file__).parent))


def warn(sentence: str) -> None:
    """The line is the script's own, not that of a loader or of autograd that led here. (Python 3.12 does this with
    `skip_file_prefixes`.) A backward pass on a GPU runs in a thread of its own, in which the script is not seen."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(sentence, stacklevel=level)
