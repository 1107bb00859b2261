"""What is more than chance over seeds? Student's t, exact for whole degrees of freedom."""

from __future__ import annotations

import math
from collections.abc import Sequence


def t_two_sided(t: float, freedom: int) -> float:
    """P(|T| ≥ |t|) for Student's t: the finite sums of Abramowitz and Stegun 26.7.3 (odd) and 26.7.4 (even)."""
    if math.isinf(t):
        return 0.0
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(freedom // 2):
        total += term
        term *= cosine**2 * ((2 * k + 2) / (2 * k + 3) if odd else (2 * k + 1) / (2 * k + 2))
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return max(0.0, 1.0 - inside)


def t_quantile(freedom: int, confidence: float = 0.95) -> float:
    """The t that |T| stays below with this probability, by bisection."""
    low, high = 0.0, 1.0
    while t_two_sided(high, freedom) > 1.0 - confidence:
        high *= 2.0
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_two_sided(middle, freedom) > 1.0 - confidence else (low, middle)
    return high


def paired_p(differences: Sequence[float]) -> float:
    """Two-sided p value of the paired t-test that the mean difference is zero; NaN for fewer than two pairs."""
    count = len(differences)
    if count < 2:
        return math.nan
    mean = math.fsum(differences) / count
    variance = math.fsum((d - mean) ** 2 for d in differences) / (count - 1)
    if variance == 0.0:
        return 1.0 if mean == 0.0 else 0.0
    return t_two_sided(mean / math.sqrt(variance / count), count - 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """p values adjusted for testing all of these at once (Holm 1979): the smallest × n, the next × (n − 1), …"""
    adjusted, largest = [math.nan] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
