"""One row on a GPU, for a training that hands them over one by one: two Triton kernels that need hardly any memory."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdgrab.balance import rules
from cdgrab.balance.kernels.launching import cut, launch

MOST_COLUMNS, MOST_PROGRAMS = 1024, 512
ROUNDING = tl.constexpr(rules.ROUNDING)
COUNTS = ["vectors", "tiles", "index"]  # do not specialise kernels on these values


def balance_row(row: Tensor, running: Tensor, limits: Tensor, index: int, signs: Tensor) -> Tensor:
    """The sign [1, …] of a row alone, which is written to signs[index]; its limit is limits[index]. All are contiguous,
    and row and running of one length. What is not finite in the row counts as zero. Takes no memory but for a few
    numbers per program, so that a training beside it keeps its own, and two launches: blocks of rows pay for their
    matrices with many more."""
    dim = row.numel()
    vector = math.gcd(4, dim, row.data_ptr() // row.element_size())
    tiles, programs = cut(dim, MOST_COLUMNS, MOST_PROGRAMS)
    products = torch.empty(programs, 2, dtype=torch.float64, device=row.device)
    where, sizes = (row, running, products, dim // vector, tiles), {"COLUMNS": MOST_COLUMNS, "VECTOR": vector}
    launch(_multiply_row_kernel, (programs, 1, 1), where, sizes, 4, False)
    sizes["PROGRAMS"] = 1 << (programs - 1).bit_length()
    launch(_add_row_kernel, (programs, 1, 1), (*where, limits, signs, index), sizes, 4, False)
    return signs[index : index + 1]


@triton.jit
def _finite(row, column, dim):
    """Values of a row in float64, zero where they are not finite."""
    values = tl.load(row + column, mask=column < dim, other=0.0).to(tl.float64)
    return tl.where(tl.abs(values) < float("inf"), values, 0.0)


@triton.jit(do_not_specialize=COUNTS)
def _multiply_row_kernel(row, running, products, vectors, tiles, COLUMNS: tl.constexpr, VECTOR: tl.constexpr):
    """Inner products of a row with the running sum and with itself, over some of the coordinates."""
    program, dim = tl.program_id(0), vectors * VECTOR
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
    program, dim = tl.program_id(0), vectors * VECTOR
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
