"""The loops of `rules` compiled with numba. Rows may be float32; sums and inner products are float64."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import config, njit, prange, set_num_threads
from torch import Tensor

from cdgrab.balance.kernels.bounds import check_sizes
from cdgrab.balance.rules import ROUNDING, kh_threshold
from cdgrab.checks import shape

LONG = 512  # coordinates; for longer rows, four rows at a time are faster
CHUNK = 2**13  # coordinates that one thread processes at a time


def can_keep_code() -> bool:
    """Whether numba can cache compiled code: in NUMBA_CACHE_DIR, this folder, or the home folder."""
    try:
        njit(cache=True)(lambda: None)
        return True
    except RuntimeError:  # a read-only installation, and a user without a home: then every process compiles for itself
        return False


_keep = can_keep_code()
# Reassociation lets inner products use vector units. It changes their last bits, always in the same way for the same
# memory layout. numba compiles each layout separately, so rows are made contiguous first.
fast = njit(cache=_keep, nogil=True, fastmath={"reassoc", "contract"})


@fast
def inner_product(r, v):
    total = 0.0
    for i in range(r.size):
        total += r[i] * v[i]
    return total


@fast
def _step(r, v, limit):
    """Decide one sign and add the signed vector to the running sum."""
    if inner_product(r, v) <= limit:
        for i in range(r.size):
            r[i] += v[i]
        return 1
    for i in range(r.size):
        r[i] -= v[i]
    return -1


_kh_threshold = fast(kh_threshold)


@fast
def _balance(rows, running, limits, signs):
    shared = running.shape[0] == 1
    for k in range(rows.shape[0]):
        for w in range(rows.shape[1]):
            signs[k, w] = _step(running[0 if shared else w], rows[k, w], limits[k, w])


# -- one running sum, long rows: four rows at a time, which halves the passes over memory ------------------------------


@fast
def add_four(r, v0, v1, v2, v3, s0, s1, s2, s3):
    """One after the other, as in the plain loop, so that rows that cancel leave exactly zero."""
    for i in range(r.size):
        r[i] = (((r[i] + s0 * v0[i]) + s1 * v1[i]) + s2 * v2[i]) + s3 * v3[i]


@fast
def _add_and_multiply(r, v0, v1, v2, v3, s0, s1, s2, s3, w0, w1, w2, w3):
    """Add four signed rows v to r; return the inner products of r with four rows w, and of those with each other."""
    r0 = r1 = r2 = r3 = g01 = g02 = g03 = g12 = g13 = g23 = 0.0
    for i in range(r.size):
        x = (((r[i] + s0 * v0[i]) + s1 * v1[i]) + s2 * v2[i]) + s3 * v3[i]
        r[i] = x
        a, b, c, d = np.float64(w0[i]), np.float64(w1[i]), np.float64(w2[i]), np.float64(w3[i])
        r0 += x * a
        r1 += x * b
        r2 += x * c
        r3 += x * d
        g01 += a * b
        g02 += a * c
        g03 += a * d
        g12 += b * c
        g13 += b * d
        g23 += c * d
    return r0, r1, r2, r3, g01, g02, g03, g12, g13, g23


@fast
def _pass_over_chunk(r, old, old_signs, new, start, end, products):
    """Add four signed rows to r and compute the products of the next four. In the last call (no products) only add."""
    part = r[start:end]
    v0, v1, v2, v3 = old[0][start:end], old[1][start:end], old[2][start:end], old[3][start:end]
    s0, s1, s2, s3 = old_signs[0], old_signs[1], old_signs[2], old_signs[3]
    if len(products):
        w0, w1, w2, w3 = new[0][start:end], new[1][start:end], new[2][start:end], new[3][start:end]
        values = _add_and_multiply(part, v0, v1, v2, v3, s0, s1, s2, s3, w0, w1, w2, w3)
        for i in range(10):
            products[i] = values[i]
    else:
        add_four(part, v0, v1, v2, v3, s0, s1, s2, s3)


@fast
def _pass(r, old, old_signs, new, products):
    for chunk in range(len(products)):
        end = min((chunk + 1) * CHUNK, r.size)
        _pass_over_chunk(r, old, old_signs, new, chunk * CHUNK, end, products[chunk])


@njit(cache=_keep, nogil=True, parallel=True)
def _pass_by_threads(r, old, old_signs, new, products):
    for chunk in prange(len(products)):
        end = min((chunk + 1) * CHUNK, r.size)
        _pass_over_chunk(r, old, old_signs, new, chunk * CHUNK, end, products[chunk])


@fast
def _decide_four(products, limits, signs):
    """Sum over chunks in a fixed order, then decide the signs: each depends on the earlier ones of the four."""
    p = np.zeros(10)
    for chunk in range(len(products)):
        for i in range(10):
            p[i] += products[chunk, i]
    signs[0] = 1.0 if p[0] <= limits[0] else -1.0
    signs[1] = 1.0 if p[1] + signs[0] * p[4] <= limits[1] else -1.0
    signs[2] = 1.0 if p[2] + signs[0] * p[5] + signs[1] * p[7] <= limits[2] else -1.0
    signs[3] = 1.0 if p[3] + signs[0] * p[6] + signs[1] * p[8] + signs[2] * p[9] <= limits[3] else -1.0


@fast
def _one_pass(r, old, old_signs, new, products, threads):
    """threads: None or True. With a None numba compiles only the branch that is taken."""
    if threads is None:
        _pass(r, old, old_signs, new, products)
    else:
        _pass_by_threads(r, old, old_signs, new, products)


@fast
def _balance_by_fours(rows, r, limits, signs, threads):
    """Groups of four never span two positions, so that rounding does not depend on how an epoch is split into calls."""
    positions, workers = rows.shape[:2]
    products = np.empty(((r.size + CHUNK - 1) // CHUNK, 10))
    old_signs, new_signs, new_limits = np.zeros(4), np.zeros(4), np.zeros(4)
    old = (rows[0, 0], rows[0, 0], rows[0, 0], rows[0, 0])  # nothing to add yet: signs of zero
    for k in range(positions):
        for w in range(0, workers, 4):
            last = workers - 1  # a group of fewer than four is filled up with its last row, which has no effect
            w1, w2, w3 = min(w + 1, last), min(w + 2, last), min(w + 3, last)
            new = (rows[k, w], rows[k, w1], rows[k, w2], rows[k, w3])
            _one_pass(r, old, old_signs, new, products, threads)
            for i in range(4):
                new_limits[i] = limits[k, min(w + i, last)]
            _decide_four(products, new_limits, new_signs)
            for i in range(4):
                old_signs[i] = new_signs[i] if w + i <= last else 0.0
                if w + i <= last:
                    signs[k, w + i] = np.int8(new_signs[i])
            old = new
    # not a part of `products`, for which numba would compile everything once more
    _one_pass(r, old, old_signs, old, np.empty((len(products), 0)), threads)


@fast
def _balance_centred(gradients, running, stale_mean, fresh_sum, limits, signs):
    v = np.empty(running.shape[1])
    for k in range(gradients.shape[0]):
        for w in range(gradients.shape[1]):
            g, r, stale, fresh, inner = gradients[k, w], running[w], stale_mean[w], fresh_sum[w], 0.0
            for i in range(v.size):
                v[i] = g[i] - stale[i]
                fresh[i] += g[i]
                inner += r[i] * v[i]
            sign = 1 if inner <= limits[k, w] else -1
            for i in range(v.size):
                r[i] += sign * v[i]
            signs[k, w] = sign


@fast
def _balance_kh(rows, running, q, penalties, uniforms, signs):
    for k in range(rows.shape[0]):
        for w in range(rows.shape[1]):
            v = rows[k, w]
            squared_norm = 0.0
            for i in range(v.size):
                squared_norm += np.float64(v[i]) * v[i]
            threshold, q[w] = _kh_threshold(q[w], squared_norm, penalties[k])
            signs[k, w] = _step(running[w], v, uniforms[k, w] * threshold)


@fast
def _decide(gram, inner, limits, signs):
    """Signs of rows from their products with each other (`gram`, read on and right of the diagonal) and with r
    (`inner`, overwritten).

    A row gets +1 if its inner product, when its turn comes, does not exceed its limit by more than rounding error: that
    of the terms of the inner product, and that of r, in which rows as long as any of these may have cancelled.
    """
    count = len(limits)
    sizes, longest = np.abs(inner), 0.0
    for j in range(count):
        longest = max(longest, gram[j, j])
    for j in range(count):
        excess = inner[j] - limits[j] - ROUNDING * (sizes[j] + math.sqrt(gram[j, j]) * math.sqrt(longest))
        sign = 1.0 if excess <= 0.0 else -1.0
        signs[j] = sign
        for i in range(j + 1, count):
            inner[i] += sign * gram[j, i]
            sizes[i] += abs(gram[j, i])


@fast
def _recursion(gram, inner, limits, signs):
    for b in range(len(inner)):
        _decide(gram[b], inner[b], limits[b], signs[b])


def recursion(gram: Tensor, inner: Tensor, limits: Tensor) -> Tensor:
    """See `gram.recursion`. `inner` is overwritten."""
    signs = torch.empty_like(inner)
    _recursion(gram.numpy(), inner.numpy(), limits.numpy(), signs.numpy())
    return signs


@njit(cache=_keep, nogil=True)
def _mean_of_two(a, b, count, out):
    for i in range(out.size):
        out[i] = (a[i] + b[i]) / count


@njit(cache=_keep, nogil=True)
def _mean_of_four(a, b, c, d, count, out):
    for i in range(out.size):
        out[i] = ((a[i] + b[i]) + (c[i] + d[i])) / count


def mean_of_rows(rows: Tensor, out: Tensor) -> Tensor:
    """`cdgrab.runtime.mean.mean_of_rows` of two or four rows, of the same type as `out`: each is read once."""
    shape("out", out, {"dim": rows.shape[1]})
    every, mean = rows.numpy(), out.numpy()
    (_mean_of_two if len(rows) == 2 else _mean_of_four)(*every, mean.dtype.type(len(rows)), mean)
    return out


@njit(cache=_keep, nogil=True)
def _add_to_sketches(sums, codes, rows):
    for row in range(len(rows)):
        for i in range(codes.size):
            place, value = codes[i] >> 1, rows[row, i]
            sums[row, place] += -value if codes[i] & 1 else value


def add_to_sketches(sums: Tensor, codes: Tensor, rows: Tensor) -> None:
    """See `sketch.CountSketch.add`; codes [n]: twice the place of a coordinate, and 1 if its sign is minus."""
    shape("pieces of rows", rows, {"rows": len(sums), "coordinates": len(codes)})
    _add_to_sketches(sums.numpy(), codes.numpy(), rows.to(sums.dtype).contiguous().numpy())


def _new_signs(rows: Tensor) -> Tensor:
    return torch.empty(rows.shape[:2], dtype=torch.int8)


def balance(rows: Tensor, running: Tensor, limits: Tensor) -> Tensor:
    """See `cdgrab.balance.rules.balance`."""
    check_sizes(rows, limits, 1 if len(running) == 1 else rows.shape[1], running)
    signs = _new_signs(rows)
    if not rows.numel():
        return signs
    arrays = (rows.contiguous().numpy(), running.numpy(), limits.contiguous().numpy(), signs.numpy())
    if len(running) > 1 or rows.shape[1] < 3 or rows.shape[2] < LONG:
        _balance(*arrays)
        return signs
    arrays = (arrays[0], arrays[1][0], *arrays[2:])
    threads = min(torch.get_num_threads(), config.NUMBA_NUM_THREADS) if rows.shape[2] > CHUNK else 1
    if threads > 1:
        set_num_threads(threads)
    _balance_by_fours(*arrays, True if threads > 1 else None)
    return signs


def balance_centred(
    gradients: Tensor, running: Tensor, stale_mean: Tensor, fresh_sum: Tensor, limits: Tensor
) -> Tensor:
    """See `cdgrab.balance.rules.balance_centred`."""
    check_sizes(gradients, limits, gradients.shape[1], running, stale_mean, fresh_sum)
    signs, sums = _new_signs(gradients), (running.numpy(), stale_mean.numpy(), fresh_sum.numpy())
    _balance_centred(gradients.contiguous().numpy(), *sums, limits.contiguous().numpy(), signs.numpy())
    return signs


def balance_kh(rows: Tensor, running: Tensor, q: Tensor, penalties: Tensor, uniforms: Tensor) -> Tensor:
    """See `cdgrab.balance.rules.balance_kh`."""
    check_sizes(rows, uniforms, rows.shape[1], running)
    shape("penalties", penalties, {"positions": len(rows)})
    shape("q", q, {"workers": rows.shape[1]})
    signs, rule = _new_signs(rows), (running.numpy(), q.numpy(), penalties.numpy())
    _balance_kh(rows.contiguous().numpy(), *rule, uniforms.contiguous().numpy(), signs.numpy())
    return signs
