"""What `make soak` and `make fuzz` have found so far: results/reliability.json, added up over all calls."""

from __future__ import annotations

import ctypes
import json
import resource
import signal
from collections import Counter
from pathlib import Path

from experiments.store.files import home, write_atomically
from experiments.store.lock import locked
from experiments.store.records import git_commit, now

FILE = "reliability.json"
DIE_WITH_PARENT = 1  # of prctl


class Record:
    """One call: its seed, its commit, and counts that grow. With code that is not committed it is a trial."""

    def __init__(self, kind: str, seed: int) -> None:
        commit = git_commit()
        self._path: Path = home(trial=not commit or commit.endswith("+")) / FILE
        self._kind, self._entry = kind, {"seed": seed, "commit": commit, "started": now()}

    def write(self, **counts: object) -> None:
        """Put these in the place of what the call has counted before."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self._path.parent, patience=60.0):  # another call may be counting too
            everything = json.loads(self._path.read_text()) if self._path.exists() else {}
            mine = [entry | self._entry == entry for entry in everything.setdefault(self._kind, [])]
            place = mine.index(True) if any(mine) else len(mine)
            everything[self._kind][place : place + 1] = [self._entry | counts]
            write_atomically(self._path, json.dumps(everything, indent=1) + "\n")

    def total(self, name: str) -> Counter:
        """A count, or counts by kind, of all calls together."""
        entries = json.loads(self._path.read_text())[self._kind]
        each = [entry[name] if isinstance(entry[name], dict) else {name: entry[name]} for entry in entries]
        return sum(map(Counter, each), Counter())


def die_with_parent() -> None:
    """Called by a process that has no work left then."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


def cpu_seconds() -> float:
    """Of this process and all of its own that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)
