"""One row on a GPU, for a training that hands them over one by one: two Triton kernels that need hardly any memory."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from cdgrab.balance import rules
from cdgrab.balance.kernels.launching import Launches, cut

MOST_COLUMNS, MOST_PROGRAMS = 1024, 512
ROUNDING = tl.constexpr(rules.ROUNDING)
COUNTS = ["vectors", "tiles", "index"]  # do not specialise kernels on these values


class RowByRow:
    """Decides rows alone, each against limits[index], and writes its sign to signs[index]. All are contiguous, and rows
    and running of one length. What is not finite in a row counts as zero. Takes no memory but for a few numbers per
    program, so that a training beside it keeps its own, and two launches: blocks of rows pay for their matrices with
    many more."""

    def __init__(self, running: Tensor, limits: Tensor, signs: Tensor) -> None:
        self.running, self.limits, self.signs = running, limits, signs
        self._tiles, self._programs = cut(running.numel(), MOST_COLUMNS, MOST_PROGRAMS)
        self._products = running.new_empty(self._programs, 2)
        self._kinds: dict[tuple, tuple] = {}  # of rows: what launches the kernels for them

    def __call__(self, row: Tensor, index: int) -> None:
        kind = (row.dtype, row.data_ptr() % 16)  # what compiled kernels rely on, and may differ between rows
        vectors, multiply, add = self._kinds.get(kind) or self._prepared(kind, row)
        where = (row, self.running, self._products, vectors, self._tiles)
        multiply(*where)
        add(*where, self.limits, self.signs, index)

    def _prepared(self, kind: tuple, row: Tensor) -> tuple[int, Launches, Launches]:
        dim, grid = row.numel(), (self._programs, 1, 1)
        vector = math.gcd(4, dim, row.data_ptr() // row.element_size())
        sizes = {"COLUMNS": MOST_COLUMNS, "VECTOR": vector}
        multiply = Launches(_multiply_row_kernel, grid, sizes, 4)
        add = Launches(_add_row_kernel, grid, sizes | {"PROGRAMS": 1 << (self._programs - 1).bit_length()}, 4)
        self._kinds[kind] = dim // vector, multiply, add
        return self._kinds[kind]


@triton.jit
def _finite(row, column, dim):
    """Values of a row in float64, zero where they are not finite."""
    values = tl.load(row + column, mask=column < dim, other=0.0).to(tl.float64)
    return tl.where(tl.abs(values) < float("inf"), values, 0.0)


@triton.jit(do_not_specialize=COUNTS)
def _multiply_row_kernel(row, running, products, vectors, tiles, COLUMNS: tl.constexpr, VECTOR: tl.constexpr):
    """Inner products of a row with the running sum and with itself, over some of the coordinates."""
    program, dim = tl.program_id(0), vectors.to(tl.int64) * VECTOR
    with_sum, with_itself = tl.zeros((COLUMNS,), tl.float64), tl.zeros((COLUMNS,), tl.float64)
    for tile in range(tiles):
        column = (program * tiles + tile).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        values = _finite(row, column, dim)
        with_sum += values * tl.load(running + column, mask=column < dim, other=0.0)
        with_itself += values * values
    tl.store(products + 2 * program, tl.sum(with_sum, axis=0))
    tl.store(products + 2 * program + 1, tl.sum(with_itself, axis=0))


@triton.jit(do_not_specialize=COUNTS)
def _add_row_kernel(
    row, running, products, vectors, tiles, limits, signs, index,
    COLUMNS: tl.constexpr, VECTOR: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Every program sums the products of all, decides the sign for itself, and adds its part of the signed row."""
    program, dim = tl.program_id(0), vectors.to(tl.int64) * VECTOR
    every = tl.arange(0, PROGRAMS)
    there = every < tl.num_programs(0)
    inner = tl.sum(tl.load(products + 2 * every, mask=there, other=0.0), axis=0)
    square = tl.sum(tl.load(products + 2 * every + 1, mask=there, other=0.0), axis=0)
    excess = inner - tl.load(limits + index) - ROUNDING * (tl.abs(inner) + square)
    sign = tl.where(excess <= 0.0, 1.0, -1.0)
    if program == 0:
        tl.store(signs + index, sign.to(tl.int8))
    for tile in range(tiles):
        column = (program * tiles + tile).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.load(running + column, mask=column < dim, other=0.0) + sign * _finite(row, column, dim)
        tl.store(running + column, total, mask=column < dim)
