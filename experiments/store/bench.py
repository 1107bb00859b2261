"""results/bench: the rows of every benchmark in <name>.json, and one manifest per device in <name>.meta.json."""

from __future__ import annotations

import json
import os
from pathlib import Path

from cdgrab.errors import CdgrabError
from experiments.store.files import RESULTS, write_atomically
from experiments.store.records import write_manifest


def folder() -> Path:
    """results/bench, or the folder named by CDGRAB_BENCH."""
    return Path(os.environ.get("CDGRAB_BENCH") or RESULTS / "bench")


def read_rows(name: str, missing_ok: bool = False) -> list[dict]:
    path = folder() / f"{name}.json"
    if path.exists():
        return json.loads(path.read_text())
    if missing_ok:
        return []
    raise CdgrabError(f"no finished runs of the benchmark {name} under {folder()}; `make bench` makes them")


def read_manifests(name: str) -> dict[str, dict]:
    """By device: on which machine, when and with which code its rows were measured."""
    path = folder() / f"{name}.meta.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write(name: str, device: str, rows: list[dict], manifest: dict) -> Path:
    """Replace this device's rows and manifest; those of other devices stay."""
    folder().mkdir(parents=True, exist_ok=True)
    kept = [row for row in read_rows(name, missing_ok=True) if row["device"] != device]
    lines = ",\n".join(json.dumps(row) for row in [*kept, *rows])
    path = folder() / f"{name}.json"
    write_atomically(path, f"[\n{lines}\n]\n")
    write_manifest(path.with_suffix(".meta.json"), read_manifests(name) | {device: manifest})
    return path
