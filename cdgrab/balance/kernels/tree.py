"""The sum of rows in a binary tree, on a GPU: every row is read once, and no partial sum is written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_BRANCHES = 64  # whose numbers a program can hold
COLUMNS = 128


def tree_sum(rows: Tensor) -> Tensor:
    """rows [n, runs, dim] -> [runs, dim]; see `cdgrab.runtime.mean.tree_sum`, whose bits these are."""
    n, runs, dim = rows.shape
    branches = n & -n
    out = rows.new_empty(runs, dim)
    _tree_kernel[triton.cdiv(dim, COLUMNS), runs](
        rows, out, *rows.stride()[:2], dim, branches, n // branches, COLUMNS, num_warps=1
    )
    return out


def takes(rows: Tensor) -> bool:
    return rows.stride(-1) == 1 and takes_so_many(len(rows)) and rows.dtype in (torch.float32, torch.float64)


def takes_so_many(rows: int) -> bool:
    return 1 < rows & -rows <= MOST_BRANCHES


@triton.jit
def _tree_kernel(
    rows, out, row_stride, run_stride, dim, BRANCHES: tl.constexpr, LEAVES: tl.constexpr, COLUMNS: tl.constexpr
):
    run, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    branch = tl.arange(0, BRANCHES).to(tl.int64) * LEAVES
    where = rows + run * run_stride + branch[:, None] * row_stride + column[None, :]
    inside = (column < dim)[None, :]
    sums = tl.load(where, mask=inside, other=0.0)
    for _ in range(1, LEAVES):
        where += row_stride
        sums += tl.load(where, mask=inside, other=0.0)
    tl.store(out + run * dim + column, branches_added(sums), mask=column < dim)


@triton.jit
def branches_added(sums):
    """[branches, columns] -> [columns]; 2 to 64 branches."""
    if sums.shape[0] > 32:
        sums = _halved(sums)
    if sums.shape[0] > 16:
        sums = _halved(sums)
    if sums.shape[0] > 8:
        sums = _halved(sums)
    if sums.shape[0] > 4:
        sums = _halved(sums)
    if sums.shape[0] > 2:
        sums = _halved(sums)
    return tl.reshape(_halved(sums), (sums.shape[1],))


@triton.jit
def _halved(sums):
    """Neighbours are added: [2n, columns] -> [n, columns]."""
    first, second = tl.split(tl.permute(tl.reshape(sums, (sums.shape[0] // 2, 2, sums.shape[1])), (0, 2, 1)))
    return first + second
