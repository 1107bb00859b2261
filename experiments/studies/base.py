"""What a study is, how it is carried out and where its results lie.

A study is a module of this package with

    parts(settings) -> Iterable[Part]                independent pieces of work, each a pure function of the settings
    verdicts(table, settings) -> Iterable[Verdict]   what the results of all parts say

its figures and tables, configs/study/<name>.yaml and notebooks/study_<name>.ipynb. Its results go to
results/studies/<name>/<size>[-data][,changed settings]: metrics.jsonl (one line per finished part) and manifest.json;
those of small sizes and embedded data to results/trial/studies.
Parts that are there are not computed again, so an interrupted study goes on where it stopped. A study that trains has
`tasks` in its settings; the data they use is found when it is composed and becomes the setting `sources`. One with
`cells` may be finished without some of them (study.only=[<name>,…], or study.cells.<name>=null); what is there of these
is kept until they are wanted.

pandas and matplotlib are imported when results are read, not while parts are computed.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, repeat
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from cdgrab.checks import look_up, one_of
from cdgrab.errors import CdgrabError
from experiments.report.kinds import DataFrame
from experiments.report.statistics import looking
from experiments.report.text import plural
from experiments.store import records
from experiments.store.files import home
from experiments.store.lock import locked
from experiments.studies.changes import differs, grown, known_cells
from experiments.studies.parts import Part, computed
from experiments.studies.verdicts import UNDECIDED, Verdict, beside_all_seeds, beyond_chance, looks_at, looks_of
from experiments.tasks import locate_data
from experiments.training.composition import compose_config
from experiments.training.config import flatten

Progress = Callable[[Iterable[tuple[Part, dict]], int], Iterable[tuple[Part, dict]]]  # shows how many of how many
NOT_SETTINGS = ("title", "question", "sizes", "only")  # of a yaml: words, how sizes differ, cells to carry out now


@dataclass(frozen=True)
class Study:
    """A study with its settings, and the folder of its results."""

    settings: DictConfig
    size: str
    directory: Path
    data: dict[str, dict] = field(default_factory=dict)  # by task: where its data comes from

    @property
    def embedded(self) -> bool:
        """Whether it trains on anything but real files."""
        return any(source["embedded"] for source in self.data.values())

    @property
    def trial(self) -> bool:
        """Whether its results are no evidence."""
        return self.size != "paper" or self.embedded

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def looks(self) -> list[int]:
        """After how many seeds the claims are judged. More are added only while a claim is undecided."""
        return looks_of(self.settings.seeds)

    @property
    def seeds(self) -> int:
        """How many it has taken, or may take if it is not finished."""
        return self.manifest().get("seeds", self.looks[-1])

    def at(self, seeds: int) -> Study:
        """The same study with this many seeds."""
        return replace(self, settings=OmegaConf.merge(self.settings, {"seeds": seeds}))

    @property
    def metrics_path(self) -> Path:
        return self.directory / records.METRICS

    def manifest(self) -> dict:
        """Empty when there is none yet."""
        return records.read_manifest(self.directory)

    def lines(self) -> list[dict]:
        """One per finished part."""
        return records.read_all_metrics(self.metrics_path)

    def parts(self) -> list[Part]:
        """With as many seeds as it may take."""
        return list(self._module.parts(self.at(self.looks[-1]).settings))

    def complete(self) -> bool:
        """Whether all parts are there: a study may have got more of them since it was finished."""
        parts = self.at(self.seeds).parts()
        done = {_name(line, parts) for line in self.lines()}
        return all(_name(part.key, parts) in done for part in parts)

    def verdicts(self, seeds: int | None = None) -> list[Verdict]:
        """With this many seeds, or all it has taken. A claim is judged at every look; its first decision stands."""
        decided: dict[str, Verdict] = {}
        with looking(len(self.looks)):
            for look in (look for look in self.looks if look <= (seeds or self.seeds)):
                then = self.at(look)
                new = beyond_chance(self._module.verdicts(then.table, then.settings))
                latest = {v.claim: replace(v, seeds=look) if v.over_seeds else v for v in new}
                decided = {claim: v for claim, v in latest.items() if v.answer != UNDECIDED} | decided
        return [beside_all_seeds(decided.get(claim, v), v) for claim, v in latest.items()]

    @cached_property
    def table(self) -> DataFrame:
        """The results of all finished parts, one below the other; the names and values of their keys are columns."""
        import pandas as pd

        parts = self.parts()
        names = {_name(part.key, parts) for part in parts}
        lines = [line for line in self.lines() if _name(line, parts) in names]
        return pd.DataFrame([row for line in lines for row in _rows(line)])

    def figure_name(self, which: str = "") -> str:
        """study_rates_noise at the paper's size, else study_rates_noise-quick and the like."""
        return "_".join(filter(None, ("study", self.name, which))) + f"-{self.directory.name}".removeprefix("-paper")

    def caption(self, seeds: int | None = None) -> str:
        """Data and how much of it is trained on, size, seeds, computing time and commits in one line. seeds: of a part
        that has its own number of them, and its own extents."""
        used = ((task, source) for task, source in self.data.items() if task in self._used_tasks())
        data = "".join(f"{source['description']}{'' if seeds else self._extent(task)} · " for task, source in used)
        seconds, manifest = sum(line["seconds"] for line in self.lines()), self.manifest()
        commits = dict.fromkeys(made["commit"] or "unknown" for made in (*manifest.get("earlier", ()), manifest))
        return (
            f"{'EMBEDDED DATA: ' * self.embedded}{data}size {self.directory.name} · "
            f"{plural(seeds, 'seed') if seeds else self._seeds_in_words()} · {seconds:.0f} s · "
            f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}"
        )

    def _seeds_in_words(self) -> str:
        """Cells may have more than the others."""
        settings = self.at(self.seeds).settings
        own = {looks_at(settings, cell)[-1] for cell in settings.get("cells", {}).values()} or {self.seeds}
        return plural(min(own), "seed") if len(own) == 1 else f"{min(own)} to {max(own)} seeds"

    def _used_tasks(self) -> set[str]:
        """Those of the cells that were carried out; without cells all of them."""
        settings = self.settings
        if "cells" not in settings or "models" not in settings:
            return set(self.data)
        return {settings.models[own.get("model") or own.base].task for own in settings.cells.values()}

    def _extent(self, task: str) -> str:
        """(7,680 units, 30 epochs, 8 workers): as far as it is the same for all runs of the task."""
        settings = self.settings.tasks[task]
        known = {"units": settings.get("limit"), "epochs": settings.get("epochs"), "workers": settings.get("workers")}
        words = ", ".join(f"{value:,} {name}" for name, value in known.items() if value)
        return f" ({words})" if words else ""

    @property
    def _module(self):
        return importlib.import_module(f"{__package__}.{self.name}")


