"""Which runs of a sweep train together, and how many at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cdgrab.checks import MOST
from cdgrab.runtime.group import WorkerGroup
from cdgrab.sorters import SORTERS
from cdgrab.sparsify import SPARSIFIERS
from experiments.tasks import make_task, task_class
from experiments.tasks.base import DTYPES
from experiments.training.config import Run
from experiments.training.member import Member
from experiments.training.memory import free_memory
from experiments.training.on_device import known
from experiments.training.optimisers import SETTINGS
from experiments.training.parts import BLOCK_BYTES

MAY_DIFFER = ("seed", "sorter.", "sparsifier.", *(f"task.{name}" for name in SETTINGS))
MUST_AGREE = ("device", "compile", "threads", "timeout", "data", "data_root", "resume", "checkpoint", "replicas")


def groups(runs: Sequence[Run], alone: Sequence[bool], parts: int = 1, most: int = MOST) -> list[list[int]]:
    """The numbers of the runs that train together, in the order of the first of each group.

    They share task, model, data and shapes, and differ in seed, sorter, sparsifier, or settings of the optimiser and
    its schedule; but runs with a sparsifier are apart from runs without one.
    alone: which runs need their own processes. parts: into how many each group is divided, to train them at once.
    most: runs in a group.
    """
    together: dict[str, list[int]] = {}
    for number, (run, on_its_own) in enumerate(zip(runs, alone, strict=True)):
        shares = run.config.replicas != 1 and not on_its_own
        together.setdefault(_likeness(run) if shares else str(number), []).append(number)
    return [
        group[start : start + size]
        for group in together.values()
        for size in [min(most, _size(len(group), runs[group[0]].config.replicas, parts))]
        for start in range(0, len(group), size)
    ]


def _likeness(run: Run) -> str:
    config, science = run.config, run.science
    name = config.sparsifier.name  # unless it is dense, it needs the gradients of every worker
    stays = known(SPARSIFIERS[name], config.sparsifier)  # on a GPU, unless others keep it from there
    same = {key: value for key, value in science.items() if not key.startswith(MAY_DIFFER)}
    # unit gradients cost something only where a worker visits several units
    if config.task.batch > config.workers and not task_class(config.task.name).one_unit_per_step:
        same["looks"] = SORTERS[config.sorter.name].needs_gradients
    return str([sorted(same.items(), key=str), name != "dense", stays, [str(config.get(key)) for key in MUST_AGREE]])


def _size(runs: int, replicas: int | str, parts: int) -> int:
    most = -(-runs // parts)
    return most if replicas == "auto" else min(most, replicas)


def make_member(run: Run, group: WorkerGroup, device: torch.device) -> Member:
    return Member(run, make_task(run.config, run.source, device), group, device)


def first_members(runs: Sequence[Run], group: WorkerGroup, device: torch.device) -> list[Member]:
    """Of as many of these runs, from the first one on, as fit into memory."""
    first = make_member(runs[0], group, device)
    return [first, *(make_member(run, group, device) for run in runs[1 : _fit_in_memory(first)])]


def _fit_in_memory(member: Member) -> int:
    """How many runs like this one fit into half of the free memory."""
    config, dim = member.config, member.flat.dim
    data = sum(tensor.nbytes for tensor in member.task.data["train"])
    unit_gradients = config.workers * (member.task.units_per_step if member.sorter.needs_gradients else 1)
    vectors = 6 + 3 * unit_gradients  # parameters, optimiser and their successors; gradients
    if member.sparse_mean is not None:  # what is averaged, what is not sent yet; on a GPU, what is compared
        vectors += (8 if member.device.type == "cuda" else 3) * config.workers
    vectors += config.workers * bool(config.sparsifier.get("momentum_correction"))
    own = data + vectors * dim * DTYPES[config.task.dtype].itemsize
    own += BLOCK_BYTES["cuda"] * (member.device.type == "cuda")
    return max(1, free_memory(member.device) // (2 * own))
