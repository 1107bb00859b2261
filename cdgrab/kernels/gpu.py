"""The loop of `balance.py` on a GPU, as two Triton kernels. Rows may be float32; all arithmetic is float64.

Rows are decided in blocks of 32 (D), as many as a warp has lanes. With G = D·Dᵀ and c = D·r, row j's inner product with
the running sum r at its turn is c_j + Σ_{i<j} s_i G_ij, and then r += Σ s_j D_j. The matrices G depend on no sign: one
launch computes those of many blocks. A second one walks through the blocks, each program with coordinates of its own:
it adds the signed rows of the last block to its part of r, multiplies that with the rows of the next, and waits for the
others; then each of them adds up all their products and decides the block's signs for itself. Nothing is added in an
order that depends on timing: same inputs, same signs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import gram


@dataclass(frozen=True)
class Shape:
    """How the work is cut. `rows` at a time, a power of two and at most 32; `columns` coordinates."""

    rows: int = 16
    gram_columns: int = 64
    gram_warps: int = 4
    gram_programs: int = 2048  # enough to fill a GPU several times
    columns: int = 256
    vector: int = 1  # neighbouring coordinates that a thread loads at once; rows must begin at multiples of it
    warps: int = 4
    stages: int = 3  # tiles that are on their way from memory at the same time
    programs: int = 264
    one_launch: bool = True  # programs wait for each other; else every block is a launch of its own


MOST_BLOCKS = 512  # whose matrices are held at once
# Rows that cancel leave zero in the plain loop and a few last bits here, which must not decide.
ROUNDING = tl.constexpr(2.0**-46)
COUNTS = ["position_stride", "worker_stride", "group", "count", "vectors"]  # no kernels for special values
COUNTS += ["first", "blocks", "begin", "end", "tiles", "parts"]


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
    together = shape.one_launch or programs == 1
    parts = programs if together else 1
    strides = rows.stride(0) // shape.vector, rows.stride(1) // shape.vector
    where = (rows, *strides, group, count, dim // shape.vector)
    sizes = {"ROWS": shape.rows, "COLUMNS": shape.columns, "VECTOR": shape.vector, "STAGES": shape.stages}
    sizes |= {"PARTS": triton.next_power_of_2(parts), "WAIT": together and programs > 1}
    sizes |= {"STAY": together and tiles == 1}
    new = partial(torch.empty, dtype=torch.float64, device=rows.device)
    products, totals = new(2, sums, programs, shape.rows), new(2, sums, 1, shape.rows)
    for first in range(0, blocks, MOST_BLOCKS):
        some = min(MOST_BLOCKS, blocks - first)
        matrices = _gram(where, first, some, sums, shape)
        arrived = torch.zeros(sums, dtype=torch.int32, device=rows.device)
        for begin, end in [(0, some + 1)] if together else [(step, step + 1) for step in range(some + 1)]:
            _walk_kernel[(programs, sums)](
                *where, running, limits, signs, matrices, products, products if together else totals, arrived,
                first, some, begin, end, tiles, parts, **sizes, num_warps=shape.warps,
                launch_cooperative_grid=sizes["WAIT"],
            )  # fmt: skip
            if not together:
                torch.sum(products[begin % 2], 1, keepdim=True, out=totals[begin % 2])


def _gram(where: tuple, first: int, blocks: int, sums: int, shape: Shape) -> Tensor:
    """[sums, blocks, rows, rows]"""
    rows, dim = where[0], where[-1] * shape.vector
    splits_wanted = max(1, shape.gram_programs // (blocks * sums))
    tiles, splits = _cut(dim, shape.gram_columns, splits_wanted)
    parts = torch.empty(sums, blocks, splits, shape.rows, shape.rows, dtype=torch.float64, device=rows.device)
    sizes = {"ROWS": shape.rows, "COLUMNS": shape.gram_columns, "VECTOR": shape.vector}
    _gram_kernel[(splits, blocks, sums)](*where, parts, first, tiles, **sizes, num_warps=shape.gram_warps)
    return parts[:, :, 0] if splits == 1 else parts.sum(2)


def _cut(dim: int, columns: int, programs: int) -> tuple[int, int]:
    """How many tiles of `columns` a program gets, and how many programs at most `programs` then are needed."""
    tiles = triton.cdiv(triton.cdiv(dim, columns), programs)
    return tiles, triton.cdiv(dim, tiles * columns)


def _shape_for(rows: Tensor, sums: int, count: int) -> Shape:
    dim, vector = rows.shape[2], _vector(rows)
    processors = torch.cuda.get_device_properties(rows.device).multi_processor_count if rows.is_cuda else 1
    if dim <= 32:
        shape = Shape(rows=32, gram_columns=32, columns=32, vector=1, warps=4, programs=1)
    elif dim <= 512 * (processors // sums):  # each program keeps its coordinates of a block in registers
        vector = min(vector, 2)
        shape = Shape(rows=32, columns=512, vector=vector, warps=16 // vector, programs=processors // sums)
    else:
        shape = Shape(columns=64 * vector, vector=vector, warps=2, programs=3 * processors, one_launch=False)
    shape = replace(shape, rows=16 if count <= 16 else shape.rows)
    return shape if rows.is_cuda else replace(shape, one_launch=False)  # one program after the other


def _vector(rows: Tensor) -> int:
    """How many coordinates, up to 16 bytes of them, can be loaded at once wherever rows begin and end."""
    places = (*rows.stride()[:2], rows.shape[2], rows.data_ptr() // rows.element_size())
    return math.gcd(16 // rows.element_size(), *places)


@triton.jit
def _places(block, ROWS: tl.constexpr, VECTOR: tl.constexpr, position_stride, worker_stride, group, count):
    """Where the rows of a block begin, relative to those of the first sum, and which of them exist."""
    index = block * ROWS + tl.arange(0, ROWS)
    places = (index // group).to(tl.int64) * position_stride + (index % group).to(tl.int64) * worker_stride
    return places * VECTOR, (index >= 0) & (index < count)


@triton.jit
def _tile(rows, places, exist, column, dim):
    inside = exist[:, None] & (column < dim)[None, :]
    return tl.load(rows + places[:, None] + column[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=COUNTS)
def _gram_kernel(
    rows, position_stride, worker_stride, group, count, vectors,
    parts, first, tiles,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Inner products of a block's rows with each other, over some of the coordinates."""
    split, block, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    places, exist = _places(first + block, ROWS, VECTOR, position_stride, worker_stride, group, count)
    mine = rows + which.to(tl.int64) * worker_stride * VECTOR
    total = tl.zeros((ROWS, ROWS), tl.float64)
    start = split * tiles * COLUMNS
    for tile in range(tiles):
        column = start + tile * COLUMNS + tl.arange(0, COLUMNS)
        some = _tile(mine, places, exist, column, vectors * VECTOR).to(tl.float64)
        total = tl.dot(some, tl.trans(some), total, out_dtype=tl.float64)
    index = tl.arange(0, ROWS)
    part = ((which * tl.num_programs(1) + block) * tl.num_programs(0) + split).to(tl.int64)
    tl.store(parts + part * ROWS * ROWS + index[:, None] * ROWS + index[None, :], total)


