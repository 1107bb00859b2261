"""Triton kernels for what is not sent yet. See `experiments.training.on_device.accumulation`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cdgrab.balance.kernels.tree import COLUMNS, branches_added
from experiments.training.on_device.partition_kernels import BLOCK, coordinates, grid


def accumulate(residual: Tensor, gradients: Tensor, rows: Tensor, sent: Tensor, feedback: Tensor) -> Tensor:
    runs, workers, dim = residual.shape
    branches, sums = workers & -workers, residual.new_empty(runs, dim)
    _accumulate[triton.cdiv(dim, COLUMNS), runs](
        sums, residual, gradients, rows, sent, feedback, dim, branches, workers // branches, COLUMNS, num_warps=1
    )
    return sums


def forget(vectors: Tensor, union: Tensor, where: Tensor, otherwise: bool) -> None:
    runs, workers, dim = vectors.shape
    _forget[grid(dim, runs)](vectors, union.contiguous(), where, dim, workers, otherwise, BLOCK)


@triton.jit
def _accumulate(
    sums, residual, gradients, rows, sent, feedback, dim,
    BRANCHES: tl.constexpr, LEAVES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds as `cdgrab.runtime.mean.tree_sum` does. What is forgotten is not read."""
    run, column, inside = coordinates(dim, COLUMNS)
    kept = inside & (tl.load(sent + run * dim + column, mask=inside, other=1) == 0) & (tl.load(feedback + run) != 0)
    worker = tl.arange(0, BRANCHES) * LEAVES
    here = (run * BRANCHES * LEAVES + worker)[:, None] * dim + column[None, :]
    there = (tl.load(rows + run) * BRANCHES * LEAVES + worker)[:, None] * dim + column[None, :]
    total = tl.zeros((BRANCHES, COLUMNS), sums.dtype.element_ty)
    for _ in range(LEAVES):
        own = tl.load(residual + here, mask=kept[None, :], other=0.0)
        own += tl.load(gradients + there, mask=inside[None, :], other=0.0)
        tl.store(residual + here, own, mask=inside[None, :])
        total += own
        here += dim
        there += dim
    tl.store(sums + run * dim + column, branches_added(total), mask=inside)


@triton.jit
def _forget(vectors, union, where, dim, workers, OTHERWISE: tl.constexpr, BLOCK: tl.constexpr):
    """Nothing is read but the union, and nothing written but zeros."""
    run, at, inside = coordinates(dim, BLOCK)
    if tl.load(where + run) != 0:
        inside = inside & (tl.load(union + run * dim + at, mask=inside, other=0) != 0)
    elif not OTHERWISE:
        inside = inside & (at < 0)
    zero = tl.zeros((BLOCK,), vectors.dtype.element_ty)
    for worker in range(workers):
        tl.store(vectors + (run * workers + worker) * dim + at, zero, mask=inside)
