"""Sparsified means of runs that train together: each run's own sparsifier, or all of them at once on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cdgrab.errors import NotFiniteError
from cdgrab.sparsify import SparseAverager
from experiments.training.on_device import OnDevice, supported


def sparse_means(
    averagers: Sequence[SparseAverager], captured: bool, saved: bool, parameters: Tensor
) -> SparseMeans | OnDevice:
    """captured: whether steps are; saved: whether there may be checkpoints."""
    if captured and not saved and supported(averagers, parameters.dtype):
        return OnDevice(averagers, parameters.device)
    return SparseMeans(averagers)


class SparseMeans:
    """Averages like `cdgrab.runtime.mean.Averager`, but the gradients of each run with its own sparsifier."""

    def __init__(self, averagers: Sequence[SparseAverager]) -> None:
        self._averagers = averagers

    def average(self, worker_means: Tensor, want_shard: bool = False) -> tuple[Tensor, None]:
        """The updates [..., dim] from the workers' mean gradients [..., local workers, dim]. There is no shard."""
        each = zip(self._averagers, unstacked(worker_means, len(self._averagers)), strict=True)
        return stacked([self._update(averager, means) for averager, means in each]), None

    def collect(self) -> None:
        """Each run's averager has its own statistics already."""

    def _update(self, averager: SparseAverager, worker_means: Tensor) -> Tensor:
        try:
            return averager.average(worker_means)[0]
        except NotFiniteError:  # its parameters are not finite from now on, which ends this run and no other
            return torch.full_like(worker_means[0], torch.nan)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """[replicas, ...]; the tensor itself if there is only one run."""
    return torch.stack(list(tensors)) if len(tensors) > 1 else tensors[0]


def unstacked(tensor: Tensor, replicas: int) -> Sequence[Tensor]:
    """The part of every run. A run alone has no dimension of replicas."""
    return tensor.unbind(0) if replicas > 1 else (tensor,)
