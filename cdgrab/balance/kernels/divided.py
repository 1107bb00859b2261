"""Balancing on a CPU where each process holds some coordinates of all rows: inner products, their total, then signs.

Does what `gram` does, with numba: float32 rows are multiplied in float64 without a copy and without leaving the cache.
Signs are those of one process, to the last one. Running sums have the same bits in both, inner products do not: each
way rounds differently. So a sign is taken from the products only if no rounding could change it. The others, which are
few, are settled by what one process would do, with whole rows. (Only numbers so small that their squares vanish, below
1e-154, could deceive it.)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from cdgrab.balance.kernels.bounds import check_sizes
from cdgrab.balance.kernels.cpu import add_four, fast, inner_product

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
def _multiply_four(w0, w1, w2, w3, products):
    """Four rows with each other."""
    p00 = p01 = p02 = p03 = p11 = p12 = p13 = p22 = p23 = p33 = 0.0
    for i in range(w0.size):
        x0, x1, x2, x3 = np.float64(w0[i]), np.float64(w1[i]), np.float64(w2[i]), np.float64(w3[i])
        p00 += x0 * x0
        p01 += x0 * x1
        p02 += x0 * x2
        p03 += x0 * x3
        p11 += x1 * x1
        p12 += x1 * x2
        p13 += x1 * x3
        p22 += x2 * x2
        p23 += x2 * x3
        p33 += x3 * x3
    for j, line in enumerate(((p00, p01, p02, p03), (0.0, p11, p12, p13), (0.0, 0.0, p22, p23), (0.0, 0.0, 0.0, p33))):
        if j < len(products):
            for k in range(4):
                products[j, k] += line[k]


@fast
def _four(rows, first, start, end):
    """Some coordinates of four rows; fewer than four are filled up with the last row."""
    last = len(rows) - 1
    w1, w2, w3 = min(first + 1, last), min(first + 2, last), min(first + 3, last)
    return rows[first, start:end], rows[w1, start:end], rows[w2, start:end], rows[w3, start:end]


@fast
def _multiply_all(rows, r, products):
    """Inner products of each row with the later rows; the last line holds those of r with all rows, and with itself at
    the end. products [rows + 1, rows + 1 or up to 3 more]; other entries, as those left of the diagonal, are
    meaningless."""
    for start in range(0, r.size, CHUNK):
        end = min(start + CHUNK, r.size)
        for first in range(0, len(rows), 4):
            w0, w1, w2, w3 = _four(rows, first, start, end)
            for j in range(first):
                _multiply(rows[j, start:end], w0, w1, w2, w3, products[j, first : first + 4])
            _multiply_four(w0, w1, w2, w3, products[first : min(first + 4, len(rows)), first : first + 4])
            _multiply(r[start:end], w0, w1, w2, w3, products[-1, first : first + 4])
        products[-1, -1] += inner_product(r[start:end], r[start:end])


@fast
def _decide(products, limits, errors, signs, first, known):
    """Signs from row `first` on, those before `known` being given, until one is uncertain; the number of that row.

    The last line of `products` holds the inner products with r when the turn of row `first` comes, and is kept up to
    date. errors: how far two ways of computing a row's inner product can be apart.
    """
    inner = products[-1]
    for j in range(first, len(limits)):
        if j >= known:
            excess = inner[j] - limits[j]
            if errors[j] > 0.0 and not abs(excess) > errors[j]:
                return j
            signs[j] = 1.0 if excess <= 0.0 else -1.0
        for i in range(j + 1, len(limits)):
            inner[i] += signs[j] * products[j, i]
    return len(limits)


@fast
def _add(rows, r, signs):
    s = np.zeros(len(rows) + 3)
    for i in range(len(rows)):  # numba takes seconds to compile an assignment of arrays, which may fail
        s[i] = signs[i]
    for start in range(0, r.size, CHUNK):
        end = min(start + CHUNK, r.size)
        for i in range(0, len(rows), 4):
            w0, w1, w2, w3 = _four(rows, i, start, end)
            add_four(r[start:end], w0, w1, w2, w3, s[i], s[i + 1], s[i + 2], s[i + 3])


def _together(row: int, workers: int) -> range:
    """The rows that one process decides together with this one: up to four, of one position."""
    first = row - row % workers % 4
    return range(first, min(first + 4, row - row % workers + workers))


def _terms(products: np.ndarray) -> np.ndarray:
    """An upper limit, from lengths, for the sum of the magnitudes in each row's inner product when its turn comes."""
    lengths = np.sqrt(np.diagonal(products)[:-1])
    with np.errstate(all="ignore"):  # a sum of infinity is compared like any other
        return lengths * np.cumsum([math.sqrt(products[-1, -1]), *lengths[:-1]])


def _exact_terms(rows: np.ndarray, r: np.ndarray, total: Callable[[Tensor], Tensor]) -> np.ndarray:
    """Those sums themselves: far less where rows have few coordinates in common."""
    products = _no_products(len(rows))
    for start in range(0, r.size, CHUNK):
        some = slice(start, start + CHUNK)
        _multiply_all(np.abs(rows[:, some]), np.abs(r[some]), products.numpy())
    found = total(products).numpy()[:, : len(rows)]
    return found[-1] + np.triu(found[:-1], 1).sum(0)


def _no_products(rows: int) -> Tensor:
    return torch.zeros(rows + 1, -(-rows // 4) * 4 + 1, dtype=torch.float64)


def balance_divided(
    rows: Tensor,
    running: Tensor,
    limits: Tensor,
    total: Callable[[Tensor], Tensor],
    settle: Callable[[Tensor, Tensor, Tensor], Tensor],
    dim: int,
) -> Tensor:
    """See `kernels.balance_divided`."""
    check_sizes(rows, limits, 1, running)
    workers, signs = rows.shape[1], np.empty(limits.numel())
    every, limits = rows.contiguous().flatten(0, 1), limits.flatten()
    v, r, limit = every.numpy(), running[0].numpy(), limits.numpy()
    rounding = (dim + 2 * ROWS_AT_ONCE) * 2.0**-51  # twice what is possible if every operation is off by 2⁻⁵³
    start = 0
    while start < len(v):
        end = _together(min(start + ROWS_AT_ONCE, len(v)), workers).start
        block, products = slice(start, end), _no_products(end - start)
        _multiply_all(v[block], r, products.numpy())
        found = total(products).numpy()
        errors, exact = rounding * _terms(found), False
        row = added = settled = start
        while (row := start + _decide(found, limit[block], errors, signs[block], row - start, settled - start)) < end:
            if not exact:
                errors, exact = rounding * _exact_terms(v[block], r, total), True
                continue
            group = _together(row, workers)
            _add(v[added : group.start], r, signs[added : group.start])
            added, settled = group.start, group.stop
            # one process fills up its fours with the last row; one or two workers take their turns one by one
            four = [min(i, settled - 1) for i in range(added, added + 4)] if workers > 2 else list(group)
            signs[group] = settle(every[four], running, limits[four])[: len(group)]
        _add(v[added:end], r, signs[added:end])
        start = end
    return torch.from_numpy(signs).to(torch.int8).view(rows.shape[:2])
