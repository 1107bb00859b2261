"""The loop of `rules.balance` on a GPU, as two Triton kernels. Rows may be float32; all arithmetic is float64.

Rows are decided in blocks (D) of 16, or of 32 if the vectors are short enough to stay in registers. With G = D·Dᵀ and
c = D·r, the inner product of row j with the running sum r, when its turn comes, is c_j + Σ_{i<j} s_i G_ij; then
r += Σ s_j D_j. The matrices G do not depend on signs: one launch computes those of many blocks. A second launch goes
through the blocks. Each program has its own coordinates: it adds the signed rows of the last block to its part of r,
multiplies that with the rows of the next block, and waits for the other programs. Then every program sums the products
of all programs and decides the block's signs for itself. No order of additions depends on timing: same inputs, same
signs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdgrab.balance import rules
from cdgrab.balance.kernels import gram, single
from cdgrab.balance.kernels.bounds import check_sizes
from cdgrab.balance.kernels.launching import cut, launch


@dataclass(frozen=True)
class Shape:
    """How the work is divided into tiles of `rows` rows (16 or 32) and `columns` coordinates."""

    rows: int = 16
    gram_columns: int = 32
    gram_warps: int = 1
    gram_programs: int = 2048  # enough to fill a GPU several times
    columns: int = 256
    vector: int = 1  # neighbouring coordinates that a thread loads at once; rows must start at multiples of it
    warps: int = 4
    stages: int = 3  # tiles being loaded from memory at the same time
    programs: int = 256  # at most; they wait for each other, so all of them must fit on the GPU at once


MOST_BLOCKS = 512  # blocks whose matrices are in memory at once
ROUNDING = tl.constexpr(rules.ROUNDING)
COUNTS = ["position_stride", "worker_stride", "group", "count", "vectors"]  # do not specialise kernels on these values
COUNTS += ["first", "blocks", "begin", "end", "tiles"]


def balance(rows: Tensor, running: Tensor, limits: Tensor, shape: Shape | None = None) -> Tensor:
    """See `cdgrab.balance.rules.balance`."""
    positions, workers, _ = rows.shape
    check_sizes(rows, limits, 1 if len(running) == 1 else workers, running)
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


RowByRow = single.RowByRow
balance_centred = partial(gram.balance_centred, by=balance)
balance_kh = partial(gram.balance_kh, by=balance)


def _balance(rows: Tensor, running: Tensor, limits: Tensor, signs: Tensor, group: int, shape: Shape | None) -> None:
    """limits, signs [sums, rows]. Row i of sum w is rows[i // group, i % group + w]."""
    sums, count = signs.shape
    dim = rows.shape[2]
    shape = shape or _shape_for(rows, sums, count)
    blocks = -(-count // shape.rows)
    tiles, programs = cut(dim, shape.columns, shape.programs)
    together = rows.is_cuda or programs == 1  # the interpreter runs programs one by one, so it needs a launch per step
    strides = rows.stride(0) // shape.vector, rows.stride(1) // shape.vector
    where = (rows, *strides, group, count, dim // shape.vector)
    sizes = {"ROWS": shape.rows, "COLUMNS": shape.columns, "VECTOR": shape.vector, "STAGES": shape.stages}
    sizes |= {"PROGRAMS": 1 << (programs - 1).bit_length(), "STAY": together and tiles == 1}
    sizes |= {"WAIT": together and programs > 1}
    products = torch.empty(2, sums, programs, shape.rows, dtype=torch.float64, device=rows.device)
    for first in range(0, blocks, MOST_BLOCKS):
        some = min(MOST_BLOCKS, blocks - first)
        matrices = _gram(where, first, some, sums, shape)
        lenient = _lenient(limits[:, first * shape.rows :], matrices)
        arrived = torch.zeros(sums, dtype=torch.int32, device=rows.device)
        for begin, end in [(0, some + 1)] if together else [(step, step + 1) for step in range(some + 1)]:
            arguments = (*where, running, lenient, signs, matrices, products, arrived, first, some, begin, end, tiles)
            launch(_decide_kernel, (programs, sums, 1), arguments, sizes, shape.warps, sizes["WAIT"])


def _gram(where: tuple, first: int, blocks: int, sums: int, shape: Shape) -> Tensor:
    """[sums, blocks, rows, rows]"""
    rows, dim = where[0], where[-1] * shape.vector
    splits_wanted = max(1, shape.gram_programs // (blocks * sums))
    tiles, splits = cut(dim, shape.gram_columns, splits_wanted)
    parts = torch.empty(sums, blocks, splits, shape.rows, shape.rows, dtype=torch.float64, device=rows.device)
    sizes = {"ROWS": shape.rows, "COLUMNS": shape.gram_columns, "VECTOR": shape.vector}
    launch(_gram_kernel, (splits, blocks, sums), (*where, parts, first, tiles), sizes, shape.gram_warps, False)
    return parts[:, :, 0] if splits == 1 else parts.sum(2)


def _lenient(limits: Tensor, matrices: Tensor) -> Tensor:
    """Limits of full blocks [sums, rows], raised by the rounding error of a row's product with r, in which rows as long
    as any of its block may have cancelled."""
    lengths = matrices.diagonal(dim1=2, dim2=3).sqrt()
    lenient = (lengths * (lengths.amax(2, keepdim=True) * rules.ROUNDING)).flatten(1)
    lenient[:, : limits.shape[1]] += limits[:, : lenient.shape[1]]
    return lenient


def _shape_for(rows: Tensor, sums: int, count: int) -> Shape:
    dim, vector, many = rows.shape[2], _vector(rows), 32 if count > 16 else 16
    if dim <= 32:
        return Shape(many, columns=32, warps=1, programs=1)
    processors, shared_memory = _machine(rows.device)
    if dim <= 256 * (2 * processors // sums):  # each program keeps its coordinates of a block in registers
        programs = 2 * processors // sums
        return Shape(many, gram_columns=64, gram_warps=2, vector=min(2, vector), programs=programs)
    columns, stages = 2048 // rows.element_size(), max(1, min(3, shared_memory // 2**16))
    return Shape(columns=columns, vector=vector, stages=stages, programs=max(1, processors // sums))


@cache
def _machine(device: torch.device) -> tuple[int, int]:
    """The number of processors (each has registers for two programs), and the shared memory available to a program."""
    if device.type != "cuda":
        return 2, 2**16
    gpu = torch.cuda.get_device_properties(device)
    return gpu.multi_processor_count, gpu.shared_memory_per_block_optin


def _vector(rows: Tensor) -> int:
    """How many coordinates (up to 16 bytes) can be loaded at once, given where rows start and end."""
    places = (*rows.stride()[:2], rows.shape[2], rows.data_ptr() // rows.element_size())
    return math.gcd(16 // rows.element_size(), *places)


@triton.jit
def _places(block, ROWS: tl.constexpr, VECTOR: tl.constexpr, position_stride, worker_stride, group, count):
    """Where the rows of a block start, relative to those of the first sum, and which of them exist."""
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
def _decide_kernel(
    rows, position_stride, worker_stride, group, count, vectors,
    running, limits, signs, gram, products, arrived, first, blocks, begin, end, tiles,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
    PROGRAMS: tl.constexpr, STAY: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Steps `begin` to `end` through `blocks` blocks of rows, the first of which is number `first`.

    Step k decides block k − 1, adds its signed rows to the running sum, and multiplies that with the rows of block k.
    products [2, sums, programs, ROWS]: those of even and of odd blocks. arrived [sums] counts how many times programs
    have finished a step. A program with a single tile keeps it in registers (STAY).
    """
    program, which, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    sums, dim = tl.num_programs(1), vectors * VECTOR
    mine, my_running = rows + which.to(tl.int64) * worker_stride * VECTOR, running + which.to(tl.int64) * dim
    my_limits, my_signs = limits + which.to(tl.int64) * blocks * ROWS, signs + which.to(tl.int64) * count
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
            new = _tile(mine, new_places, new_exist, column, dim)  # prefetched while waiting for the other programs
        if WAIT and step > begin:
            while tl.atomic_add(arrived + which, 0, sem="acquire") < step * programs:
                pass
        found = tl.zeros((ROWS,), tl.float32)
        if step > 0:
            index = (first + step - 1) * ROWS + lane
            limit = tl.load(my_limits + (step - 1) * ROWS + lane)
            here = my_gram + (step - 1) * ROWS * ROWS
            matrix = tl.load(here + lane[:, None] * ROWS + lane[None, :])
            every = tl.arange(0, PROGRAMS)[:, None]
            there = products + (((step - 1) % 2 * sums + which) * programs + every) * ROWS + lane[None, :]
            part = tl.load(there, mask=every < programs, other=0.0, cache_modifier=".cg")
            found = _decide(tl.sum(part, axis=0), limit, matrix, here, ROWS)
            if program == 0:
                tl.store(my_signs + index, found.to(tl.int8), mask=old_exist)
        old_signs = found.to(rows.dtype.element_ty)[:, None]
        if STAY:
            r += tl.sum((old * old_signs).to(tl.float64), axis=0)
            inner = _by_thread(new, r, VECTOR)
        else:
            inner = tl.zeros((ROWS, COLUMNS // VECTOR), tl.float64)
            for tile in tl.range(tiles, num_stages=STAGES):
                # alternating directions: what was read last is most likely still in the cache
                here = column + tl.where(step % 2 == 0, tile, tiles - 1 - tile) * COLUMNS
                old = _tile(mine, old_places, old_exist, here, dim)
                new = _tile(mine, new_places, new_exist, here, dim)
                r = tl.load(my_running + here, mask=here < dim, other=0.0)
                r += tl.sum((old * old_signs).to(tl.float64), axis=0)
                tl.store(my_running + here, r, mask=here < dim)
                inner += _by_thread(new, r, VECTOR)
        tl.store(products + ((step % 2 * sums + which) * programs + program) * ROWS + lane, _by_row(inner))
        tl.debug_barrier()  # this program's stores must be complete before it counts as arrived
        if WAIT:
            tl.atomic_add(arrived + which, 1, sem="release")
    if STAY:
        tl.store(my_running + column, r, mask=column < dim)


@triton.jit
def _by_thread(rows, r, VECTOR: tl.constexpr):
    """Inner products over the few coordinates that one thread holds. Sums across threads take longer and come last."""
    products = rows.to(tl.float64) * r[None, :]
    return tl.sum(tl.reshape(products, (rows.shape[0], rows.shape[1] // VECTOR, VECTOR)), axis=2)


@triton.jit
def _by_row(inner):
    """The sum of each of 16 or 32 rows over all threads. The lanes of a warp exchange half of their rows, then half of
    the rest, and so on: a quarter of the messages that summing row by row would take."""
    LANES: tl.constexpr = min(32, inner.shape[1])
    sums = tl.reshape(inner, (inner.shape[0], inner.shape[1] // LANES, LANES))
    if inner.shape[0] == 32:
        sums = _halved(sums)
    sums = _halved(_halved(_halved(_halved(sums))))
    return tl.sum(tl.reshape(sums, (inner.shape[1] // inner.shape[0], inner.shape[0])), axis=0)


@triton.jit
def _halved(rows):
    """Rows [n, warps, lanes] -> [n / 2, warps, lanes]: lanes whose number has the bit n / 2 take the second half."""
    HALF: tl.constexpr = rows.shape[0] // 2
    first, second = tl.split(tl.permute(tl.reshape(rows, (2, HALF, rows.shape[1], rows.shape[2])), (1, 2, 3, 0)))
    lane = tl.arange(0, rows.shape[2])[None, None, :]
    takes_second = (lane & HALF) != 0
    other = tl.broadcast_to(lane ^ HALF, (HALF, rows.shape[1], rows.shape[2]))
    return tl.where(takes_second, second, first) + tl.gather(tl.where(takes_second, first, second), other, 2)


@triton.jit
def _decide(inner, limit, matrix, gram, ROWS: tl.constexpr):
    """Signs of a block. A row gets +1 if its inner product, when its turn comes, does not exceed its limit by more than
    rounding error.

    `gram` points to `matrix`, whose rows are loaded again one by one. By now they are in the nearest cache, so that no
    step of this sequential loop waits for memory.
    """
    lane = tl.arange(0, ROWS)
    sizes = tl.abs(inner) + tl.sum(tl.where(lane[:, None] < lane[None, :], tl.abs(matrix), 0.0), axis=0)
    excess = inner - limit - ROUNDING * sizes
    signs = tl.zeros((ROWS,), tl.float32)
    for j in tl.static_range(ROWS):
        row = tl.load(gram + j * ROWS + lane)
        # broadcasts one lane's number to all lanes: one shuffle inside a warp, where a sum would take several
        plus = tl.gather(excess, tl.full((ROWS,), j, tl.int32), 0) <= 0.0
        excess = tl.where(plus, excess + row, excess - row)  # both are computed before the sign is known
        signs = tl.where(lane == j, tl.where(plus, 1.0, -1.0), signs)
    return signs
