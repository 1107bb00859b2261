"""Small learning problems with a known answer, for many seeds at once: linear models under three losses.

A model predicts from z = <x, w>, so that an example's gradient is slope(z, y)·x + ridge·w. Labels are made from weights
of length 1 and label noise; every seed (replica) has its own data.

    least_squares   ½(z − y)²                       y = <x, w₀> + noise
    logistic        log(1 + eᶻ) − y·z + ridge       y ~ Bernoulli(sigmoid(<x, w₀>)); its noise is the coin
    tanh_neuron     ½(tanh z − y)²                  y = tanh <x, w₀> + noise; smooth and not convex
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from cdgrab import streams
from cdgrab.errors import CdgrabError

try:
    from numba import njit
except ImportError:  # numba is optional: without it the loops are the same, but much slower

    def njit(**options):
        return lambda function: function


KINDS = ("least_squares", "logistic", "tanh_neuron")
NEWTON_STEPS = 50  # far more than convex problems of this size need


@dataclass(frozen=True)
class Problem:
    """features [replicas, examples, dim], labels [replicas, examples], float64."""

    kind: str
    features: Tensor
    labels: Tensor
    ridge: float = 0.0

    def loss(self, weights: Tensor) -> Tensor:
        """Mean over all examples, [replicas], at weights [replicas, dim]."""
        z, y = self._predictors(weights), self.labels
        per_example = {
            "least_squares": lambda: (z - y).square() / 2,
            "logistic": lambda: torch.nn.functional.softplus(z) - y * z,
            "tanh_neuron": lambda: (z.tanh() - y).square() / 2,
        }[self.kind]()
        return per_example.mean(1) + self.ridge / 2 * weights.square().sum(1)

    def gradient(self, weights: Tensor) -> Tensor:
        """Of the loss, [replicas, dim]."""
        everything = torch.arange(self.labels.shape[1]).expand(len(weights), 1, -1)
        return sgd_epoch(self, weights.clone(), everything, rate=0.0).mean((1, 2))

    @cached_property
    def minimum(self) -> Tensor:
        """The smallest loss of a convex problem, [replicas], by Newton's method."""
        if self.kind == "tanh_neuron":
            raise CdgrabError("a tanh neuron's loss has no minimum that Newton's method would find for certain")
        weights = torch.zeros_like(self.features[:, 0])
        identity = torch.eye(weights.shape[1], dtype=weights.dtype)
        for _ in range(NEWTON_STEPS):
            p = self._predictors(weights).sigmoid()
            curvature = p * (1 - p) if self.kind == "logistic" else torch.ones_like(p)
            hessian = self.features.mT @ (curvature[..., None] * self.features) / p.shape[1] + self.ridge * identity
            weights = weights - torch.linalg.solve(hessian, self.gradient(weights))
        return self.loss(weights)

    def _predictors(self, weights: Tensor) -> Tensor:
        return (self.features @ weights[..., None]).squeeze(-1)


@lru_cache(maxsize=1)  # the sorters come one after the other, on the same problem
def make_problem(kind: str, seeds: range, examples: int, dim: int, noise: float = 1.0, ridge: float = 0.0) -> Problem:
    """One problem per seed; a smaller problem consists of the first examples of a larger one."""
    if kind not in KINDS:
        raise CdgrabError(f"unknown problem {kind!r}; the problems are {', '.join(KINDS)}")
    draws = np.stack([streams.stream(seed, "study", 0).normal(size=(examples, dim + 1)) for seed in seeds])
    truth = np.stack([streams.stream(seed, "study", 1).normal(size=dim) for seed in seeds])
    truth /= np.linalg.norm(truth, axis=1, keepdims=True)
    features, chance = draws[..., :dim], draws[..., dim]
    z = np.einsum("rnd,rd->rn", features, truth)
    if kind == "logistic":
        coins = torch.special.ndtr(torch.from_numpy(chance.copy())).numpy()  # uniform on (0, 1)
        labels = (coins < 1 / (1 + np.exp(-z))).astype(float)
    else:
        labels = (np.tanh(z) if kind == "tanh_neuron" else z) + noise * chance
    return Problem(kind, torch.from_numpy(np.ascontiguousarray(features)), torch.from_numpy(labels), ridge)


def sgd_epoch(problem: Problem, weights: Tensor, visits: Tensor, rate: float) -> Tensor:
    """One epoch of plain SGD in every replica, on batches visits [replicas, steps, batch] of examples.

    weights [replicas, dim] are updated in place. Returns the gradients of all visits, each at the weights of its step,
    [replicas, steps, batch, dim].
    """
    gradients = torch.empty(*visits.shape, weights.shape[1], dtype=torch.float64)
    tensors = (problem.features, problem.labels, visits.contiguous(), weights, gradients)
    _epoch(KINDS.index(problem.kind), problem.ridge, rate, *(tensor.numpy() for tensor in tensors))
    return gradients


@njit(cache=True, nogil=True)
def _slope(kind, z, y):
    if kind == 0:
        return z - y
    if kind == 1:
        return 1.0 / (1.0 + math.exp(-z)) - y
    t = math.tanh(z)
    return (t - y) * (1.0 - t * t)


@njit(cache=True, nogil=True)
def _epoch(kind, ridge, rate, features, labels, visits, weights, gradients):
    replicas, steps, batch = visits.shape
    dim = weights.shape[1]
    total = np.empty(dim)
    for r in range(replicas):
        w = weights[r]
        for k in range(steps):
            total[:] = 0.0
            for b in range(batch):
                x, y = features[r, visits[r, k, b]], labels[r, visits[r, k, b]]
                z = 0.0
                for i in range(dim):
                    z += x[i] * w[i]
                slope = _slope(kind, z, y)
                for i in range(dim):
                    gradients[r, k, b, i] = slope * x[i] + ridge * w[i]
                    total[i] += gradients[r, k, b, i]
            for i in range(dim):
                w[i] -= rate / batch * total[i]