def compose_study(overrides: list[str]) -> Study:
    """The study that these Hydra overrides describe: the size's own settings first, explicit ones win."""
    chosen = [override for override in overrides if override.partition("=")[0] in ("study", "size")]
    config = compose_config(chosen, "study")
    size, sizes = config.size, config.study.sizes
    one_of("size", size, list(sizes))
    changes = flatten(OmegaConf.to_container(sizes[size]))
    presets = [f"study.{key}={'null' if value is None else value}" for key, value in changes.items()]
    plain = _settings(compose_config([*presets, *chosen], "study").study)
    config = compose_config([*presets, *overrides], "study")
    settings = _settings(config.study)
    looks_of(settings.seeds)
    before, after = (flatten(OmegaConf.to_container(some)) for some in (plain, settings))
    changed = "".join(f",{key}={value}" for key, value in after.items() if value != before.get(key))
    if only := config.study.get("only"):
        chosen = {name: look_up("cell", name, settings.cells) for name in only}
        settings.cells = {name: own for name, own in settings.cells.items() if name in chosen}
    data = {task: _source(task, config.data) for task in settings.get("tasks", ())}
    labels = dict.fromkeys(source["label"] for source in data.values())
    if data:
        settings.sources = {task: source["label"] for task, source in data.items()}
    folder = f"{'-'.join((size, '+'.join(labels))).rstrip('-')}{changed}".replace(" ", "").replace("/", "-")
    study = Study(settings, size, Path("studies", settings.name, folder), data)
    return replace(study, directory=home(study.trial) / study.directory)


