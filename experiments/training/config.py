"""Composing and checking a run's configuration: every entry point, and every rank, goes through `compose`."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cdgrab.checks import count, is_whole, random_seed, refuse_unknown_options
from cdgrab.errors import CdgrabError
from cdgrab.runtime.group import DEVICES
from cdgrab.sorters import SORTERS, sorter_options
from cdgrab.sparsify import SPARSIFIERS, make_sparsifier
from experiments.data.sources import Source
from experiments.store.files import ROOT
from experiments.tasks import TASKS, locate_data
from experiments.tasks.base import DTYPES, PARTITIONS
from experiments.training.gradients import GRADIENTS
from experiments.training.optimisers import OPTIMISERS, SCHEDULES

CONFIGS = ROOT / "configs"

COMPILE = ("auto", "off")
GROUPS = ("task", "sorter", "sparsifier", "experiment", "study")
PLURALS = {"study": "studies"}

# Settings that say where and how a run is carried out, not what it computes.
DEPLOYMENT = {
    "run_dir",
    "resume",
    "device",
    "nproc",
    "nnodes",
    "rdzv",
    "jobs",
    "data_root",
    "data",
    "compile",
    "threads",
    "size",
    "checkpoint.every_steps",
    "checkpoint.keep",
    "restarts",
    "timeout",
    "sorter.buffer_mb",
    "sorter.background",
    "task.device",
    "task.state",  # the data source that it leads to counts instead
}

# What runs that say nothing about it had: it is left out, so that runs from before it existed are still the same runs.
UNSAID = {"sparsifier.name": "dense", "task.model": "lenet"}

# Which runs make up an experiment and how they are drawn: says nothing about a single run.
PLANS = ("task.presets.", "seeds.", "sweeps.", "columns", "candidates")


@dataclass(frozen=True)
class Run:
    """A checked configuration, the data it uses and the folder it writes to."""

    config: DictConfig
    source: Source
    directory: Path

    @property
    def size(self) -> str:
        """paper, too, when another size has the same settings."""
        return _effective_size(self.config, self.source)

    @property
    def science(self) -> dict:
        """The flat settings that decide the result; two runs with the same are the same run."""
        flat = flatten(OmegaConf.to_container(self.config, resolve=True))
        kept = {k: v for k, v in flat.items() if k not in DEPLOYMENT and not k.startswith(PLANS)}
        kept = {k: v for k, v in kept.items() if k not in UNSAID or UNSAID[k] != v}
        return kept | {"source": self.source.label}


def refuse_other_settings(run: Run, stored: dict, holder: Path) -> None:
    """Refuse to go on with results of other settings. Settings that did not exist when they were stored don't count."""
    if not isinstance(stored, dict):
        raise CdgrabError(f"{holder} holds something else than a run; choose another run_dir")
    now, stored = UNSAID | run.science, UNSAID | stored
    differing = sorted(key for key in stored.keys() & now.keys() if stored[key] != now[key])
    if differing:
        details = ", ".join(f"{key}={stored[key]} there, {now[key]} here" for key in differing)
        raise CdgrabError(f"{holder} holds a run with other settings ({details}); choose another run_dir")


def choices(group: str) -> list[str]:
    """Names in a config group."""
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def compose(overrides: list[str]) -> Run:
    """The run that these Hydra overrides describe, checked.

    The task's presets for this size, and for embedded data or files, apply first; explicit overrides win.
    """
    config = compose_config(overrides)
    try:
        _paths_are_text(config)
        source = locate_data(config)
        presets = _presets(config, source)
        _apply(presets, config, overrides)
        validate(config)
        return Run(config, source, _run_directory(config, source, overrides, presets))
    except OmegaConfBaseException as error:  # interpolations that lead nowhere
        raise CdgrabError(_one_line(error)) from error


def validate(config: DictConfig) -> None:
    """Refuse settings that cannot work, each in one sentence."""
    _whole(config, "workers", 1)
    _whole(config, "epochs", 1)
    random_seed("seed", config.seed)
    _whole(config, "threads", 1, most=4096)
    _whole(config, "checkpoint.keep", 1)
    _whole(config, "restarts", 0)
    _whole(config, "nnodes", 1)
    if config.nnodes > 1 and not re.fullmatch(r"\S+:\d+", str(config.rdzv)):
        raise CdgrabError(f"nnodes={config.nnodes} hosts need rdzv=first-host:29400 to meet at, got {config.rdzv!r}")
    _number(config, "timeout", above=0.0, below=1e8)
    if config.checkpoint.every_steps is not None:
        _whole(config, "checkpoint.every_steps", 1)
    _whole(config, "task.batch", 1)
    _one_of(config, "task.optimiser", OPTIMISERS)
    _one_of(config, "task.schedule.kind", SCHEDULES)
    _one_of(config, "task.partition", PARTITIONS)
    _one_of(config, "task.gradients", GRADIENTS)
    _one_of(config, "task.dtype", tuple(DTYPES))
    _one_of(config, "device", DEVICES)
    _one_of(config, "compile", COMPILE)
    for key in ("resume", "tf32", "task.truncate"):
        _one_of(config, key, (True, False))
    _number(config, "task.lr", above=0.0)
    for key, least in (("task.limit", 1), ("task.test_limit", 1), ("task.herding_every", 0)):
        if OmegaConf.select(config, key) is not None:
            _whole(config, key, least)
    if "alpha" in config.task:
        _number(config, "task.alpha", above=0.0)
    if "train_share" in config.task:
        _number(config, "task.train_share", above=0.0, below=1.0)
    _number(config, "task.momentum", at_least=0.0, below=1.0)
    _number(config, "task.weight_decay", at_least=0.0)
    refuse_unknown_options(
        "sorter", config.sorter.name, set(config.sorter) - {"name"}, sorter_options(config.sorter.name)
    )
    make_sparsifier(workers=config.workers, dim=1, **{k: v for k, v in config.sparsifier.items() if k != "layers"})
    layers = config.sparsifier.get("layers")
    if layers is not None and not (isinstance(layers, ListConfig) and all(map(is_whole, layers))):
        raise CdgrabError(f"sparsifier.layers must be null or a list of whole numbers, got {layers!r}")
    if config.task.schedule.kind == "step":
        _whole(config, "task.schedule.every", 1)
        _number(config, "task.schedule.factor", above=0.0)
    if config.task.batch % config.workers:
        raise CdgrabError(
            f"task.batch={config.task.batch} cannot be split evenly over workers={config.workers}; "
            f"make the batch a multiple of the workers"
        )


