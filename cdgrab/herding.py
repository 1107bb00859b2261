"""Herding objectives: how far the partial sums of an order stray from the mean (CD-GraB, arXiv 2302.00845, equations 3
and 8)."""

from __future__ import annotations

import torch
from torch import Tensor

from cdgrab.checks import is_dense, one_of, shape, shown
from cdgrab.errors import CdgrabError


def herding_bound(vectors: Tensor, order: Tensor | None = None) -> float:
    """max over k of ‖Σ_{j<=k} (z_{π(j)} − z̄)‖_∞ for vectors [units, dim] and order [units] (default: as given)."""
    order = None if order is None else _numbers("order", order)[None]
    return parallel_herding_bound(_numbers("vectors", vectors)[None], order)


def parallel_herding_bound(vectors: Tensor, order: Tensor | None = None, per_vector: bool = False) -> float:
    """max over k of ‖Σ_{j<=k} Σ_workers (z_{i,π_i(j)} − z̄)‖_∞, z̄ the mean over all workers and units (equation 8).

    vectors [workers, units, dim]; order int64 [workers, units], default: as given. `per_vector` takes the maximum
    after every single worker's vector (as the authors' LeNet figure does) instead of after every full step.
    Computed in float64 whatever the input.
    """
    one_of("per_vector", per_vector, (True, False))
    vectors = _numbers("vectors", vectors).double()
    mean = vectors.mean(dim=(0, 1)) if vectors.dim() == 3 and vectors.numel() else None
    if mean is None or not torch.isfinite(mean).all():  # a finite mean has finite terms, and is cheaper to check
        raise CdgrabError(f"vectors must be finite [workers, units, dim], not empty; got shape {tuple(vectors.shape)}")
    workers, units, dim = vectors.shape
    if order is not None:
        order = _numbers("order", order).to(vectors.device)
        if order.is_floating_point():
            raise CdgrabError("order must hold whole numbers")
        order = order.long()
        shape("order", order, {"workers": workers, "units": units})
        if not torch.equal(order.sort(dim=1).values, torch.arange(units, device=order.device).expand(workers, units)):
            raise CdgrabError(f"order must be a permutation of 0 … {units - 1} for every worker")
        vectors = vectors.gather(1, order[:, :, None].expand(workers, units, dim))
    if per_vector:  # as if one worker visited all vectors: position by position, workers in rank order
        vectors = vectors.transpose(0, 1).reshape(1, -1, dim)
    steps = vectors.sum(dim=0) - len(vectors) * mean
    return float(steps.T.contiguous().cumsum(1).abs().max())  # summing along contiguous memory is faster


def _numbers(name: str, given: object) -> Tensor:
    """A tensor, an array, or lists of real numbers."""
    try:
        numbers = torch.as_tensor(given).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise CdgrabError(f"{name} must be a tensor of numbers, got {shown(given)}") from error
    if not is_dense(numbers) or numbers.is_complex():
        raise CdgrabError(f"{name} must be a tensor of real numbers in memory, got {shown(given)}")
    return numbers
