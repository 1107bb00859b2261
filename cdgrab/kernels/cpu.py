"""The loops of `balance.py` compiled with numba. Rows may be float32; sums and inner products are float64."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ..balance import kh_threshold

# Reassociation lets the inner products use vector units. It changes their last bits, in the same way for the same
# memory layout: rows are always made contiguous first, since numba compiles each layout on its own.
_compile = njit(cache=True, nogil=True, fastmath={"reassoc"})


@_compile
def _inner(r, v):
    total = 0.0
    for i in range(r.size):
        total += r[i] * v[i]
    return total


@_compile
def _step(r, v, limit):
    """Decide one sign and add the signed vector to the running sum."""
    if _inner(r, v) <= limit:
        for i in range(r.size):
            r[i] += v[i]
        return 1
    for i in range(r.size):
        r[i] -= v[i]
    return -1


_kh_threshold = _compile(kh_threshold)


@_compile
def _balance(rows, running, limits, signs):
    shared = running.shape[0] == 1
    for k in range(rows.shape[0]):
        for w in range(rows.shape[1]):
            signs[k, w] = _step(running[0 if shared else w], rows[k, w], limits[k, w])


@_compile
def _balance_centred(gradients, running, stale_mean, fresh_sum, limits, signs):
    v = np.empty(running.shape[1])
    for k in range(gradients.shape[0]):
        for w in range(gradients.shape[1]):
            for i in range(v.size):
                v[i] = gradients[k, w, i] - stale_mean[w, i]
                fresh_sum[w, i] += gradients[k, w, i]
            signs[k, w] = _step(running[w], v, limits[k, w])


@_compile
def _balance_kh(rows, running, q, penalties, uniforms, signs):
    for k in range(rows.shape[0]):
        for w in range(rows.shape[1]):
            v = rows[k, w]
            squared_norm = 0.0
            for i in range(v.size):
                squared_norm += np.float64(v[i]) * v[i]
            threshold, q[w] = _kh_threshold(q[w], squared_norm, penalties[k])
            signs[k, w] = _step(running[w], v, uniforms[k, w] * threshold)


@_compile
def _recursion(gram, inner, limits, signs):
    for b in range(inner.shape[0]):
        for j in range(inner.shape[1]):
            sign = 1.0 if inner[b, j] <= limits[b, j] else -1.0
            signs[b, j] = sign
            for i in range(j + 1, inner.shape[1]):
                inner[b, i] += sign * gram[b, j, i]


def recursion(gram: Tensor, inner: Tensor, limits: Tensor) -> Tensor:
    """See `gram._recursion`. `inner` is overwritten."""
    signs = torch.empty_like(inner)
    _recursion(gram.numpy(), inner.numpy(), limits.numpy(), signs.numpy())
    return signs


def _new_signs(rows: Tensor) -> Tensor:
    return torch.empty(rows.shape[:2], dtype=torch.int8)


def balance(rows: Tensor, running: Tensor, limits: Tensor) -> Tensor:
    """See `cdgrab.balance.balance`."""
    signs = _new_signs(rows)
    _balance(rows.contiguous().numpy(), running.numpy(), limits.contiguous().numpy(), signs.numpy())
    return signs


def balance_centred(
    gradients: Tensor, running: Tensor, stale_mean: Tensor, fresh_sum: Tensor, limits: Tensor
) -> Tensor:
    """See `cdgrab.balance.balance_centred`."""
    signs = _new_signs(gradients)
    _balance_centred(
        gradients.contiguous().numpy(),
        running.numpy(),
        stale_mean.numpy(),
        fresh_sum.numpy(),
        limits.contiguous().numpy(),
        signs.numpy(),
    )
    return signs


def balance_kh(rows: Tensor, running: Tensor, q: Tensor, penalties: Tensor, uniforms: Tensor) -> Tensor:
    """See `cdgrab.balance.balance_kh`."""
    signs = _new_signs(rows)
    _balance_kh(
        rows.contiguous().numpy(),
        running.numpy(),
        q.numpy(),
        penalties.numpy(),
        uniforms.contiguous().numpy(),
        signs.numpy(),
    )
    return signs