def compose_config(overrides: list[str], name: str = "config") -> DictConfig:
    """configs/<name>.yaml with these Hydra overrides."""
    check_choices(overrides)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return hydra_compose(name, overrides)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise CdgrabError(_one_line(error)) from error


def _one_line(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())


def _paths_are_text(config: DictConfig) -> None:
    for key in ("run_dir", "data_root", "name", "task.checkpoint", "task.encoder_name"):
        value = OmegaConf.select(config, key)
        if value is not None and not isinstance(value, str):
            raise CdgrabError(f"{key} must be text, got {value!r}")


def check_choices(overrides: list[str]) -> None:
    """Refuse unknown names, and words that are no settings, before Hydra says so in several lines."""
    for override in overrides:
        key, equals, values = override.partition("=")
        if not equals:
            raise CdgrabError(f"{override!r} is not a setting of the form key=value")
        unknown = [v for v in values.split(",") if key in GROUPS and v not in choices(key)]
        if unknown:
            plural = PLURALS.get(key, f"{key}s")
            raise CdgrabError(f"unknown {key} {unknown[0]!r}; the {plural} are {', '.join(choices(key))}")


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
    if config.size not in sizes:
        raise CdgrabError(f"size must be {', '.join(list(sizes)[:-1])} or {list(sizes)[-1]}, got {config.size!r}")
    # unresolved: a preset may refer to another one, or to what is on the command line
    return OmegaConf.to_container(sizes[config.size], resolve=False)


def _apply(presets: dict, config: DictConfig, overrides: list[str]) -> None:
    """Put presets into a composed configuration, except where an override says something else, and resolve it."""
    explicit = {override.partition("=")[0].lstrip("+") for override in overrides}
    for key, value in presets.items():
        if key not in explicit:
            OmegaConf.update(config, key, value)
    OmegaConf.resolve(config)


@cache
def _experiments_own(groups: tuple[str, ...]) -> DictConfig:
    """What these config groups say by themselves. Not to be changed: many runs are compared with it."""
    return compose_config(list(groups))


def _run_directory(config: DictConfig, source: Source, overrides: list[str], presets: dict) -> Path:
    """run_dir, or results/runs/<task>/<experiment>/<data source>[,changed settings]/<sorter>[,changed]-s<seed>.

    Whatever differs from the experiment's own settings is in the name, so that different runs never share a folder.
    """
    if config.run_dir:
        return Path(config.run_dir)
    groups = [o for o in overrides if o.partition("=")[0] in GROUPS]
    plain = copy.deepcopy(_experiments_own(tuple(groups)))
    plain.size = config.size  # settings that follow it are not changed ones
    _apply(presets, plain, [])
    OmegaConf.resolve(plain)
    before, after = (flatten(OmegaConf.to_container(c)) for c in (plain, config))
    changed = {k: v for k, v in after.items() if before.get(k) != v and k not in DEPLOYMENT | {"seed"}}
    changed = {k: str(v).rpartition("/")[2] for k, v in changed.items()}  # of a path, the last part
    sorter = "".join(f",{k.removeprefix('sorter.')}={v}" for k, v in changed.items() if k.startswith("sorter."))
    sparsifier = "" if config.sparsifier.name == "dense" else f",sparsifier={config.sparsifier.name}"
    others = sparsifier + "".join(
        f",{k.removeprefix('task.')}={v}" for k, v in changed.items() if not k.startswith("sorter.")
    )
    folder = ROOT / "results" / "runs" / config.task.name / config.name
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


def _one_of(config: DictConfig, key: str, allowed: tuple) -> None:
    value = OmegaConf.select(config, key)
    if value not in allowed:
        names = [str(name).lower() for name in allowed]
        raise CdgrabError(f"{key} must be {', '.join(names[:-1])} or {names[-1]}, got {value!r}")


def _whole(config: DictConfig, key: str, least: int, **limits: int) -> None:
    count(key, OmegaConf.select(config, key), least, **limits)


def _number(
    config: DictConfig, key: str, at_least: float = -math.inf, above: float = -math.inf, below: float = math.inf
) -> None:
    value = OmegaConf.select(config, key)
    sound = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not sound or not (at_least <= value < below and value > above):
        limits = (
            [f"at least {at_least:g}"] * (at_least > -math.inf)
            + [f"above {above:g}"] * (above > -math.inf)
            + [f"below {below:g}"] * (below < math.inf)
        )
        raise CdgrabError(f"{key} must be a number {' and '.join(limits)}, got {value!r}")


def known_names() -> str:
    """For --help."""
    groups = {"tasks": TASKS, "sorters": SORTERS, "sparsifiers": SPARSIFIERS, "experiments": choices("experiment")}
    return "\n".join(f"{group}: {', '.join(names)}" for group, names in groups.items())
