"""Reading results/bench: rows of measurements, and what they were measured on."""

from __future__ import annotations

import json
import os
from pathlib import Path

from cdgrab.errors import CdgrabError
from experiments.store.files import ROOT


def folder() -> Path:
    """results/bench, or what CDGRAB_BENCH names."""
    return Path(os.environ.get("CDGRAB_BENCH") or ROOT / "results" / "bench")


def read_rows(name: str, missing_ok: bool = False) -> list[dict]:
    path = folder() / f"{name}.json"
    if path.exists():
        return json.loads(path.read_text())
    if missing_ok:
        return []
    raise CdgrabError(f"no finished runs of the benchmark {name} under {folder()}; `make bench` makes them")


def read_meta(name: str) -> dict[str, dict]:
    """By device."""
    path = folder() / f"{name}.meta.json"
    return json.loads(path.read_text()) if path.exists() else {}
