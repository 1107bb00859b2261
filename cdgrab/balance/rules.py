"""Sign rules and reordering: pure functions, on any device. `kernels` holds fast versions, proven equal to these.

Balancing keeps a running sum r. For each vector v it picks a sign s and sets r += s·v, so that r stays small.
All rules of this project decide in the same form,

    s = +1  if  <r, v> <= limit  else  -1,

and differ only in the limit:

* greedy (CD-GraB, Cooper et al. 2023, arXiv 2302.00845, Algorithm 1 as the published experiments run it): limit = 0;
  ties go to +1;
* self-balancing walk (Alweiss, Liu, Sawhney 2020, arXiv 2006.14009; what the theory assumes): s = +1 with probability
  1/2 − <r, v>/(2w), which is limit = w·u with u ~ Unif[−1, 1];
* KH-SGD (Low-Rank Thinning, Carrell et al. 2025, arXiv 2502.12063): limit = u·threshold, where the threshold adapts
  to the vectors seen.

Signs become orders as in Algorithm 2 of CD-GraB.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# In these loops rows that cancel leave exactly zero: a tie. Where inner products are computed for blocks of rows (on a
# GPU, and without numba), rounding may leave a tiny remainder; relative to the terms it is treated as zero.
ROUNDING = 2.0**-46


def kh_threshold(q: float, squared_norm: float, penalty: float) -> tuple[float, float]:
    """Threshold and next q of KH-SGD (arXiv 2502.12063): ρ = q·penalty/b; q starts at 0 in every epoch."""
    b = squared_norm
    if b == 0.0:  # equal gradients: any sign will do, and they say nothing about the scale
        return 0.0, q
    rho = q * penalty / b
    if rho <= 1.0:
        return b, 2.0 * b
    root = math.sqrt(rho)
    return root * b, q + 2.0 * b * max(penalty + 0.5 - root, 0.0) / penalty


def kh_penalties(pairs: int, epoch: int, epochs: int, delta: float = 0.5) -> Tensor:
    """ln[(4/δ)(ln E + 1)(ln h + 1)·i·k] for the pairs i = 1 … h of epoch k = 1 … E. Float64 [pairs]."""
    if pairs == 0:
        return torch.zeros(0, dtype=torch.float64)
    index = torch.arange(1, pairs + 1, dtype=torch.float64)
    return torch.log(4.0 / delta * (math.log(epochs) + 1.0) * (math.log(pairs) + 1.0) * index * epoch)


def balance(rows: Tensor, running: Tensor, limits: Tensor) -> Tensor:
    """Signs of `rows`, one by one: positions in order, workers in rank order inside each position.

    rows     [positions, workers, dim]
    running  [1, dim] one sum shared by all workers (CD-GraB), or [workers, dim] one each (ID-GraB); updated in place
    limits   [positions, workers]
    returns  int8 [positions, workers]

    Works on any device without synchronising with the host.
    """
    positions, workers, _ = rows.shape
    signs = torch.empty(positions, workers, dtype=torch.int8, device=rows.device)
    for k in range(positions):
        for w in range(workers):
            r = running[w if len(running) > 1 else 0]
            v = rows[k, w].to(r.dtype)
            sign = torch.where(torch.dot(r, v) <= limits[k, w], 1.0, -1.0)
            r += sign.to(r.dtype) * v
            signs[k, w] = sign
    return signs


def balance_centred(
    gradients: Tensor, running: Tensor, stale_mean: Tensor, fresh_sum: Tensor, limits: Tensor
) -> Tensor:
    """Mean balancing (GraB, arXiv 2205.10733, Algorithm 4): like `balance` with one sum per worker, on gradient − stale
    mean.

    gradients [positions, workers, dim]; running, stale_mean, fresh_sum [workers, dim]. The gradients are added to
    `fresh_sum` one by one, so that the result does not depend on how the epoch is split into calls.
    """
    signs = torch.empty(gradients.shape[:2], dtype=torch.int8, device=gradients.device)
    for k in range(len(gradients)):
        rows = gradients[k].to(running.dtype)
        signs[k] = balance((rows - stale_mean)[None], running, limits[k : k + 1])[0]
        fresh_sum += rows
    return signs


def balance_kh(rows: Tensor, running: Tensor, q: Tensor, penalties: Tensor, uniforms: Tensor) -> Tensor:
    """The signs of KH-SGD, each worker on its own. rows [positions, workers, dim]; running [workers, dim], q [workers]
    (both updated in place); penalties [positions]; uniforms [positions, workers] from Unif[−1, 1]."""
    signs = torch.empty(rows.shape[:2], dtype=torch.int8, device=rows.device)
    for k in range(len(rows)):
        limits = torch.empty(1, rows.shape[1], dtype=torch.float64, device=rows.device)
        for w in range(rows.shape[1]):
            v = rows[k, w].to(running.dtype)
            threshold, q[w] = kh_threshold(float(q[w]), float(v @ v), float(penalties[k]))
            limits[0, w] = float(uniforms[k, w]) * threshold
        signs[k] = balance(rows[k : k + 1], running, limits)[0]
    return signs


def reorder(order: Tensor, signs: Tensor) -> Tensor:
    """New order = the +1 units in visiting order, then the −1 units in reverse visiting order.

    order int64 [workers, units]; signs [workers, units]: the sign of the unit visited at each position. Units without
    a sign (0) come in between, in visiting order.
    """
    plus, minus = signs > 0, signs < 0
    left, right = plus.cumsum(1), order.shape[1] - minus.cumsum(1)
    between = left[:, -1:] + (signs == 0).cumsum(1) - 1
    slots = torch.where(plus, left - 1, torch.where(minus, right, between))
    return torch.empty_like(order).scatter_(1, slots, order)


def reorder_pairs(order: Tensor, pair_signs: Tensor) -> Tensor:
    """Pair form of `reorder`: pair k with sign s fills slot k from the left and slot k from the right.

    pair_signs [workers, units // 2]: +1 puts the first unit of the pair left, −1 the second. The unpaired last unit
    of an odd count keeps its place in the middle.
    """
    units = order.shape[1]
    signs = torch.zeros_like(order, dtype=pair_signs.dtype)
    signs[:, 0 : units - units % 2 : 2] = pair_signs
    signs[:, 1::2] = -pair_signs
    return reorder(order, signs)
