"""What a run leaves behind: metrics.jsonl (one line per epoch) and manifest.json (what was run, on what, how fast)."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch
from omegaconf import OmegaConf

from .config import ROOT, Run
from .durable import replacing
from .errors import CdgrabError
from .sorters import LABELS

NONE_YET = {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}  # metrics of a run that begins
PACKAGES = ("torch", "numpy", "torchopt", "hydra-core", "omegaconf", "pandas", "numba")


class RunLog:
    """Writes one run's folder. Only rank 0 holds an active log; the others' methods do nothing."""

    def __init__(self, run: Run, active: bool) -> None:
        self.directory, self.active = run.directory, active
        self.metrics_path = run.directory / "metrics.jsonl"
        self.manifest_path = run.directory / "manifest.json"
        self._phases: list[dict] = []  # seconds of every epoch, by phase
        self._manifest: dict = {}

    def begin(
        self,
        run: Run,
        rows: dict[str, int],
        sizes: dict[str, int],
        world_size: int,
        device: torch.device,
        metrics: dict | None = None,
    ) -> None:
        """Start, or go on from a checkpoint, when metrics were as `measured`: lines written later are dropped."""
        if not self.active:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        kept = _first_bytes(self.metrics_path, NONE_YET if metrics is None else metrics)
        before = {} if metrics is None else read_manifest(self.directory)
        with replacing(self.metrics_path) as file:
            file.write(kept)
        self._phases = [line["phases"] for line in read_metrics(self.metrics_path)]
        self._manifest = {
            "status": "running",
            "name": run.config.name,
            "task": run.config.task.name,
            "sorter": run.config.sorter.name,
            "sorter_label": LABELS[run.config.sorter.name],
            "sparsifier": run.config.sparsifier.name,
            "seed": run.config.seed,
            "size": run.size,
            "config": OmegaConf.to_container(run.config, resolve=True),
            "science": run.science,  # what decides the result, flat: same here, same run
            "data": run.source.as_record() | {"rows": rows},
            "sizes": sizes,
            "processes": world_size,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            **environment(),
            "started": before.get("started", now()),
            "resumed": [] if metrics is None else [*before.get("resumed", []), now()],
        }
        self._write_manifest()

    def record(self, metrics: dict) -> None:
        """One finished epoch."""
        if not self.active:
            return
        append_line(self.metrics_path, metrics)
        self._phases.append(metrics["phases"])

    def finish(self, status: str, reason: str | None = None) -> None:
        """status: finished, interrupted or diverged."""
        if self.active and self._manifest:
            self._manifest |= {"status": status, "ended": now()}
            if reason:
                self._manifest["reason"] = reason
            self._write_manifest()

    def _write_manifest(self) -> None:
        epochs = max(len(self._phases), 1)
        names = self._phases[0] if self._phases else {}
        mean = {name: round(sum(phases[name] for phases in self._phases) / epochs, 6) for name in names}
        training = sum(seconds for phase, seconds in mean.items() if phase != "evaluation")
        timing = {"seconds_per_epoch": round(training, 6), "phases": mean}
        content = self._manifest | {"updated": now(), "timing": timing}
        write_atomically(self.manifest_path, json.dumps(content, indent=1) + "\n")


def measured(directory: Path) -> dict:
    """How long a run's metrics are, and their checksum."""
    path = directory / "metrics.jsonl"
    content = path.read_bytes() if path.exists() else b""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _first_bytes(path: Path, wanted: dict) -> bytes:
    """What the file held when it was `measured`; refused when it was changed since."""
    content = path.read_bytes()[: wanted["bytes"]] if path.exists() else b""
    if hashlib.sha256(content).hexdigest() != wanted["sha256"]:
        raise CdgrabError(f"{path} is not what it was at the checkpoint; move the folder away to start this run again")
    return content


def environment() -> dict:
    """What a result was made with: host, versions, commit."""
    return {
        "host": {"cpu": cpu_name(), "cores": os.cpu_count(), "platform": platform.platform(terse=True)},
        "versions": {"python": platform.python_version()} | _versions(),
        "commit": git_commit(),
    }


def read_manifest(directory: Path) -> dict:
    """The manifest of a run folder; empty when there is none yet."""
    path = directory / "manifest.json"
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it is no manifest")
        return content
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise CdgrabError(f"{path} cannot be read ({error}); move its folder away to start this run again") from error


def read_metrics(path: Path) -> list[dict]:
    """All complete lines; a torn last line (the run was killed while writing) is left out."""
    return list(itertools.takewhile(lambda line: line is not None, _lines(path)))


def read_all_metrics(path: Path) -> list[dict]:
    """Like `read_metrics`; but a damaged line with others after it is refused: they would be lost."""
    lines = _lines(path)
    if None in lines[:-1]:
        raise CdgrabError(
            f"line {lines.index(None) + 1} of {path} is damaged; remove it, and what it held is made again"
        )
    return read_metrics(path)


def _lines(path: Path) -> list[dict | None]:
    """None where a line is damaged."""
    return [_parsed(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def _parsed(line: bytes) -> dict | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def append_line(path: Path, content: dict) -> None:
    """On the disk before this returns. A disk that is full gets none of it rather than a part."""
    line = (json.dumps(content) + "\n").encode()
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    size = os.fstat(handle).st_size
    try:
        if os.write(handle, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(handle)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, size)
        raise OSError(error.errno, error.strerror, str(path)) from error  # writing alone names no file
    finally:
        os.close(handle)


def write_atomically(path: Path, text: str) -> None:
    """Either the old file or the whole new one is there, whenever the machine stops."""
    with replacing(path) as file:
        file.write(text.encode())


def git_commit() -> str | None:
    """Short commit of the code, with + when tracked code differs from it; None outside a git checkout.

    CDGRAB_COMMIT says it for a copy of the code that has no repository, or not its own.
    """
    if stated := os.environ.get("CDGRAB_COMMIT"):
        return stated

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git(
            "status", "--porcelain", "--untracked-files=no", "--", ".", ":!results", ":!notebooks", ":!README.md"
        )
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _versions() -> dict[str, str]:
    """Of the packages that are installed."""
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


def now() -> str:
    """The time, as manifests have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
