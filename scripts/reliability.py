"""What `make soak` and `make fuzz` have found so far: results/reliability.json, added up over all calls."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from experiments.store.files import home, write_atomically
from experiments.store.records import git_commit, now

FILE = "reliability.json"


class Record:
    """One call: its seed, its commit, and counts that grow. With code that is not committed it is a trial."""

    def __init__(self, kind: str, seed: int) -> None:
        commit = git_commit()
        self._path: Path = home(trial=not commit or commit.endswith("+")) / FILE
        self._kind, self._entry = kind, {"seed": seed, "commit": commit, "started": now()}

    def write(self, **counts: object) -> None:
        """Put these in the place of what the call has counted before."""
        everything = json.loads(self._path.read_text()) if self._path.exists() else {}
        others = [entry for entry in everything.get(self._kind, []) if entry["started"] != self._entry["started"]]
        everything[self._kind] = [*others, self._entry | counts]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, json.dumps(everything, indent=1) + "\n")

    def total(self, name: str) -> Counter:
        """A count, or counts by kind, of all calls together."""
        entries = json.loads(self._path.read_text())[self._kind]
        each = [entry[name] if isinstance(entry[name], dict) else {name: entry[name]} for entry in entries]
        return sum(map(Counter, each), Counter())
