"""Gradients of several processes in shared memory: their mean, and what balancing keeps of them, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numba import carray, njit, types
from numba.extending import intrinsic
from torch import Tensor

from cdgrab.balance.kernels.cpu import can_keep_code

CHUNK = 2**11  # coordinates; this many of some rows fit into the fastest cache
NOTHING, FIRST, SECOND = 0, 1, 2
ALL = -1  # rows
TYPES = {torch.float32: np.float32, torch.float64: np.float64}

_plain = njit(cache=can_keep_code(), nogil=True)  # sums must have the bits of `cdgrab.runtime.mean`


@intrinsic
def _pointer(typing, address, like):
    """To numbers of the type of those in `like`."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(address, like), generate


@_plain
def _some(rows, row, start, end, like):
    """Some numbers of a row; rows: their addresses. A tuple of arrays would be a type of its own for every number of
    rows, and numba would compile everything anew for each."""
    return carray(_pointer(rows[row], like), end)[start:]


@_plain
def _add(one, other, out):
    """This and the next are functions of their own for speed: in a loop over rows, numba would look up each number."""
    for i in range(out.size):
        out[i] = one[i] + other[i]


@_plain
def _write(mean, row):
    for i in range(row.size):
        row[i] = mean[i]


@_plain
def _sum(rows, sums, start, end):
    """As `cdgrab.runtime.mean.tree_sum`, of two rows or more, into the first row of sums; rows: see `_some`."""
    branches = len(rows) & -len(rows)
    leaves = len(rows) // branches
    pairs = branches // 2 if leaves == 1 else branches
    step = len(rows) // pairs
    for i in range(pairs):
        out = sums[i, : end - start]
        _add(_some(rows, i * step, start, end, sums), _some(rows, i * step + 1, start, end, sums), out)
        for leaf in range(2, leaves):
            _add(out, _some(rows, i * step + leaf, start, end, sums), out)
    while pairs > 1:
        pairs //= 2
        for i in range(pairs):
            _add(sums[2 * i, : end - start], sums[2 * i + 1, : end - start], sums[i, : end - start])


@_plain
def _divide(mean, count):
    """Returns whether all are finite."""
    wrong = 0
    for i in range(mean.size):
        mean[i] /= count
    for i in range(mean.size):
        wrong += not np.isfinite(mean[i])
    return wrong == 0


@_plain
def _take(row, kept, how, finite):
    for i in range(row.size if how == FIRST else 0):
        kept[i] = row[i]
    for i in range(row.size if how == SECOND else 0):
        kept[i] -= row[i] if finite or np.isfinite(row[i]) else 0
    for i in range(row.size if how == FIRST and not finite else 0):
        kept[i] = kept[i] if np.isfinite(kept[i]) else 0


@_plain
def _average_and_take(rows, parts, count, kept, how, only):
    sums, every = np.empty((len(rows), CHUNK), kept.dtype), True
    for part in range(len(parts)):
        first, width, place = parts[part]
        for done in range(0, width, CHUNK):
            size, start, there = min(CHUNK, width - done), first + done, place + done
            _sum(rows, sums, start, start + size)
            finite = _divide(sums[0, :size], count)
            for i in range(len(rows)):
                row = _some(rows, i, start, start + size, kept)
                if how != NOTHING:
                    _take(row, kept[i, there : there + size], how, finite)
                if only in (i, ALL):
                    _write(sums[0, :size], row)
            every &= finite
    return every


def average_and_take(
    rows: Sequence[Tensor], parts: Sequence[tuple[int, int, int]], kept: Tensor | None = None, subtract: bool = False
) -> bool:
    """The mean of rows [dim], by `cdgrab.runtime.mean.mean_of_rows`, takes the place of every one of them. Before that
    they are written to kept [rows, width], or subtracted from it, zeros instead of numbers that are not finite. parts:
    of which coordinates, where they start, how many there are, and where they are kept. Returns whether all were
    finite."""
    return averaging(rows, parts)(kept, subtract)


def averaging(
    rows: Sequence[Tensor], parts: Sequence[tuple[int, int, int]], only: int | None = None
) -> Callable[[Tensor | None, bool], bool]:
    """The same as a function of kept and subtract, for rows that stay where they are as long as it is used. only: the
    row whose place the mean takes, if it does not take that of all."""
    # `average` holds on to `every`, so that the rows stay as long as their addresses are used
    every, table = list(rows), np.array(parts, int).reshape(-1, 3)
    dim, dtype, of_type = len(every[0]), every[0].dtype, TYPES[every[0].dtype]
    if not all([row.shape == (dim,) and row.dtype == dtype and row.is_cpu and row.is_contiguous() for row in every]):
        raise ValueError(f"rows must be vectors of {dim} numbers of one type, without gaps")
    if (table < 0).any() or (table[:, 0] + table[:, 1] > dim).any():
        raise ValueError("parts are outside of rows")
    addresses, count = np.array([row.data_ptr() for row in every], np.uintp), of_type(len(every))
    into_rows = ALL if only is None else only
    needed, nowhere = (table[:, 1] + table[:, 2]).max(initial=0), np.empty((len(every), 0), of_type)

    def average(kept: Tensor | None, subtract: bool) -> bool:
        into, how = nowhere, NOTHING
        if kept is not None:
            into, how = kept.numpy(), SECOND if subtract else FIRST
            if len(kept) != len(every) or kept.shape[1] < needed or kept.dtype != dtype:
                raise ValueError("parts are outside of what is kept, or these are numbers of another type")
        return _average_and_take(addresses, table, count, into, how, into_rows)

    return average


def takes(rows: Sequence[Tensor]) -> bool:
    """Whether there is a compiled loop for their type."""
    return rows[0].dtype in TYPES
