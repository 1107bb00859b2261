"""Bad input, thousands of times: see `__main__`. Every kind of input is an endless stream of attempts."""

from __future__ import annotations

import os
import random
import sys
import traceback
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from cdgrab.errors import CdgrabError, file_error
from scripts.fuzz.files import files
from scripts.fuzz.gradients import gradients
from scripts.fuzz.runs import MADE, runs
from scripts.fuzz.settings import settings

KINDS = {"settings": settings, "files": files, "runs": runs, "gradients": gradients}


def fuzz(kind: str, inputs: int, generator: random.Random, scratch: Path) -> Counter:
    """Counts of inputs that were taken and refused, and of each finding."""
    found: Counter = Counter()
    attempts = KINDS[kind](generator, scratch)
    for _ in tqdm(range(inputs), desc=kind, unit="input", disable=not sys.stderr.isatty()):
        attempt = next(attempts)
        try:
            attempt()
            found["taken"] += 1
        except (CdgrabError, OSError) as error:  # commands make one sentence of both
            words = file_error(error) if isinstance(error, OSError) else str(error)
            found["refused" if words and "\n" not in words else f"not one sentence: {words}"] += 1
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            found[f"{type(error).__name__} at {where.filename}:{where.lineno}: {str(error)[:200]}"] += 1
    if os.path.exists(MADE):
        os.rmdir(MADE)
        found["a checkpoint was executed"] += 1
    return found
