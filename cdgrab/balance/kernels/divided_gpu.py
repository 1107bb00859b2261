"""The loop of `rules.balance` for coordinates that are divided among the GPUs of several processes, as two Triton
kernels. The host does not wait for the GPU, unless `total` does, and only inner products need memory: rows are decided
while a model trains, between two steps.

Up to 32 rows are decided at once, as in `gpu`: every process multiplies its own coordinates, the products are summed
over all processes, and from these each process finds the same signs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdgrab.balance.kernels.bounds import check_sizes
from cdgrab.balance.kernels.gpu import ROUNDING, _decide, _tile
from cdgrab.balance.kernels.launching import cut, launch

Total = Callable[[Tensor], Tensor]
COLUMNS, MOST_PROGRAMS, MOST_ROWS = 64, 256, 32
COUNTS = ["count", "width", "tiles"]  # do not specialise kernels on these values


def balance_divided(rows: Tensor, running: Tensor, limits: Tensor, total: Total, *_: object) -> Tensor:
    """See `kernels.balance_divided`. Inner products within rounding error of their limits are ties."""
    check_sizes(rows, limits, 1, running)
    flat, limits = rows.flatten(0, 1).contiguous(), limits.flatten().contiguous()
    signs = torch.empty(len(flat), dtype=torch.int8, device=rows.device)
    for every in zip(*(some.split(MOST_ROWS) for some in (flat, limits, signs)), strict=True):
        _decide_some(running, total, *every)
    return signs.view(rows.shape[:2])


def _decide_some(running: Tensor, total: Total, rows: Tensor, limits: Tensor, signs: Tensor) -> None:
    count, width = rows.shape
    tiles, programs = cut(max(1, width), COLUMNS, MOST_PROGRAMS)
    sizes = {"ROWS": 16 if count <= 16 else 32, "COLUMNS": COLUMNS}
    parts = running.new_empty(programs, sizes["ROWS"] + 1, sizes["ROWS"])
    where = (rows, running, count, width, tiles)
    launch(_multiply_rows_kernel, (programs, 1, 1), (*where, parts), sizes, 4, False)
    products = total(parts.sum(0))
    launch(_add_rows_kernel, (programs, 1, 1), (*where, products, limits, signs), sizes, 4, False)


@triton.jit(do_not_specialize=COUNTS)
def _multiply_rows_kernel(rows, running, count, width, tiles, parts, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Inner products of rows with each other and, behind those, with the running sum, over some of the coordinates."""
    program, lane = tl.program_id(0), tl.arange(0, ROWS)
    gram, inner = tl.zeros((ROWS, ROWS), tl.float64), tl.zeros((ROWS, COLUMNS), tl.float64)
    for tile in range(tiles):
        column = (program * tiles + tile).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        some = _tile(rows, lane.to(tl.int64) * width, lane < count, column, width).to(tl.float64)
        gram = tl.dot(some, tl.trans(some), gram, out_dtype=tl.float64)
        inner += some * tl.load(running + column, mask=column < width, other=0.0)[None, :]
    mine = parts + program * (ROWS + 1) * ROWS
    tl.store(mine + lane[:, None] * ROWS + lane[None, :], gram)
    tl.store(mine + ROWS * ROWS + lane, tl.sum(inner, axis=1))


@triton.jit(do_not_specialize=COUNTS)
def _add_rows_kernel(
    rows, running, count, width, tiles, products, limits, signs, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Every program decides all signs for itself, and adds its part of the signed rows. Limits are raised by the
    rounding error of a row's product with the running sum, in which rows as long as any of these may have cancelled."""
    program, lane = tl.program_id(0), tl.arange(0, ROWS)
    gram = tl.load(products + lane[:, None] * ROWS + lane[None, :])
    inner = tl.load(products + ROWS * ROWS + lane)
    lengths = tl.sqrt(tl.sum(tl.where(lane[:, None] == lane[None, :], gram, 0.0), axis=0))
    limit = tl.load(limits + lane, mask=lane < count, other=0.0) + ROUNDING * lengths * tl.max(lengths, axis=0)
    found = _decide(inner, limit, gram, products, ROWS)
    if program == 0:
        tl.store(signs + lane, found.to(tl.int8), mask=lane < count)
    for tile in range(tiles):
        column = (program * tiles + tile).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        some = _tile(rows, lane.to(tl.int64) * width, lane < count, column, width).to(tl.float64)
        r = tl.load(running + column, mask=column < width, other=0.0) + tl.sum(some * found[:, None], axis=0)
        tl.store(running + column, r, mask=column < width)
