"""What a study is, how it is carried out and where its results lie.

A study is a module of this package with

    parts(settings) -> list[Part]                    independent pieces of work, each a pure function of the settings
    verdicts(table, settings) -> list[Verdict]       what the results of all parts say

and configs/study/<name>.yaml. Its results go to results/studies/<name>/<size>[,changed settings]: metrics.jsonl (one
line per finished part) and manifest.json. Parts that are there are not computed again, so that an interrupted study
goes on where it stopped.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from ..checks import count
from ..config import compose_config
from ..errors import CdgrabError
from ..results import RESULTS
from ..runlog import append_line, environment, now, read_manifest, read_metrics, write_atomically
from .verdicts import Verdict

NOT_SETTINGS = ("title", "question", "sizes")  # of a yaml: words, and how other sizes differ


@dataclass(frozen=True)
class Part:
    """`key` names it, with the same names for all parts; `compute` gives further columns, lists of equal length."""

    key: dict
    compute: Callable[[], dict[str, list]]


@dataclass(frozen=True)
class Study:
    """A study with its settings, and the folder of its results."""

    settings: DictConfig
    size: str
    directory: Path

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def metrics_path(self) -> Path:
        return self.directory / "metrics.jsonl"

    def parts(self) -> list[Part]:
        return self._module.parts(self.settings)

    def verdicts(self) -> list[Verdict]:
        return self._module.verdicts(self.table, self.settings)

    @cached_property
    def table(self) -> pd.DataFrame:
        """The results of all finished parts, one below the other; the names and values of their keys are columns."""
        return pd.concat(map(pd.DataFrame, read_metrics(self.metrics_path)), ignore_index=True)

    def figure_name(self, which: str = "") -> str:
        """study_rates_noise at the paper's size, else study_rates_noise-quick and the like."""
        return "_".join(filter(None, ("study", self.name, which))) + f"-{self.directory.name}".removeprefix("-paper")

    def caption(self) -> str:
        """Size, seeds, computing time and commit in one line."""
        seconds = sum(line["seconds"] for line in read_metrics(self.metrics_path))
        commit = read_manifest(self.directory)["commit"] or "unknown"
        return f"size {self.directory.name} · {self.settings.seeds} seeds · {seconds:.0f} s · commit {commit}"

    @property
    def _module(self):
        return importlib.import_module(f"{__package__}.{self.name}")


def compose_study(overrides: list[str]) -> Study:
    """The study that these Hydra overrides describe: the size's own settings first, explicit ones win."""
    chosen = [override for override in overrides if override.partition("=")[0] in ("study", "size")]
    config = compose_config(chosen, "study")
    size, sizes = config.size, config.study.sizes
    if size not in sizes:
        raise CdgrabError(f"size must be {', '.join(list(sizes)[:-1])} or {list(sizes)[-1]}, got {size!r}")
    presets = [f"study.{key}={value}" for key, value in sizes[size].items()]
    plain = _settings(OmegaConf.merge(config.study, sizes[size]))
    settings = _settings(compose_config([*presets, *overrides], "study").study)
    count("study.seeds", settings.seeds, 1)
    changed = "".join(f",{key}={value}" for key, value in settings.items() if value != plain[key])
    folder = f"{size}{changed}".replace(" ", "").replace("/", "-")
    return Study(settings, size, RESULTS / "studies" / settings.name / folder)


def carry_out(study: Study, progress: Callable[[list[Part]], Iterable[Part]] = iter) -> None:
    """Compute the parts that are missing; each leaves one line of metrics as soon as it is done."""
    parts, settings, before = study.parts(), OmegaConf.to_container(study.settings), read_manifest(study.directory)
    stored = before.get("settings", {})  # settings that did not exist then don't count
    if differing := sorted(key for key in stored.keys() & settings.keys() if stored[key] != settings[key]):
        raise CdgrabError(
            f"{study.directory} holds results with other {', '.join(differing)}; delete the folder to make them again"
        )
    done = {_name(line, parts): line for line in read_metrics(study.metrics_path)}
    kept = [done[_name(part.key, parts)] for part in parts if _name(part.key, parts) in done]
    missing = [part for part in parts if _name(part.key, parts) not in done]
    if before.get("status") == "finished" and not missing:
        return
    manifest = {"status": "running", "study": study.name, "size": study.size, "settings": settings, **environment()}
    manifest |= {"started": before.get("started", now()), "resumed": bool(kept)}
    study.directory.mkdir(parents=True, exist_ok=True)
    _write_manifest(study, manifest)
    write_atomically(study.metrics_path, "".join(json.dumps(line) + "\n" for line in kept))
    for part in progress(missing):
        started = time.perf_counter()
        columns = part.compute()
        seconds = round(time.perf_counter() - started, 3)
        append_line(study.metrics_path, part.key | columns | {"seconds": seconds})
    _write_manifest(study, manifest | {"status": "finished", "ended": now()})


def significant(values: Iterable[float], digits: int = 8) -> list[float]:
    """Rounded for the file: small, and the same on machines whose sums differ in their last bits."""
    return [float(f"{float(value):.{digits}g}") for value in values]


def _settings(config: DictConfig) -> DictConfig:
    settings = OmegaConf.to_container(config, resolve=True)
    return OmegaConf.create({key: value for key, value in settings.items() if key not in NOT_SETTINGS})


def _name(line: dict, parts: list[Part]) -> str:
    return json.dumps([line.get(name) for name in parts[0].key])


def _write_manifest(study: Study, manifest: dict) -> None:
    write_atomically(study.directory / "manifest.json", json.dumps(manifest, indent=1) + "\n")
