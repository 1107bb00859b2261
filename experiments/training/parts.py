"""Parts of a trainer, made from its configuration."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from cdgrab.balance import kernels
from cdgrab.runtime.group import WorkerGroup
from cdgrab.sorters import make_sorter
from cdgrab.sparsify import SparseAverager, make_sparsifier, sparsifier_options
from experiments.training.gradients import FlatParameters

BLOCK_BYTES = {"cpu": 32 * 2**20, "cuda": 128 * 2**20}  # of data and unit gradients held at once; on a GPU by each run
JUDGED_BYTES = {"cpu": 32 * 2**20, "cuda": 2**31}  # of unit gradients in float64, for the herding bound
MOST_STEPS_PER_BLOCK = 256


def make_sparse_mean(config: DictConfig, flat: FlatParameters, group: WorkerGroup) -> SparseAverager | None:
    """The sparsifier's averager; None for `dense`, which is the plain mean."""
    options = dict(config.sparsifier)
    if options["name"] == "dense":
        return None
    if "layers" in sparsifier_options(options["name"]) and options["layers"] is None:
        options["layers"] = flat.sizes
    return SparseAverager(make_sparsifier(workers=config.workers, dim=flat.dim, group=group, **options))


def steps_per_block(unit_bytes: int, units_per_step: int, replicas: int, device: torch.device) -> int:
    """How many steps run as one block; unit_bytes: the memory of a unit's data and, if it is kept, its gradient. A GPU
    has room for a full block of every run."""
    step_bytes = unit_bytes * units_per_step * (replicas if device.type == "cpu" else 1)
    steps = max(1, min(MOST_STEPS_PER_BLOCK, BLOCK_BYTES[device.type] // step_bytes))
    return max(1, steps - steps % 2)  # an even number leaves no unit without its pair


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


def warm_up_sorter(options: DictConfig, unit_gradients: Tensor) -> None:
    """Compile the kernels of a sorter with these options; unit_gradients [workers, units, dim]."""
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
    kernels.balance_divided(rows, running, limits, lambda products: products)


def progress_bar(title: str, steps: int, done: int) -> tqdm:
    """Visible on a terminal, and only with a title."""
    visible = bool(title) and sys.stderr.isatty()
    return tqdm(total=steps, initial=done, desc=title, unit="step", disable=not visible, dynamic_ncols=True)
