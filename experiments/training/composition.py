"""Hydra's part of a configuration: the groups there are, classes registered from elsewhere, and composing the files."""

from __future__ import annotations

import inspect
import pickle
import re
import sys
from functools import cache, lru_cache
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from cdgrab.errors import CdgrabError
from cdgrab.sorters import SORTERS, sorter_options
from cdgrab.sparsify import SPARSIFIERS, sparsifier_options
from experiments.store.files import ROOT
from experiments.tasks import TASKS
from experiments.tasks.settings import refuse
from experiments.training.extensions import load_extensions

CONFIGS = ROOT / "configs"

GROUPS = ("task", "sorter", "sparsifier", "experiment", "study")
PLURALS = {"study": "studies"}
PLACED = ("sorter", "sparsifier")
REGISTRIES = {"task": TASKS, "sorter": SORTERS, "sparsifier": SPARSIFIERS}


def choices(group: str) -> list[str]:
    """Names in a config group: those with a yaml, and classes registered without one."""
    return sorted({path.stem for path in (CONFIGS / group).glob("*.yaml")} | REGISTRIES.get(group, {}).keys())


def compose_config(overrides: list[str], name: str = "config", hydras_own: bool = False) -> DictConfig:
    """configs/<name>.yaml with these Hydra overrides; `hydras_own`: with Hydra's own settings.

    Hydra reads and merges all files anew in every call, which takes longer than a short run. So it composes each choice
    of groups once; plain settings are put in here as it does. What is not plain, or wrong, is left to Hydra.
    """
    check_choices(overrides)
    groups = [override for override in overrides if override.partition("=")[0] in GROUPS]
    settings = [override for override in overrides if override not in groups]
    if not all(map(PLAIN.match, settings)):
        return _by_hydra(overrides, name, hydras_own)
    composed = _composed if hydras_own else _chosen
    config = _copied(composed(tuple(groups), name, _registered(groups)))
    try:
        for override in settings:
            OmegaConf.update(config, override.partition("=")[0], _value(override), merge=True)
    except (HydraException, OmegaConfBaseException):
        return _by_hydra(overrides, name, hydras_own)
    return config


def _copied(config: DictConfig) -> DictConfig:
    """What copy.deepcopy gives, in a third of the time."""
    return pickle.loads(pickle.dumps(config))


PLAIN = re.compile(r"[A-Za-z_][\w.]*=")  # nothing that is added, deleted or of Hydra's own


@cache
def _chosen(groups: tuple[str, ...], name: str, registered: tuple) -> DictConfig:
    """A sorter or sparsifier, of which sweeps try many, takes the place of the usual one: no other file changes it."""
    named = [override.partition("=")[::2] for override in groups]
    placed = {group: choice for group, choice in named if group in PLACED and choice in choices(group)}
    others = tuple(override for override in groups if override.partition("=")[0] not in placed)
    if not placed or len(placed) + len(others) < len(groups):
        config = _copied(_composed(groups, name, registered))
        with open_dict(config):
            del config["hydra"]
        return config
    config = _copied(_chosen(others, name, _registered(others)))
    for group, choice in placed.items():
        config[group] = own_settings(group, choice)
    return config


@cache
def _composed(groups: tuple[str, ...], name: str, registered: tuple) -> DictConfig:
    """With Hydra's own settings."""
    return _by_hydra(list(groups), name, hydras_own=True)


def _registered(groups: list[str]) -> tuple:
    """The classes that the groups name: one registered anew may have other settings."""
    named = (override.partition("=")[::2] for override in groups)
    return tuple(REGISTRIES[group].get(choice) for group, choice in named if group in REGISTRIES)


@cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


@lru_cache(1000)
def _value(override: str) -> object:
    """What Hydra takes it for."""
    parsed = _parser().parse_override(override)
    if parsed.is_sweep_override():
        raise HydraException(f"{override} has several values")
    return parsed.value()


def _by_hydra(overrides: list[str], name: str, hydras_own: bool = False) -> DictConfig:
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            # a task's setting may be written with a +, as if it had no default
            named = ["+" + o if o.startswith("+task.") else o for o in overrides]
            return hydra_compose(name, named, return_hydra_config=hydras_own)
    except (HydraException, OmegaConfBaseException, ValueError, TypeError) as error:  # TypeError: a list of numbers
        raise CdgrabError(one_line(error)) from error


def one_line(error: Exception) -> str:
    """The message of Hydra or OmegaConf, which often has several lines, in one."""
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())


@cache
def task_defaults() -> dict:
    """A task's settings where its own yaml says nothing."""
    return OmegaConf.to_container(OmegaConf.load(CONFIGS / "config.yaml").task, resolve=False)


def own_settings(group: str, name: str) -> dict:
    """The settings in the yaml of this name alone. For a class from elsewhere: a task's come from a yaml of the same
    name beside its file, if there is one; a sorter's or sparsifier's are its options with their defaults."""
    path = CONFIGS / group / f"{name}.yaml"
    if path.exists() or name not in REGISTRIES[group]:
        return _loaded(path)
    chosen = REGISTRIES[group][name]
    if group != "task":
        wanted = sorter_options(name) if group == "sorter" else ("density", *sparsifier_options(name))
        parameters = [p for base in chosen.__mro__[::-1] for p in inspect.signature(base.__init__).parameters.values()]
        return {"name": name} | {p.name: p.default for p in parameters if p.name in wanted and p.default is not p.empty}
    file = getattr(sys.modules.get(chosen.__module__), "__file__", None)  # none of a class typed in a session
    beside = Path(file).with_suffix(".yaml") if file else path
    return {"name": name} | (_loaded(beside) if beside.exists() else {})


@cache
def _loaded(path: Path) -> dict:
    return OmegaConf.to_container(OmegaConf.load(path), resolve=False)


def _store_extensions() -> None:
    """Tell Hydra about classes that are registered without a yaml in configs/."""
    load_extensions()
    for group, registry in REGISTRIES.items():
        for name in registry:
            if not (CONFIGS / group / f"{name}.yaml").exists():
                ConfigStore.instance().store(name, own_settings(group, name), group)


def check_choices(overrides: list[str]) -> None:
    """Refuse unknown names, and words that are not settings, in one line; Hydra would take several."""
    _store_extensions()
    refuse([complaint for override in overrides if (complaint := _unknown(override))])


def _unknown(override: str) -> str | None:
    key, equals, values = override.partition("=")
    if not equals:
        return f"{override!r} is not a setting of the form key=value"
    unknown = [value for value in values.split(",") if key in GROUPS and value not in choices(key)]
    plural = PLURALS.get(key, f"{key}s")
    return f"unknown {key} {unknown[0]!r}; the {plural} are {', '.join(choices(key))}" if unknown else None


def known_names() -> str:
    """For --help."""
    groups = {"tasks": TASKS, "sorters": SORTERS, "sparsifiers": SPARSIFIERS, "experiments": choices("experiment")}
    return "\n".join(f"{group}: {', '.join(names)}" for group, names in groups.items())
