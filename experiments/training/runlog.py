"""What a run leaves behind: metrics.jsonl (one line per epoch) and manifest.json (what was run, on what, how fast)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from cdgrab import sorters
from cdgrab.errors import CdgrabError
from experiments.store import records
from experiments.store.files import replacing
from experiments.store.records import metrics_in, now, read_manifest
from experiments.training.clock import PHASES
from experiments.training.config import Run, flatten
from experiments.training.trackers import Tracking

NONE_YET = {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}  # metrics of a run that begins


class RunLog:
    """Writes one run's folder. Only rank 0 holds an active log; the others' methods do nothing."""

    def __init__(self, run: Run, active: bool) -> None:
        self.directory, self.active = run.directory, active
        self.metrics_path = run.directory / records.METRICS
        self.manifest_path = run.directory / records.MANIFEST
        self._phases: list[dict] = []  # seconds of every epoch, by phase
        self._manifest: dict = {}
        self._tracking: Tracking | None = None

    def begin(
        self,
        run: Run,
        rows: dict[str, int],
        sizes: dict[str, int],
        world_size: int,
        device: torch.device,
        then: tuple[dict, int] | None = None,
        replicas: int = 1,
    ) -> None:
        """Start, or continue from a checkpoint. then: its metrics (see `measured`) and number of epochs; lines written
        later are dropped. replicas: how many runs train together."""
        if not self.active:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        kept = _first_bytes(self.metrics_path, *(then or (NONE_YET, 0)))
        latest = read_manifest(self.directory)
        before = latest if then else {}
        lines = metrics_in(kept)
        self._phases = [line["phases"] for line in lines]
        with replacing(self.metrics_path) as file:
            file.write(kept)
        what = {
            "name": run.config.name,
            "task": run.config.task.name,
            "sorter": run.config.sorter.name,
            "sorter_label": sorters.label(run.config.sorter.name),
            "sparsifier": run.config.sparsifier.name,
            "seed": run.config.seed,
            "size": run.size,
            "config": run.settings,
            "science": run.science,  # what decides the result, flat: if this agrees, it is the same run
            "data": run.source.as_record() | {"rows": rows},
            "sizes": sizes,
            "processes": world_size,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        }
        resumed = [*before.get("resumed", []), now()] if then else []
        self._manifest = records.begin(what, before) | {"resumed": resumed}
        if (together := max(replicas, before.get("replicas", 1))) > 1:  # its times are not its own
            self._manifest["replicas"] = together
        self._tracking = Tracking(
            run.config.tracker, run.directory, run.science, latest.get("trackers", {}), list(map(flatten, lines))
        )
        if self._tracking.names:
            self._manifest["trackers"] = self._tracking.names
        self._write_manifest()

    def record(self, metrics: dict) -> None:
        """One finished epoch."""
        if not self.active:
            return
        records.append(self.directory, metrics)
        self._phases.append(metrics["phases"])
        self._tracking.record(flatten(metrics))

    def finish(self, status: str, reason: str | None = None) -> None:
        """status: finished, interrupted, stopped or diverged."""
        if self.active and self._manifest:
            self._manifest = records.finish(self._manifest, status, **({"reason": reason} if reason else {}))
            self._write_manifest()
            self._tracking.finish(status)

    def _write_manifest(self) -> None:
        epochs = max(len(self._phases), 1)
        names = self._phases[0] if self._phases else {}
        mean = {name: round(sum(phases[name] for phases in self._phases) / epochs, 6) for name in names}
        training = sum(seconds for phase, seconds in mean.items() if phase != "evaluation")
        timing = {"seconds_per_epoch": round(training, 6), "phases": mean}
        records.write_manifest(self.manifest_path, self._manifest | {"updated": now(), "timing": timing})


def measured(directory: Path) -> dict:
    """The length of a run's metrics, and their checksum."""
    path = directory / records.METRICS
    content = path.read_bytes() if path.exists() else b""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _first_bytes(path: Path, wanted: dict, epochs: int) -> bytes:
    """What the file held when it was `measured`, after so many epochs. A file that has changed since is refused."""
    content = path.read_bytes()[: wanted["bytes"]] if path.exists() else b""
    lines = metrics_in(content)
    whole = [line.get("epoch") for line in lines] == list(range(1, epochs + 1)) and all(map(_has_phases, lines))
    whole = whole and content.count(b"\n") == epochs and content[-1:] in (b"", b"\n")
    if hashlib.sha256(content).hexdigest() != wanted["sha256"] or not whole:
        raise CdgrabError(f"{path} is not what it was at the checkpoint; move the folder away to start this run again")
    return content


def _has_phases(line: dict) -> bool:
    phases = line.get("phases")
    return isinstance(phases, dict) and phases.keys() == set(PHASES) and all(type(s) is float for s in phases.values())
