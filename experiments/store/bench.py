"""results/bench: the rows of every benchmark in <name>.json, and one manifest per device in <name>.meta.json.

Rows that are measured at a smaller size than the full one go to results/trial/bench.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from cdgrab.errors import CdgrabError, first_line
from experiments.store.files import home, write_atomically
from experiments.store.records import write_manifest

SIZES = ("smoke", "quick", "full")


def folder(size: str = SIZES[-1]) -> Path:
    """Of the rows of a size: results/bench, results/trial/bench, or the folder named by CDGRAB_BENCH."""
    return Path(os.environ.get("CDGRAB_BENCH") or home(trial=size != SIZES[-1]) / "bench")


def read_rows(name: str) -> list[dict]:
    """None if it was not measured."""
    return _read(folder() / f"{name}.json", [])


def read_manifests(name: str) -> dict[str, dict]:
    """By device: on which machine, when and with which code its rows were measured."""
    return _read(folder() / f"{name}.meta.json", {})


def cores(manifest: dict) -> int:
    return manifest.get("host", manifest)["cores"]  # the first version of manifests had no `host`


def refuse_smaller(name: str, device: str, size: str) -> None:
    """Rows that are kept are replaced by rows of the same size or a larger one only; those of trials by any."""
    path = folder(size) / f"{name}.meta.json"
    kept = _read(path, {}).get(device, {}).get("size", size)
    if path.parent != home(trial=True) / "bench" and SIZES.index(size) < SIZES.index(kept):
        raise CdgrabError(f"{path.parent} holds {name} on {device} at size {kept}, which size {size} does not replace")


def write(name: str, device: str, rows: list[dict], manifest: dict) -> Path:
    """Replace this device's rows and manifest; those of other devices stay."""
    refuse_smaller(name, device, manifest["size"])
    path = folder(manifest["size"]) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [row for row in _read(path, []) if row["device"] != device]
    lines = ",\n".join(json.dumps(row) for row in [*kept, *rows])
    write_atomically(path, f"[\n{lines}\n]\n")
    made = path.with_suffix(".meta.json")
    write_manifest(made, _read(made, {}) | {device: manifest})
    return path


def _read(path: Path, missing: list | dict) -> list | dict:
    try:
        return json.loads(path.read_text()) if path.exists() else missing
    except ValueError as error:
        raise CdgrabError(f"{path} cannot be read ({first_line(error)}); `git checkout` brings it back") from error
