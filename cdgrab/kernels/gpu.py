"""The loop of `balance.py` on a GPU, as two Triton kernels. Rows may be float32; all arithmetic is float64.

Rows are decided in blocks of 32 (D), as many as a warp has lanes. With G = D·Dᵀ and c = D·r, row j's inner product with
the running sum r at its turn is c_j + Σ_{i<j} s_i G_ij, and then r += Σ s_j D_j. The matrices G depend on no sign: one
launch computes those of many blocks. A second one walks through the blocks, each program with coordinates of its own:
it adds the signed rows of the last block to its part of r and multiplies that with the rows of the next; the program
that comes last adds up the products, decides the block's signs and lets the others go on. Nothing is added in an order
that depends on timing: same inputs, same signs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import gram


@dataclass(frozen=True)
class Shape:
    """How the work is cut. `rows` at a time: 32, or 16 where there are no more."""

    rows: int = 32
    gram_columns: int = 64
    gram_warps: int = 4
    gram_programs: int = 2048  # enough to fill a GPU several times
    columns: int = 256
    warps: int = 8
    programs: int = 128  # a power of two: as many as run at the same time on a large GPU
    ahead: bool = True
    one_launch: bool = True  # programs wait for each other; else every block is a launch of its own


MOST_BLOCKS = 512  # whose matrices are held at once
# Rows that cancel leave zero in the plain loop and a few last bits here, which must not decide.
ROUNDING = tl.constexpr(2.0**-46)
COUNTS = ["group", "count", "first", "blocks", "begin", "end", "tiles"]  # no kernel of their own for special values


def balance(rows: Tensor, running: Tensor, limits: Tensor, shape: Shape | None = None) -> Tensor:
    """See `cdgrab.balance.balance`."""
    positions, workers, _ = rows.shape
    signs = torch.empty(positions, workers, dtype=torch.int8, device=rows.device)
    if not rows.numel():
        return signs.fill_(1)
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    if len(running) == 1:  # one sum for all workers: their rows follow each other
        _balance(rows, running, limits.reshape(1, -1), signs.view(1, -1), workers, shape)
        return signs
    by_worker = torch.empty(workers, positions, dtype=torch.int8, device=rows.device)
    _balance(rows, running, limits.T.contiguous(), by_worker, 1, shape)
    return by_worker.T


balance_centred = partial(gram.balance_centred, by=balance)
balance_kh = partial(gram.balance_kh, by=balance)


def _balance(rows: Tensor, running: Tensor, limits: Tensor, signs: Tensor, group: int, shape: Shape | None) -> None:
    """limits, signs [sums, rows]. Row i of sum w is rows[i // group, i % group + w]."""
    sums, count = signs.shape
    dim = rows.shape[2]
    shape = shape or _shape_for(rows, sums, count)
    blocks = triton.cdiv(count, shape.rows)
    tiles, programs = _cut(dim, shape.columns, shape.programs)
    where = (rows, rows.stride(0), rows.stride(1), group, count, dim)
    sizes = {"ROWS": shape.rows, "COLUMNS": shape.columns, "PROGRAMS": triton.next_power_of_2(programs)}
    sizes["AHEAD"] = shape.ahead
    products = torch.empty(sums, programs, shape.rows, dtype=torch.float64, device=rows.device)
    for first in range(0, blocks, MOST_BLOCKS):
        some = min(MOST_BLOCKS, blocks - first)
        matrices = _gram(where, first, some, sums, shape)
        progress = torch.zeros(sums, 2, dtype=torch.int32, device=rows.device)
        together = shape.one_launch or programs == 1
        launches = [(0, some + 1)] if together else [(step, step + 1) for step in range(some + 1)]
        for begin, end in launches:
            _walk_kernel[(programs, sums)](
                *where, running, limits, signs, matrices, products, progress, first, some, begin, end, tiles, **sizes,
                num_warps=shape.warps, launch_cooperative_grid=together and programs > 1,
            )  # fmt: skip


def _gram(where: tuple, first: int, blocks: int, sums: int, shape: Shape) -> Tensor:
    """[sums, blocks, rows, rows]"""
    rows, dim = where[0], where[-1]
    splits_wanted = max(1, shape.gram_programs // (blocks * sums))
    tiles, splits = _cut(dim, shape.gram_columns, splits_wanted)
    parts = torch.empty(sums, blocks, splits, shape.rows, shape.rows, dtype=torch.float64, device=rows.device)
    sizes = {"ROWS": shape.rows, "COLUMNS": shape.gram_columns}
    _gram_kernel[(splits, blocks, sums)](*where, parts, first, tiles, **sizes, num_warps=shape.gram_warps)
    return parts[:, :, 0] if splits == 1 else parts.sum(2)


def _cut(dim: int, columns: int, programs: int) -> tuple[int, int]:
    """How many tiles of `columns` a program gets, and how many programs at most `programs` then are needed."""
    tiles = triton.cdiv(triton.cdiv(dim, columns), programs)
    return tiles, triton.cdiv(dim, tiles * columns)


def _shape_for(rows: Tensor, sums: int, count: int) -> Shape:
    shape = Shape(rows=16 if count <= 16 else 32)
    if rows.shape[2] <= 32:
        shape = replace(shape, gram_columns=32, columns=32, warps=4)
    if not rows.is_cuda:
        return replace(shape, one_launch=False)  # Triton's interpreter runs one program after the other
    processors = torch.cuda.get_device_properties(rows.device).multi_processor_count
    together = processors // sums
    return replace(shape, programs=min(shape.programs, 1 << max(0, together.bit_length() - 1)))


@triton.jit
def _places(block, ROWS: tl.constexpr, position_stride, worker_stride, group, count):
    """Where the rows of a block begin, relative to those of the first sum, and which of them exist."""
    index = block * ROWS + tl.arange(0, ROWS)
    places = (index // group).to(tl.int64) * position_stride + (index % group).to(tl.int64) * worker_stride
    return places, (index >= 0) & (index < count)


@triton.jit
def _tile(rows, places, exist, column, dim):
    inside = exist[:, None] & (column < dim)[None, :]
    return tl.load(rows + places[:, None] + column[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=COUNTS)
def _gram_kernel(
    rows, position_stride, worker_stride, group, count, dim,
    parts, first, tiles,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Inner products of a block's rows with each other, over some of the coordinates."""
    split, block, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    places, exist = _places(first + block, ROWS, position_stride, worker_stride, group, count)
    mine = rows + which.to(tl.int64) * worker_stride
    total = tl.zeros((ROWS, ROWS), tl.float64)
    start = split * tiles * COLUMNS
    for tile in range(tiles):
        some = _tile(mine, places, exist, start + tile * COLUMNS + tl.arange(0, COLUMNS), dim).to(tl.float64)
        total = tl.dot(some, tl.trans(some), total, out_dtype=tl.float64)
    index = tl.arange(0, ROWS)
    part = ((which * tl.num_programs(1) + block) * tl.num_programs(0) + split).to(tl.int64)
    tl.store(parts + part * ROWS * ROWS + index[:, None] * ROWS + index[None, :], total)


@triton.jit(do_not_specialize=COUNTS)
def _walk_kernel(
    rows, position_stride, worker_stride, group, count, dim,
    running, limits, signs, gram, products, progress, first, blocks, begin, end, tiles,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Steps `begin` to `end` of the walk through `blocks` blocks of rows, `first` being the first of them.

    Step k adds the signed rows of block k − 1 to the running sum and decides block k. progress [sums, 2] counts the
    programs that have come through a step, and the blocks that are decided.
    """
    program, which, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    mine, my_running = rows + which.to(tl.int64) * worker_stride, running + which.to(tl.int64) * dim
    my_limits, my_signs = limits + which.to(tl.int64) * count, signs + which.to(tl.int64) * count
    arrived, decided = progress + 2 * which, progress + 2 * which + 1
    my_products = products + which * programs * ROWS
    my_gram = gram + which.to(tl.int64) * blocks * ROWS * ROWS
    lane = tl.arange(0, ROWS)
    for step in range(begin, end):
        old_places, old_exist = _places(first + step - 1, ROWS, position_stride, worker_stride, group, count)
        old_exist = old_exist & (step > 0)
        places, exist = _places(first + step, ROWS, position_stride, worker_stride, group, count)
        exist = exist & (step < blocks)
        column = program * tiles * COLUMNS + tl.arange(0, COLUMNS)
        if AHEAD:
            ahead = _tile(mine, places, exist, column, dim)
        if PROGRAMS > 1 and step > begin:
            while tl.atomic_add(decided, 0, sem="acquire") < step:
                pass
        before = my_signs + (first + step - 1) * ROWS + lane
        old_signs = tl.load(before, mask=old_exist, other=0, cache_modifier=".cg").to(tl.float64)
        inner = tl.zeros((ROWS,), tl.float64)
        for tile in range(tiles):
            old = _tile(mine, old_places, old_exist, column, dim)
            if AHEAD:
                new = ahead
                ahead = _tile(mine, places, exist & (tile + 1 < tiles), column + COLUMNS, dim)
            else:
                new = _tile(mine, places, exist, column, dim)
            r = tl.load(my_running + column, mask=column < dim, other=0.0)
            r += tl.sum(old.to(tl.float64) * old_signs[:, None], axis=0)
            tl.store(my_running + column, r, mask=column < dim)
            inner += tl.sum(new.to(tl.float64) * r[None, :], axis=1)
            column += COLUMNS
        if step < blocks:
            tl.store(my_products + program * ROWS + lane, inner)
            tl.debug_barrier()  # all of this program's stores come before its arrival
            arrivals = (step + 1) * programs - 1
            if PROGRAMS > 1:
                arrivals = tl.atomic_add(arrived, 1, sem="acq_rel")
            if arrivals == (step + 1) * programs - 1:
                every = tl.arange(0, PROGRAMS)
                there, some = my_products + every[:, None] * ROWS + lane[None, :], (every < programs)[:, None]
                inner = tl.sum(tl.load(there, mask=some, other=0.0, cache_modifier=".cg"), axis=0)
                index = (first + step) * ROWS + lane
                excess = inner - tl.load(my_limits + index, mask=exist, other=0.0)
                found = _decide(excess, ROUNDING * tl.abs(inner), my_gram + step * ROWS * ROWS, ROWS)
                tl.store(my_signs + index, found.to(tl.int8), mask=exist)
                tl.debug_barrier()
                if PROGRAMS > 1:
                    tl.atomic_xchg(decided, step + 1, sem="release")


@triton.jit
def _decide(excess, rounding, gram, ROWS: tl.constexpr):
    """Signs of a block: a row goes + whose inner product, less its limit, is at or below zero at its turn."""
    lane = tl.arange(0, ROWS)
    signs = tl.zeros_like(excess)
    excess -= rounding
    for j in tl.static_range(ROWS):
        row = tl.load(gram + j * ROWS + lane)
        after_plus, after_minus = row - ROUNDING * tl.abs(row), -row - ROUNDING * tl.abs(row)
        # one lane's number for all lanes: a shuffle inside a warp, while a sum would take several
        plus = tl.gather(excess, tl.full((ROWS,), j, tl.int32), 0) <= 0.0
        excess += tl.where(plus, after_plus, after_minus)
        signs = tl.where(lane == j, tl.where(plus, 1.0, -1.0), signs)
    return signs
