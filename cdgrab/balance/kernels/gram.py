"""The loops of `rules` as a few large operations per block: where numba or Triton is missing.

For rows D and a running sum r, with G = D·Dᵀ and c = D·r, the inner product of row j with the running sum, when its
turn comes, is c_j + Σ_{i<j} s_i G_ij. So the signs follow from a recursion over numbers, and then r += Σ s_j D_j. Rows
are float64, so the signs equal those of the plain loop; inner products within rounding error of the limit are ties.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce

import torch
from torch import Tensor

from cdgrab.balance import optional
from cdgrab.balance.rules import ROUNDING, kh_threshold

Balance = Callable[[Tensor, Tensor, Tensor], Tensor]
ROWS_AT_ONCE = {"cpu": 64, "cuda": 256}  # larger Gram matrices cost more than they save
COPIED, MOST_PARTS = 2**19, 16  # numbers that are copied in float64 at a time; but rows have at most so many parts


def balance(
    rows: Tensor, running: Tensor, limits: Tensor, total: Callable[[Tensor], Tensor] = lambda products: products
) -> Tensor:
    """See `cdgrab.balance.rules.balance`. `total` sums inner products over processes that hold other coordinates."""
    pairs, workers, dim = rows.shape
    if len(running) == 1:  # one sum for all workers: their rows follow each other
        flat = rows.reshape(1, pairs * workers, dim)
        return _signs(flat, running, limits.reshape(1, -1), total).view(pairs, workers)
    return _signs(rows.transpose(0, 1), running, limits.T, total).T


def balance_centred(
    gradients: Tensor, running: Tensor, stale_mean: Tensor, fresh_sum: Tensor, limits: Tensor, by: Balance = balance
) -> Tensor:
    """See `cdgrab.balance.rules.balance_centred`; `by` decides the signs."""
    gradients = gradients.to(running.dtype)
    fresh_sum += gradients.sum(0)
    return by(gradients - stale_mean, running, limits)


def balance_kh(
    rows: Tensor, running: Tensor, q: Tensor, penalties: Tensor, uniforms: Tensor, by: Balance = balance
) -> Tensor:
    """See `cdgrab.balance.rules.balance_kh`. Thresholds depend on the rows' lengths but not on signs, so they come
    first."""
    squared_norms, rule, q_now = rows.to(running.dtype).square().sum(-1).tolist(), penalties.tolist(), q.tolist()
    thresholds = [[0.0] * len(q_now) for _ in squared_norms]
    for k, norms in enumerate(squared_norms):
        for w, norm in enumerate(norms):
            thresholds[k][w], q_now[w] = kh_threshold(q_now[w], norm, rule[k])
    q.copy_(torch.tensor(q_now, dtype=q.dtype))
    return by(rows, running, uniforms * torch.tensor(thresholds, dtype=running.dtype).to(rows.device))


def _signs(rows: Tensor, running: Tensor, limits: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """Signs [sums, rows] of rows [sums, rows, dim], each against its own running sum [sums, dim]."""
    signs = [rows.new_empty(rows.shape[0], 0)]
    if not rows.shape[1]:
        return signs[0].to(torch.int8)
    at_once = ROWS_AT_ONCE["cuda" if rows.is_cuda else "cpu"]
    for some, its_limits in zip(rows.split(at_once, 1), limits.split(at_once, 1), strict=True):
        parts = _parts(some)
        if len(parts) == 1:
            some = some.to(running.dtype)
        products = total(reduce(torch.add, (_products(some[:, :, part], running[:, part]) for part in parts)))
        gram, inner = products[:, :, :-1].contiguous(), products[:, :, -1].contiguous()
        numbers = (gram, inner, its_limits.contiguous())
        decided = fastest_recursion()(*(tensor.cpu() for tensor in numbers)).to(rows.device)
        for part in parts:
            running[:, part].add_((decided[:, None, :] @ some[:, :, part].to(running.dtype)).squeeze(1))
        signs.append(decided)
    return torch.cat(signs, dim=1).to(torch.int8)


def _parts(rows: Tensor) -> list[slice]:
    """Coordinates that are looked at together: copies of all of them would take twice the memory of the rows."""
    sums, count, dim = rows.shape
    columns = max(1, COPIED // (sums * count), -(-dim // MOST_PARTS))
    return [slice(start, start + columns) for start in range(0, max(1, dim), columns)]


def _products(rows: Tensor, running: Tensor) -> Tensor:
    """Inner products of rows with each other, and with the running sum: [sums, rows, rows + 1]."""
    rows = rows.to(running.dtype)
    return torch.cat([rows @ rows.mT, rows @ running[:, :, None]], dim=2)


@cache
def fastest_recursion() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`recursion`, compiled where numba is installed."""
    compiled = optional("cpu")
    return compiled.recursion if compiled else recursion


def recursion(gram: Tensor, inner: Tensor, limits: Tensor) -> Tensor:
    """gram [sums, rows, rows], inner and limits [sums, rows] -> signs [sums, rows] as ±1.0"""
    inner, signs, lengths = inner.clone(), torch.empty_like(inner), gram.diagonal(dim1=1, dim2=2).sqrt()
    sizes = inner.abs() + lengths * lengths.amax(1, keepdim=True) + gram.abs().triu(1).sum(1)
    for j in range(gram.shape[1]):
        signs[:, j] = torch.where(inner[:, j] - limits[:, j] <= ROUNDING * sizes[:, j], 1.0, -1.0)
        inner += signs[:, j, None] * gram[:, j]
    return signs
