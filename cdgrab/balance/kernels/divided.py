"""Balancing on a CPU where each process holds some coordinates of all rows: inner products, their total, then signs.

Does what `gram` does, with numba: float32 rows are multiplied in float64 without a copy and without leaving the cache.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from cdgrab.balance.kernels.bounds import check_sizes
from cdgrab.balance.kernels.cpu import add_four, decide, fast

ROWS_AT_ONCE = 64  # more rows would cost more in products than they save in exchanges
CHUNK = 2**11  # coordinates; this many of five rows fit into the fastest cache


@fast
def _multiply(v, w0, w1, w2, w3, products):
    p0 = p1 = p2 = p3 = 0.0
    for i in range(v.size):
        x = np.float64(v[i])
        p0 += x * w0[i]
        p1 += x * w1[i]
        p2 += x * w2[i]
        p3 += x * w3[i]
    products[0] += p0
    products[1] += p1
    products[2] += p2
    products[3] += p3


@fast
def _four(rows, first, start, end):
    """Some coordinates of four rows; fewer than four are filled up with the last row."""
    last = len(rows) - 1
    w1, w2, w3 = min(first + 1, last), min(first + 2, last), min(first + 3, last)
    return rows[first, start:end], rows[w1, start:end], rows[w2, start:end], rows[w3, start:end]


@fast
def _multiply_all(rows, r, products):
    """Inner products of each row with the later rows; the last line holds those of r with all rows. products [rows + 1,
    rows or up to 3 more]; entries left of the diagonal and in the extra columns are meaningless."""
    for start in range(0, r.size, CHUNK):
        end = min(start + CHUNK, r.size)
        for first in range(0, len(rows), 4):
            w0, w1, w2, w3 = _four(rows, first, start, end)
            for j in range(min(first + 4, len(rows))):
                _multiply(rows[j, start:end], w0, w1, w2, w3, products[j, first : first + 4])
            _multiply(r[start:end], w0, w1, w2, w3, products[-1, first : first + 4])


@fast
def _decide_and_add(rows, r, limits, products, signs):
    s = np.zeros(len(products[-1]))
    decide(products, products[-1], limits, s)
    for j in range(len(rows)):
        signs[j] = np.int8(s[j])
    for start in range(0, r.size, CHUNK):
        end = min(start + CHUNK, r.size)
        for i in range(0, len(rows), 4):
            w0, w1, w2, w3 = _four(rows, i, start, end)
            add_four(r[start:end], w0, w1, w2, w3, s[i], s[i + 1], s[i + 2], s[i + 3])


def balance_divided(rows: Tensor, running: Tensor, limits: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """See `kernels.balance_divided`."""
    check_sizes(rows, limits, 1, running)
    signs = torch.empty(rows.shape[:2], dtype=torch.int8)
    every, its_limits, its_signs = (tensor.contiguous().flatten(0, 1) for tensor in (rows, limits, signs))
    for first in range(0, len(every), ROWS_AT_ONCE):
        some = slice(first, min(first + ROWS_AT_ONCE, len(every)))
        count = some.stop - some.start
        products = torch.zeros(count + 1, -(-count // 4) * 4, dtype=torch.float64)
        arrays = (every[some].numpy(), running[0].numpy())
        _multiply_all(*arrays, products.numpy())
        total(products)
        _decide_and_add(*arrays, its_limits[some].numpy(), products.numpy(), its_signs[some].numpy())
    return signs
