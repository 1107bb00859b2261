"""The papers' pseudocode, literally: all workers in one process, plain Python lists, float64, one unit at a time.

CD-GraB: Cooper et al. 2023, arXiv 2302.00845 (algorithm and equation numbers are its own unless another paper is
named); GraB: Lu et al. 2022, arXiv 2205.10733; KH-SGD: Carrell et al. 2025, arXiv 2502.12063.

This is the oracle of the tests. It shares no code with the rest of the package on purpose, and it is slow.
Every function takes this epoch's orders (one list per worker) and the gradient of each *position* of the epoch,
`gradients[worker][position]`, and returns the next epoch's orders.
"""

from __future__ import annotations

import math

import numpy as np


def greedy(r: np.ndarray, v: np.ndarray) -> int:
    """Algorithm 1, greedy form."""
    return +1 if float(np.dot(r, v)) <= 0 else -1


def place_pairs(order: list[int], signs: list[int]) -> list[int]:
    """Algorithm 2, lines 11–14: two pointers move inwards from both ends; an unpaired unit stays in the middle."""
    n = len(order)
    new = [-1] * n
    left, right = 0, n - 1
    for k, s in enumerate(signs):
        first, second = order[2 * k], order[2 * k + 1]
        new[left], new[right] = (first, second) if s == +1 else (second, first)
        left, right = left + 1, right - 1
    if n % 2:
        new[left] = order[-1]
    return new


def cd_grab(orders: list[list[int]], gradients: np.ndarray) -> list[list[int]]:
    """CD-GraB, the server's side of one epoch: one running sum, workers in rank order at each pair position."""
    gradients = np.asarray(gradients, dtype=np.float64)
    m, n, d = gradients.shape
    r = np.zeros(d)
    signs: list[list[int]] = [[] for _ in range(m)]
    for k in range(n // 2):
        for i in range(m):
            v = gradients[i][2 * k] - gradients[i][2 * k + 1]
            s = greedy(r, v)
            r = r + s * v
            signs[i].append(s)
    return [place_pairs(orders[i], signs[i]) for i in range(m)]


def id_grab_pair(orders: list[list[int]], gradients: np.ndarray) -> list[list[int]]:
    """ID-GraB (PairBal): CD-GraB with one worker, once for every worker."""
    return [cd_grab([order], np.asarray(gradients)[i : i + 1])[0] for i, order in enumerate(orders)]


def id_grab_bal(
    orders: list[list[int]], gradients: np.ndarray, stale_means: np.ndarray
) -> tuple[list[list[int]], np.ndarray]:
    """GraB (arXiv 2205.10733, Algorithm 4) in every worker. Also returns the means to pass in the next epoch."""
    m, n, d = np.asarray(gradients).shape
    new_orders, fresh = [], np.zeros((m, d))
    for i in range(m):
        r, plus, minus = np.zeros(d), [], []
        for t in range(n):
            g = np.asarray(gradients[i][t], dtype=np.float64)
            c = g - stale_means[i]
            if greedy(r, c) == +1:
                plus.append(orders[i][t])
                r = r + c
            else:
                minus.append(orders[i][t])
                r = r - c
            fresh[i] = fresh[i] + g
        new_orders.append(plus + minus[::-1])
    return new_orders, fresh / n


def kh(
    orders: list[list[int]], gradients: np.ndarray, uniforms: np.ndarray, epoch: int, epochs: int, delta: float = 0.5
) -> list[list[int]]:
    """KH-SGD in every worker; `uniforms[worker][pair]` are draws from Unif[−1, 1]; epochs count from 1."""
    new_orders = []
    for i, order in enumerate(orders):
        h = len(order) // 2
        r, q, signs = np.zeros(np.asarray(gradients).shape[-1]), 0.0, []
        for pair in range(1, h + 1):
            first, second = np.asarray(gradients[i][2 * pair - 2 : 2 * pair], dtype=np.float64)
            y = second - first
            b, ip = float(np.dot(y, y)), float(np.dot(r, y))
            pen = math.log(4 / delta * (math.log(epochs) + 1) * (math.log(h) + 1) * pair * epoch)
            if b == 0:
                threshold = 0.0
            elif q * pen / b <= 1:
                threshold, q = b, 2 * b
            else:
                rho = q * pen / b
                threshold, q = math.sqrt(rho) * b, q + 2 * b * max(pen + 0.5 - math.sqrt(rho), 0) / pen
            s = +1 if ip <= uniforms[i][pair - 1] * threshold else -1
            r = r + s * y
            signs.append(s)
        new_orders.append(place_pairs(order, signs))
    return new_orders


def parallel_herding_bound(vectors: np.ndarray, orders: list[list[int]], per_vector: bool = False) -> float:
    """Equation 8, term by term."""
    m, n, d = np.asarray(vectors).shape
    mean = np.asarray(vectors, dtype=np.float64).reshape(-1, d).mean(axis=0)
    total, worst = np.zeros(d), 0.0
    for j in range(n):
        for i in range(m):
            total = total + np.asarray(vectors[i][orders[i][j]], dtype=np.float64) - mean
            if per_vector or i == m - 1:
                worst = max(worst, float(np.abs(total).max()))
    return worst