def carry_out(study: Study, progress: Progress = lambda results, total: results, jobs: int = 1) -> None:
    """Compute the parts that are missing, `jobs` at a time; each leaves one line of metrics as soon as it is done."""
    _refuse_other_settings(study)
    before = study.manifest()
    finished = before.get("status") == "finished" and looks_of(before["settings"]["seeds"]) == study.looks
    if finished and not grown(before["settings"], study.settings) and study.complete():
        return
    study.directory.mkdir(parents=True, exist_ok=True)
    with locked(study.directory):
        _compute_missing(study, progress, jobs)


def _refuse_other_settings(study: Study) -> None:
    manifest, settings = study.manifest(), OmegaConf.to_container(study.settings)
    stored = manifest.get("settings", {})
    stored |= {"cells": known_cells(manifest)} if "cells" in stored else {}
    common = stored.keys() & settings.keys()  # settings that did not exist then don't count
    if differing := sorted(key for key in common if differs(key, stored, settings)):
        raise CdgrabError(
            f"{study.directory} holds results with other {', '.join(differing)}; delete the folder to make them again"
        )


def _compute_missing(study: Study, progress: Progress, jobs: int) -> None:
    """With more and more seeds, until every claim is decided or there are as many as the settings allow."""
    before = study.manifest()
    parts = [part for look in reversed(study.looks) for part in study.at(look).parts()]
    done = {_name(line, parts): line for line in study.lines()}
    what = {"study": study.name, "size": study.size, "settings": OmegaConf.to_container(study.settings)}
    manifest = records.begin(what | {"data": study.data}, before) | {"resumed": bool(done)}
    if left_out := {name: own for name, own in known_cells(before).items() if name not in study.settings.cells}:
        manifest["left_out"] = left_out
    if done:  # perhaps on another machine, by another version
        made_with = {key: before[key] for key in records.environment() if key in before}
        manifest["earlier"] = [*before.get("earlier", []), made_with]
    records.write_manifest(study.directory / records.MANIFEST, manifest)
    _write_in_order(study, done, parts)
    for look in study.looks:
        missing = [part for part in study.at(look).parts() if _name(part.key, parts) not in done]
        together, alone = ([part for part in missing if part.alone == wanted] for wanted in (False, True))
        for part, columns in progress(chain(computed(together, jobs), computed(alone, 1)), len(missing)):
            done[_name(part.key, parts)] = part.key | columns
            records.append(study.directory, part.key | columns)
        _write_in_order(study, done, parts)
        if look == study.looks[-1] or not any(verdict.needs_seeds for verdict in study.verdicts(look)):
            break
    records.write_manifest(study.directory / records.MANIFEST, records.finish(manifest, seeds=look))


def _source(task: str, data: str) -> dict:
    """Where a task's data comes from."""
    return locate_data(compose_config([f"task={task}", f"data={data}"])).as_record()


def _settings(config: DictConfig) -> DictConfig:
    settings = OmegaConf.to_container(config, resolve=True)
    for several in {"tasks", "cells"} & settings.keys():  # a size may leave one out: null
        settings[several] = {name: own for name, own in settings[several].items() if own is not None}
    return OmegaConf.create({key: value for key, value in settings.items() if key not in NOT_SETTINGS})


def _rows(line: dict) -> Iterator[dict]:
    """One for every value of its lists; what is no list is in all of them."""
    length = max(len(values) for values in line.values() if isinstance(values, list))
    columns = (values if isinstance(values, list) else repeat(values, length) for values in line.values())
    return (dict(zip(line, row, strict=True)) for row in zip(*columns, strict=True))


def _name(line: dict, parts: list[Part]) -> str:
    return json.dumps([line.get(name) for name in parts[0].key])


def _write_in_order(study: Study, lines: dict[str, dict], parts: list[Part]) -> None:
    """The lines of the study's parts, in their order: parts are finished in any. Those of cells left out follow."""
    names = dict.fromkeys(_name(part.key, parts) for part in parts)
    names |= dict.fromkeys(lines if "cells" in study.settings else ())
    records.rewrite(study.directory, (lines[name] for name in names if name in lines))
