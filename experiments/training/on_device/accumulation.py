"""What the workers of several runs have not sent yet, and the gradients of a step added to that."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from cdgrab.balance import optional
from experiments.training.gradients import sum_by_run


def accumulate(residual: Tensor, gradients: Tensor, rows: Tensor, sent: Tensor, feedback: Tensor) -> Tensor:
    """Adds the gradients [all runs, workers, dim] of the runs in these rows to their residual [runs, workers, dim],
    after setting it to zero where `sent` [runs, dim], and everywhere in runs without `feedback` [runs]. Returns the
    sums over the workers [runs, dim]. In one pass, where a kernel takes this number of workers."""
    if residual.is_cuda and optional("tree").takes_so_many(residual.shape[1]):
        return _kernels().accumulate(residual, gradients.contiguous(), rows, sent, feedback)
    forget(residual, sent, feedback, otherwise=True)
    residual += gradients.index_select(0, rows)
    return sum_by_run(residual)


def forget(vectors: Tensor, union: Tensor, where: Tensor, otherwise: bool) -> None:
    """Set vectors [runs, workers, dim] to zero where `union` [runs, dim], in runs `where` [runs] says so; in the other
    runs nowhere, or everywhere if `otherwise`."""
    if vectors.is_cuda:
        _kernels().forget(vectors, union, where, otherwise)
    else:
        mask = union | ~where[:, None] if otherwise else union & where[:, None]
        vectors.masked_fill_(mask[:, None], 0)


def _kernels() -> ModuleType:
    from experiments.training.on_device import accumulation_kernels  # needs Triton

    return accumulation_kernels
