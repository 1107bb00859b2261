"""What the settings of a run must be, one by one and together.

Not OmegaConf's structured configs: those convert values (a rate of 1 becomes 1.0, and the run gets another folder),
stop at the first wrong value, and know no limits. Defaults of a task's settings are in configs/config.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from omegaconf import DictConfig, ListConfig

from cdgrab.checks import auto_or_count, is_whole
from cdgrab.errors import CdgrabError
from cdgrab.runtime.connection import DEVICES
from cdgrab.sorters import make_sorter
from cdgrab.sparsify import make_sparsifier
from cdgrab.sparsify.partitions import ALIGNMENT
from experiments.tasks import task_class
from experiments.tasks.base import DTYPES, PARTITIONS
from experiments.tasks.settings import (
    Check,
    by_size,
    complaints,
    flag,
    folder_name,
    number,
    one_of,
    text,
    whole,
    whole_numbers,
)
from experiments.training.gradients import GRADIENTS
from experiments.training.optimisers import OPTIMISERS, SCHEDULES
from experiments.training.trackers import NAMES, missing_package

COMPILE = ("auto", "off")


# needed to find the data: a size's settings depend on its kind
DATA_SETTINGS: dict[str, Check] = {
    "data": one_of("auto", "embedded"),
    "data_root": text,
    "run_dir": text,
    "name": folder_name,
}
SETTINGS: dict[str, Check] = {
    "workers": whole(1),
    "epochs": whole(1),
    "seed": whole(0, 2**63 - 1),
    "seeds": by_size,
    "sweeps": by_size,
    "threads": whole(1, 4096),
    "checkpoint.keep": whole(1),
    "checkpoint.every_epochs": whole(1),
    "checkpoint.every_steps": whole(1, optional=True),
    "restarts": whole(0),
    "nnodes": whole(1),
    "replicas": auto_or_count,
    "timeout": number(above=0.0, below=1e8),
    "device": one_of(*DEVICES),
    "compile": one_of(*COMPILE),
    "tracker": one_of(*NAMES),
    "resume": flag,
    "tf32": flag,
    "task.batch": whole(1),
    "task.optimiser": one_of(*OPTIMISERS),
    "task.lr": number(above=0.0),
    "task.momentum": number(at_least=0.0, below=1.0),
    "task.weight_decay": number(at_least=0.0),
    "task.clip": number(above=0.0, optional=True),
    "task.schedule.kind": one_of(*SCHEDULES),
    "task.partition": one_of(*PARTITIONS),
    "task.alpha": number(above=0.0),
    "task.truncate": flag,
    "task.gradients": one_of(*GRADIENTS),
    "task.herding_every": whole(0),
    "task.herding_replays": whole_numbers(1),
    "task.dtype": one_of(*DTYPES),
}
STEP_SCHEDULE: dict[str, Check] = {"task.schedule.every": whole(1), "task.schedule.factor": number(above=0.0)}


def wrong_settings(config: DictConfig) -> list[str]:
    """What is wrong with a configuration to which the presets have been applied, one sentence each."""
    wrong = complaints(config, SETTINGS | task_class(config.task.name).checks())
    return [*wrong.values(), *_together(config, wrong)]


def _together(config: DictConfig, wrong: dict[str, str]) -> Iterator[str]:
    """Settings that are right by themselves but do not go together."""

    def right(*keys: str) -> bool:
        return not wrong.keys() & set(keys)

    meeting = re.fullmatch(r"\S+:(\d{1,5})", str(config.rdzv))
    if right("nnodes") and config.nnodes > 1 and not (meeting and int(meeting[1]) < 2**16):
        yield f"nnodes={config.nnodes} hosts need rdzv=first-host:29400 to meet at, got {config.rdzv!r}"
    if right("tracker") and (missing := missing_package(config.tracker)):
        yield missing
    if right("task.schedule.kind") and config.task.schedule.kind == "step":
        yield from complaints(config, STEP_SCHEDULE).values()
    if right("task.batch", "workers") and config.task.batch % config.workers:
        yield (
            f"task.batch={config.task.batch} cannot be split evenly over workers={config.workers}; "
            f"make the batch a multiple of the workers"
        )
    if right("task.herding_replays") and config.task.herding_replays and config.sparsifier.name != "dense":
        yield "task.herding_replays needs sparsifier=dense: a replay would change what a sparsifier has kept"
    if right("task.momentum", "task.optimiser") and config.sparsifier.get("momentum_correction"):
        yield from _two_momenta(config)
    yield from _sorter(config)
    yield from _sparsifier(config)


def _two_momenta(config: DictConfig) -> Iterator[str]:
    """Momentum is applied by the workers or by the optimiser, not twice."""
    if config.task.optimiser != "sgd" or config.task.momentum:
        found = f"task.momentum={config.task.momentum:g}" if config.task.optimiser == "sgd" else config.task.optimiser
        yield f"sparsifier.momentum_correction needs task.optimiser=sgd task.momentum=0: got {found}, a second momentum"


def _sorter(config: DictConfig) -> Iterator[str]:
    """A small sorter is made: it checks its options itself."""
    try:
        make_sorter(workers=1, units=1, dim=1, **_smaller(config.sorter, "sketch_size"))
    except CdgrabError as error:
        yield str(error)


def _sparsifier(config: DictConfig) -> Iterator[str]:
    """The same. Whether there are enough coordinates is told when the model is known."""
    layers, shapes = config.sparsifier.get("layers"), config.sparsifier.get("shapes")
    if layers is not None and not _whole_numbers(layers):
        yield f"sparsifier.layers must be null or a list of whole numbers, got {layers!r}"
    if shapes is not None and not (isinstance(shapes, ListConfig) and all(map(_whole_numbers, shapes))):
        yield f"sparsifier.shapes must be null or a list of lists of whole numbers, got {shapes!r}"
    options = _smaller(config.sparsifier, "blocks")
    options = {key: value for key, value in options.items() if key not in ("layers", "shapes")}
    try:
        make_sparsifier(workers=1, dim=ALIGNMENT, **options)
    except CdgrabError as error:
        yield str(error)


def _whole_numbers(value: object) -> bool:
    return isinstance(value, ListConfig) and all(map(is_whole, value))


def _smaller(settings: DictConfig, size: str) -> dict:
    """With this size as small as can be, if it is one."""
    right = is_whole(settings.get(size)) and settings[size] > 0
    return dict(settings) | ({size: 1} if right else {})
