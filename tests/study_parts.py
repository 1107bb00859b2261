"""What parts of studies compute in processes of their own. Those import this file: it loads next to nothing."""

import os
import time
from functools import partial
from pathlib import Path

from experiments.studies.parts import Part, computed


def slow(seconds):
    time.sleep(seconds)
    return {"x": [seconds]}


def known(sorter):
    from cdgrab.sorters import SORTERS

    return {"x": [sorter in SORTERS]}


def announced(folder):
    """Carry out one part in a process of its own, which announces itself and then waits."""
    list(computed([Part({"part": 1}, partial(announce, folder))], jobs=2))


def announce(folder):
    Path(folder, str(os.getpid())).touch()
    time.sleep(300)
