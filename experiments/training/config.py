"""Composing and checking a run's configuration: every entry point, and every rank, goes through `compose`."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cdgrab.checks import differences, one_of
from cdgrab.errors import CdgrabError
from experiments.data.sources import Source
from experiments.store.files import RUNS
from experiments.tasks import locate_data, task_class
from experiments.tasks.settings import complaints, refuse
from experiments.training.composition import GROUPS, choices, compose_config, one_line, own_settings, task_defaults
from experiments.training.schema import DATA_SETTINGS, wrong_settings

# Settings that say where and how a run is carried out, not what it computes.
DEPLOYMENT = {
    "run_dir",
    "resume",
    "device",
    "nproc",
    "nnodes",
    "rdzv",
    "jobs",
    "replicas",
    "data_root",
    "data",
    "compile",
    "threads",
    "size",
    "checkpoint.every_epochs",
    "checkpoint.every_steps",
    "checkpoint.keep",
    "restarts",
    "timeout",
    "tracker",
    "sorter.buffer_mb",
    "sorter.background",
    "task.device",
    "task.state",  # the data source that it leads to counts instead
}

# Values from before these settings existed. They are left out, so that runs from then are still the same runs.
UNSAID = {
    "sparsifier.momentum_correction": 0.0,
    "sparsifier.momentum_masking": True,
    "sparsifier.name": "dense",
    "sparsifier.warm_up_density": 0.25,
    "sparsifier.warm_up_steps": 0,
    "task.initial_weights": "own",
    "task.model": "lenet",
    "task.normalisation": "cifar10",
    "task.test_chunks": None,
}

# Which runs make up an experiment, and how they are drawn: irrelevant to a single run.
PLANS = ("task.presets.", "seeds.", "sweeps.", "columns", "candidates")


@dataclass(frozen=True)
class Run:
    """A checked configuration, the data it uses and the folder it writes to."""

    config: DictConfig
    source: Source
    directory: Path

    @property
    def size(self) -> str:
        """The size; `paper` also if another size has the same settings."""
        return _effective_size(self.config, self.source)

    @property
    def settings(self) -> dict:
        """The configuration, without defaults that the task's own yaml does not mention."""
        tree = OmegaConf.to_container(self.config, resolve=True)
        own = own_settings("task", self.config.task.name)
        unsaid = [k for k, v in task_defaults().items() if k not in own and tree["task"].get(k) == v]
        return tree | {"task": {key: value for key, value in tree["task"].items() if key not in unsaid}}

    @cached_property  # every checkpoint has it
    def science(self) -> dict:
        """The flat settings that decide the result: runs that agree in them are the same run. Do not change it."""
        flat = flatten(self.settings)
        kept = {k: v for k, v in flat.items() if k not in DEPLOYMENT and not k.startswith(PLANS)}
        kept = {k: v for k, v in kept.items() if k not in UNSAID or UNSAID[k] != v}
        return kept | {"source": self.source.label}


def refuse_other_settings(run: Run, stored: dict, holder: Path) -> None:
    """Refuse to continue a run with other settings. Settings that did not exist when it was stored don't count."""
    if not isinstance(stored, dict):
        raise CdgrabError(f"{holder} holds something else than a run; choose another run_dir")
    unsaid = UNSAID | flatten({"task": task_defaults()})
    now, stored = unsaid | run.science, unsaid | stored
    common = (stored.keys() & now.keys()) - DEPLOYMENT  # some of them counted as science in earlier versions
    if details := differences({key: stored[key] for key in common}, {key: now[key] for key in common}):
        raise CdgrabError(f"{holder} holds a run with other settings ({details}); choose another run_dir")


def compose(overrides: list[str]) -> Run:
    """The run that these Hydra overrides describe, checked: one sentence reports everything that is wrong.

    The task's presets for this size, and for embedded data or files, are applied first; explicit overrides win.
    """
    config = compose_config(overrides)
    try:
        config.task = _in_own_order(config.task)
        wrong = list(complaints(config, DATA_SETTINGS).values())
        try:
            source = locate_data(config)
            presets = _presets(config, source)
            _apply(presets, config, overrides)
        except CdgrabError as error:
            wrong = wrong or [str(error)]
        refuse([*wrong, *wrong_settings(config)])
        task_class(config.task.name).refuse_missing(config.task, source)
        return Run(config, source, _run_directory(config, source, overrides, presets))
    except OmegaConfBaseException as error:  # interpolations that lead nowhere
        raise CdgrabError(one_line(error)) from error


