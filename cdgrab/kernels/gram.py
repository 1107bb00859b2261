"""The loops of `balance.py` on a GPU: signs from inner products of rows, a few large operations per block.

For rows D and a running sum r, with G = D·Dᵀ and c = D·r, row j's inner product with the running sum at its turn is
c_j + Σ_{i<j} s_i G_ij: the signs follow from a recursion over numbers, and then r += Σ s_j D_j. Rows are float64, so
the signs are those of the plain loop but for exact inner products within rounding of the limit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..balance import kh_threshold

try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton the recursion runs as ordinary operations: same signs, some ten times slower
    triton = None

ROWS_AT_ONCE = {"cpu": 64, "cuda": 256}  # larger Gram matrices cost more than they save


def balance(
    rows: Tensor, running: Tensor, limits: Tensor, total: Callable[[Tensor], Tensor] = lambda products: products
) -> Tensor:
    """See `cdgrab.balance.balance`. `total` adds up inner products where others hold more coordinates."""
    pairs, workers, dim = rows.shape
    if len(running) == 1:  # one sum for all workers: their rows follow each other
        flat = rows.reshape(1, pairs * workers, dim)
        return _signs(flat, running, limits.reshape(1, -1), total).view(pairs, workers)
    return _signs(rows.transpose(0, 1), running, limits.T, total).T


def balance_centred(
    gradients: Tensor, running: Tensor, stale_mean: Tensor, fresh_sum: Tensor, limits: Tensor
) -> Tensor:
    """See `cdgrab.balance.balance_centred`."""
    gradients = gradients.to(running.dtype)
    fresh_sum += gradients.sum(0)
    return balance(gradients - stale_mean, running, limits)


def balance_kh(rows: Tensor, running: Tensor, q: Tensor, penalties: Tensor, uniforms: Tensor) -> Tensor:
    """See `cdgrab.balance.balance_kh`. Its thresholds depend on lengths only, not on signs: they come first."""
    squared_norms, rule, q_now = rows.to(running.dtype).square().sum(-1).tolist(), penalties.tolist(), q.tolist()
    thresholds = [[0.0] * len(q_now) for _ in squared_norms]
    for k, norms in enumerate(squared_norms):
        for w, norm in enumerate(norms):
            thresholds[k][w], q_now[w] = kh_threshold(q_now[w], norm, rule[k])
    q.copy_(torch.tensor(q_now, dtype=q.dtype))
    return balance(rows, running, uniforms * torch.tensor(thresholds, dtype=running.dtype).to(rows.device))


def _signs(rows: Tensor, running: Tensor, limits: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """Signs [sums, rows] of rows [sums, rows, dim], each against its own running sum [sums, dim]."""
    signs = [rows.new_empty(rows.shape[0], 0)]
    if not rows.shape[1]:
        return signs[0].to(torch.int8)
    at_once = ROWS_AT_ONCE["cuda" if rows.is_cuda else "cpu"]
    for some, its_limits in zip(rows.split(at_once, 1), limits.split(at_once, 1), strict=True):
        some = some.to(running.dtype)
        products = total(torch.cat([some @ some.mT, some @ running[:, :, None]], dim=2))
        gram, inner = products[:, :, :-1].contiguous(), products[:, :, -1].contiguous()
        decided = _recursion_for(rows)(gram, inner, its_limits.contiguous())
        running += (decided[:, None, :] @ some).squeeze(1)
        signs.append(decided)
    return torch.cat(signs, dim=1).to(torch.int8)


def _recursion_for(rows: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return _recursion_by_triton if triton and rows.is_cuda else _recursion


def _recursion(gram: Tensor, inner: Tensor, limits: Tensor) -> Tensor:
    """gram [sums, rows, rows], inner and limits [sums, rows] -> signs [sums, rows] as ±1.0"""
    inner, signs = inner.clone(), torch.empty_like(inner)
    for j in range(gram.shape[1]):
        signs[:, j] = torch.where(inner[:, j] <= limits[:, j], 1.0, -1.0)
        inner += signs[:, j, None] * gram[:, j]
    return signs


def _recursion_by_triton(gram: Tensor, inner: Tensor, limits: Tensor) -> Tensor:
    signs = torch.empty_like(inner)
    sums, rows = inner.shape
    _recursion_kernel[(sums,)](gram, inner.contiguous(), limits, signs, rows, triton.next_power_of_2(rows))
    return signs


if triton:

    @triton.jit
    def _recursion_kernel(gram, inner, limits, signs, rows, BLOCK: tl.constexpr):
        """One program per running sum; the inner products of all rows stay in registers."""
        which = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < rows
        here = which * rows + column
        # relative to its limit, a row goes + at or below zero
        excess = tl.load(inner + here, inside, 0.0) - tl.load(limits + here, inside, 0.0)
        decided = tl.zeros_like(excess)
        for j in range(rows):
            row = tl.load(gram + (which * rows + j) * rows + column, inside, 0.0)
            sign = tl.where(tl.sum(tl.where(column == j, excess, 0.0)) <= 0.0, 1.0, -1.0)
            excess += sign * row
            decided = tl.where(column == j, sign, decided)
        tl.store(signs + here, decided, inside)
