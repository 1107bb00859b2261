"""What is kept of runs, studies and benchmarks: a manifest, and lines of metrics.

All manifests have the same form: `begin` records what is being made, on which machine, with which versions and commit,
and since when; `finish` records how it ended. A run or study has its own folder with manifest.json and metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path

from cdgrab.errors import CdgrabError
from experiments.store.files import ROOT, append_line, write_atomically

DRIVER = Path("/proc/driver/nvidia")
MANIFEST, METRICS = "manifest.json", "metrics.jsonl"
PACKAGES = ("torch", "numpy", "torchopt", "hydra-core", "omegaconf", "pandas", "numba")


# -- manifests ---------------------------------------------------------------------------------------------------------


def begin(what: dict, before: dict | None = None) -> dict:
    """The manifest of `what`, which begins now, or continues the one described by `before`."""
    return {"status": "running", **what, **environment(), "started": (before or {}).get("started", now())}


def finish(manifest: dict, status: str = "finished", **more: object) -> dict:
    return manifest | {"status": status, "ended": now()} | more


def write_manifest(path: Path, manifest: dict) -> None:
    write_atomically(path, json.dumps(manifest, indent=1) + "\n")


def read_manifest(directory: Path) -> dict:
    """The manifest of a folder; empty if there is none yet."""
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it is no manifest")
        return content
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise CdgrabError(f"{path} cannot be read ({error}); move its folder away to start this run again") from error


def now() -> str:
    """The time, in the format of manifests."""
    return datetime.now(UTC).isoformat(timespec="seconds")


# -- metrics -----------------------------------------------------------------------------------------------------------


def append(directory: Path, line: dict) -> None:
    """The line is on the disk before this returns."""
    append_line(directory / METRICS, line)


def rewrite(directory: Path, lines: Iterable[dict]) -> None:
    """All lines at once."""
    write_atomically(directory / METRICS, "".join(json.dumps(line) + "\n" for line in lines))


def read_metrics(path: Path) -> list[dict]:
    """All complete lines; an incomplete last line (the run was killed while writing) is left out."""
    return metrics_in(path.read_bytes()) if path.exists() else []


def metrics_in(content: bytes) -> list[dict]:
    return list(itertools.takewhile(lambda line: line is not None, map(_parsed, content.splitlines())))


def read_all_metrics(path: Path) -> list[dict]:
    """Like `read_metrics`, but refuses a damaged line before others, which would be lost."""
    lines = list(map(_parsed, path.read_bytes().splitlines())) if path.exists() else []
    if None in lines[:-1]:
        raise CdgrabError(
            f"line {lines.index(None) + 1} of {path} is damaged; remove it, and what it held is made again"
        )
    return read_metrics(path)


def _parsed(line: bytes) -> dict | None:
    """None if it is damaged."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


# -- what it was made with ---------------------------------------------------------------------------------------------


def environment() -> dict:
    """Host, versions, commit."""
    host = {"cpu": cpu_name(), "cores": os.cpu_count(), "platform": platform.platform(terse=True)}
    return {
        "host": host | ({"gpus": found} if (found := _gpus()) else {}),
        "versions": {"python": platform.python_version()} | _versions(),
        "commit": git_commit(),
    }


def _gpus() -> list[str]:
    """The names of NVIDIA's, from its driver: to ask torch would start CUDA in processes that never need it."""
    with contextlib.suppress(OSError):
        found = sorted(DRIVER.glob("gpus/*/information"))
        return [line.partition(":")[2].strip() for path in found for line in path.read_text().splitlines()[:1]]
    return []


def git_commit() -> str | None:
    """The short commit of the code, with + if tracked code differs from it; None outside a git checkout.

    CDGRAB_COMMIT sets it for a copy of the code outside its own repository.
    """
    if stated := os.environ.get("CDGRAB_COMMIT"):
        return stated

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        texts = (":!results", ":!notebooks", ":!docs", ":!README.md")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *texts)
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


@cache  # packages' descriptions are long
def _versions() -> dict[str, str]:
    """The versions of the packages that are installed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def significant(values: Iterable[float], digits: int = 8) -> list[float]:
    """Rounded for the file: small, and the same on machines whose sums differ in their last bits."""
    return [float(f"{float(value):.{digits}g}") for value in values]
