"""Parts of a trainer, made from its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from omegaconf import DictConfig
from torch import Tensor

from cdgrab.balance import kernels
from cdgrab.runtime.group import WorkerGroup
from cdgrab.sorters import make_sorter
from cdgrab.sparsify import SparseAverager, known_of_a_model, make_sparsifier
from experiments.training.gradients import FlatParameters

BLOCK_BYTES = {"cpu": 32 * 2**20, "cuda": 128 * 2**20}  # of data and unit gradients held at once; on a GPU by each run
JUDGED_BYTES = {"cpu": 32 * 2**20, "cuda": 2**31}  # of unit gradients in float64, for the herding bound
MOST_STEPS_PER_BLOCK = 256


def make_sparse_mean(config: DictConfig, flat: FlatParameters, group: WorkerGroup) -> SparseAverager | None:
    """The sparsifier's averager; None for `dense`, which is the plain mean."""
    options = dict(config.sparsifier)
    if options["name"] == "dense":
        return None
    known = known_of_a_model(options["name"], list(flat.shapes.values()))
    options |= {option: value for option, value in known.items() if options[option] is None}
    return SparseAverager(make_sparsifier(workers=config.workers, dim=flat.dim, group=group, **options))


def steps_per_block(step_bytes: int, replicas: int, device: torch.device) -> int:
    """How many steps run as one block; step_bytes: the memory of a step's data and, if they are kept, unit gradients.
    A GPU has room for a full block of every run."""
    step_bytes *= replicas if device.type == "cpu" else 1
    steps = max(1, min(MOST_STEPS_PER_BLOCK, BLOCK_BYTES[device.type] // step_bytes))
    return max(1, steps - steps % 2)  # an even number leaves no unit without its pair


def blocks(units: int, microbatch: int, block_steps: int, every_steps: int | None) -> list[tuple[int, int, int]]:
    """(first unit, end, units per step) of the steps of an epoch that run together; every_steps: between checkpoints,
    which are due only at the ends of blocks."""
    full = units // microbatch * microbatch  # units in steps of full size
    cuts = {*range(0, full, block_steps * microbatch), full}
    if every_steps:
        cuts |= set(range(0, full, every_steps * microbatch))
    found = [(start, end, microbatch) for start, end in pairwise(sorted(cuts))]
    return [*found, (full, units, units - full)] if full < units else found


@contextmanager
def products(replicas: int, device: torch.device, gradients: str) -> Iterator[None]:
    """Within it, runs that train together do without the Arm Compute Library, whose products of small float32 matrices
    take up to twenty times as long as others. Runs alone keep it, and with it every bit of their results."""
    slow = device.type == "cpu" and replicas > 1 and gradients == "vmap" and torch.backends.mkldnn.is_acl_available()
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = before and not slow
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


def warm_up_sorters(options: Sequence[DictConfig], unit_gradients: Sequence[Tensor]) -> None:
    """Compile the kernels of sorters with these options, each for its unit gradients [workers, units, dim]; those that
    don't look come last and have none."""
    for some, seen in {str(one): (one, seen) for one, seen in zip(options, unit_gradients, strict=False)}.values():
        _warm_up_sorter(some, seen)


def _warm_up_sorter(options: DictConfig, unit_gradients: Tensor) -> None:
    unit_gradients = torch.cat([unit_gradients, unit_gradients], dim=1)  # at least one pair
    workers, units, dim = unit_gradients.shape
    throwaway = make_sorter(workers=workers, units=units, dim=dim, **options)
    throwaway.order(0)
    throwaway.observe(range(units), unit_gradients)
    throwaway.order(1)  # waits until its signs are decided


def warm_up_shards(parameters: Tensor) -> None:
    """The same for a sorter that takes shards."""
    rows = parameters.new_zeros(1, 1, 1)
    running, limits = (torch.zeros(1, 1, dtype=torch.float64, device=parameters.device) for _ in range(2))
    kernels.balance_divided(rows, running, limits)