def _in_own_order(task: DictConfig) -> dict:
    """The task's settings in the order of its own yaml, then the defaults: folder names follow this order."""
    tree = OmegaConf.to_container(task, resolve=False)
    own = own_settings("task", tree["name"]) if tree.get("name") in choices("task") else {}
    return {key: tree[key] for key in own if key in tree} | tree


def _sizes(config: DictConfig, source: Source) -> DictConfig:
    kind = "embedded" if source.embedded else "files"
    sizes = OmegaConf.select(config, f"task.presets.{kind}")
    if not isinstance(sizes, DictConfig) or not all(isinstance(settings, DictConfig) for settings in sizes.values()):
        raise CdgrabError(f"task.presets.{kind} must have settings for every size, got {sizes!r}")
    return sizes


def _effective_size(config: DictConfig, source: Source) -> str:
    sizes = _sizes(config, source)
    return "paper" if sizes[config.size] == sizes["paper"] else config.size


def _presets(config: DictConfig, source: Source) -> dict:
    """Settings by name."""
    sizes = _sizes(config, source)
    one_of("size", config.size, list(sizes))
    # unresolved: a preset may refer to another one, or to what is on the command line
    return OmegaConf.to_container(sizes[config.size], resolve=False)


def _apply(presets: dict, config: DictConfig, overrides: list[str]) -> None:
    """Apply presets to a composed configuration, except where an override says otherwise, and resolve it."""
    explicit = {override.partition("=")[0].lstrip("+") for override in overrides}
    for key, value in presets.items():
        if key not in explicit:
            OmegaConf.update(config, key, value)
    OmegaConf.resolve(config)


@cache
def _experiments_own(groups: tuple[str, ...]) -> DictConfig:
    """The settings of these config groups alone. The result is shared: do not change it."""
    return compose_config(list(groups))


def _run_directory(config: DictConfig, source: Source, overrides: list[str], presets: dict) -> Path:
    """run_dir, or results/runs/<task>/<experiment>/<data source>[,changed settings]/<sorter>[,changed]-s<seed>.

    Whatever differs from the experiment's own settings is in the name, so that different runs never share a folder.
    """
    if config.run_dir:
        return Path(config.run_dir)
    groups = [o for o in overrides if o.partition("=")[0] in GROUPS]
    plain = copy.deepcopy(_experiments_own(tuple(groups)))
    plain.size = config.size  # settings that follow from it do not count as changed
    _apply(presets, plain, [])
    OmegaConf.resolve(plain)
    before, after = (flatten(OmegaConf.to_container(c)) for c in (plain, config))
    ignored = DEPLOYMENT | {"seed"}
    changed = {k: v for k, v in after.items() if before.get(k) != v and k not in ignored and not k.startswith(PLANS)}
    changed = {k: str(v).rpartition("/")[2] for k, v in changed.items()}  # only the last part of a path
    sorter = "".join(f",{k.removeprefix('sorter.')}={v}" for k, v in changed.items() if k.startswith("sorter."))
    sparsifier = "" if config.sparsifier.name == "dense" else f",sparsifier={config.sparsifier.name}"
    others = sparsifier + "".join(
        f",{k.removeprefix('task.')}={v}" for k, v in changed.items() if not k.startswith("sorter.")
    )
    folder = RUNS / config.task.name / config.name
    folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder  # shorter in messages
    size = _effective_size(config, source)
    return (
        folder
        / f"{source.label}{'' if size == 'paper' else '-' + size}{others}"
        / f"{config.sorter.name}{sorter}-s{config.seed}"
    )


def flatten(tree: dict, prefix: str = "") -> dict:
    """Nested keys joined by dots."""
    flat = {}
    for key, value in tree.items():
        flat.update(
            flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
        )
    return flat