@triton.jit(do_not_specialize=COUNTS)
def _walk_kernel(
    rows, position_stride, worker_stride, group, count, vectors,
    running, limits, signs, gram, products, totals, arrived, first, blocks, begin, end, tiles, parts,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr, STAY: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Steps `begin` to `end` of the walk through `blocks` blocks of rows, `first` being the first of them.

    Step k decides block k − 1, adds its signed rows to the running sum, and multiplies that with the rows of block k:
    products [2, sums, programs, ROWS], those of odd blocks apart from those of even ones. They are read from totals
    [2, sums, parts, ROWS]. arrived [sums] counts the programs that have come through a step. A program that has but one
    tile keeps it (STAY).
    """
    program, which, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    sums, dim = tl.num_programs(1), vectors * VECTOR
    mine, my_running = rows + which.to(tl.int64) * worker_stride * VECTOR, running + which.to(tl.int64) * dim
    my_limits, my_signs = limits + which.to(tl.int64) * count, signs + which.to(tl.int64) * count
    my_gram = gram + which.to(tl.int64) * blocks * ROWS * ROWS
    lane = tl.arange(0, ROWS)
    column = program * tiles * COLUMNS + tl.arange(0, COLUMNS)
    new_places, new_exist = _places(first + begin - 1, ROWS, VECTOR, position_stride, worker_stride, group, count)
    new_exist = new_exist & (begin > 0)
    if STAY:
        r = tl.load(my_running + column, mask=column < dim, other=0.0)
        new = tl.zeros((ROWS, COLUMNS), rows.dtype.element_ty)
    for step in range(begin, end):
        old_places, old_exist = new_places, new_exist
        new_places, new_exist = _places(first + step, ROWS, VECTOR, position_stride, worker_stride, group, count)
        new_exist = new_exist & (step < blocks)
        if STAY:
            old = new
            new = _tile(mine, new_places, new_exist, column, dim)  # on its way while others are waited for
        if WAIT and step > begin:
            while tl.atomic_add(arrived + which, 0, sem="acquire") < step * programs:
                pass
        found = tl.zeros((ROWS,), tl.float32)
        if step > 0:
            there = totals + ((step - 1) % 2 * sums + which) * parts * ROWS + lane
            if PARTS == 1:
                inner = tl.load(there, cache_modifier=".cg")
            else:
                every = tl.arange(0, PARTS)[:, None]
                part = tl.load(there[None, :] + every * ROWS, mask=every < parts, other=0.0, cache_modifier=".cg")
                inner = tl.sum(part, axis=0)
            index = (first + step - 1) * ROWS + lane
            excess = inner - tl.load(my_limits + index, mask=old_exist, other=0.0)
            found = _decide(excess, ROUNDING * tl.abs(inner), my_gram + (step - 1) * ROWS * ROWS, ROWS)
            if program == 0:
                tl.store(my_signs + index, found.to(tl.int8), mask=old_exist)
        old_signs = found.to(rows.dtype.element_ty)[:, None]
        if STAY:
            r += tl.sum((old * old_signs).to(tl.float64), axis=0)
            inner = _by_thread(new, r, VECTOR)
        else:
            inner = tl.zeros((ROWS, COLUMNS // VECTOR), tl.float64)
            for tile in tl.range(tiles, num_stages=STAGES):
                here = column + tile * COLUMNS
                old = _tile(mine, old_places, old_exist, here, dim)
                new = _tile(mine, new_places, new_exist, here, dim)
                r = tl.load(my_running + here, mask=here < dim, other=0.0)
                r += tl.sum((old * old_signs).to(tl.float64), axis=0)
                tl.store(my_running + here, r, mask=here < dim)
                inner += _by_thread(new, r, VECTOR)
        tl.store(products + ((step % 2 * sums + which) * programs + program) * ROWS + lane, tl.sum(inner, axis=1))
        tl.debug_barrier()  # all of this program's stores come before its arrival
        if WAIT:
            tl.atomic_add(arrived + which, 1, sem="release")
    if STAY:
        tl.store(my_running + column, r, mask=column < dim)


@triton.jit
def _by_thread(rows, r, VECTOR: tl.constexpr):
    """Inner products over the few coordinates that one thread holds: sums across threads take longer, and come last."""
    products = rows.to(tl.float64) * r[None, :]
    return tl.sum(tl.reshape(products, (rows.shape[0], rows.shape[1] // VECTOR, VECTOR)), axis=2)


@triton.jit
def _decide(excess, rounding, gram, ROWS: tl.constexpr):
    """Signs of a block: a row goes + whose inner product, less its limit, is at or below zero at its turn."""
    lane = tl.arange(0, ROWS)
    signs = tl.zeros((ROWS,), tl.float32)
    excess -= rounding
    for j in tl.static_range(ROWS):
        row = tl.load(gram + j * ROWS + lane)
        after_plus, after_minus = row - ROUNDING * tl.abs(row), -row - ROUNDING * tl.abs(row)
        # one lane's number for all lanes: a shuffle inside a warp, while a sum would take several
        plus = tl.gather(excess, tl.full((ROWS,), j, tl.int32), 0) <= 0.0
        excess += tl.where(plus, after_plus, after_minus)
        signs = tl.where(lane == j, tl.where(plus, 1.0, -1.0), signs)
    return signs
