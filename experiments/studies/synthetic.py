"""Gradients to test sparsifiers with: layered and heavy-tailed, like those of deep networks, and of a sparse model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


class LayeredGradients:
    """Heavy-tailed noise, partly shared by the workers, with a small constant part; scales differ between layers and
    between coordinates. Every call returns [workers, dim] of the next iteration."""

    def __init__(self, workers: int, dim: int, seed: int = 0, layers: int = 12, decades: float = 2.0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.workers, self.dim = workers, dim
        self.pool = self._normal(3 * dim + 10_007) / (self._normal(3, 3 * dim + 10_007) ** 2).mean(0).sqrt()
        edges = [0, *(torch.rand(layers - 1, generator=self.generator) * dim).long().sort().values.tolist(), dim]
        scales = 10 ** (-decades * torch.rand(layers, generator=self.generator))
        by_layer = torch.cat([scale.expand(b - a) for scale, (a, b) in zip(scales, pairwise(edges), strict=True)])
        self.scale = by_layer * torch.exp(0.8 * self._normal(dim))
        self.constant = 0.1 * self._normal(dim)

    def __call__(self) -> Tensor:
        shared = 0.5 * self._noise() + self.constant
        rows = torch.empty(self.workers, self.dim)
        for row in rows:  # in place: with a million coordinates and 64 workers, copies would take most of the time
            torch.add(self._noise(), shared, out=row).mul_(self.scale)
        return rows

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def _noise(self) -> Tensor:
        start = int(torch.randint(len(self.pool) - self.dim, (1,), generator=self.generator))
        return self.pool[start : start + self.dim]


class SparseModel:
    """Texts are classified by a linear layer on the sum of their words' embeddings. Words follow Zipf's law, so that a
    worker's gradient is zero except for the few words it has just read. Labels come from a hidden score per word."""

    def __init__(self, words: int, width: int, length: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.words, self.width, self.length = words, width, length
        self.frequencies = 1.0 / torch.arange(1, words + 1)
        self.scores = torch.randn(words, generator=self.generator)
        self.parameters = torch.cat(
            [0.1 * torch.randn(words * width, generator=self.generator), torch.randn(width, generator=self.generator)]
        )
        self.dim = len(self.parameters)

    def texts(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Words [*shape, length] and labels [*shape]."""
        count = torch.Size(shape).numel() * self.length
        drawn = torch.multinomial(self.frequencies, count, replacement=True, generator=self.generator)
        words = drawn.view(*shape, self.length)
        return words, (self.scores[words].sum(-1) > 0).float()

    def loss(self, parameters: Tensor, words: Tensor, labels: Tensor) -> Tensor:
        embedding, readout = parameters.split([self.words * self.width, self.width])
        sums = embedding.view(self.words, self.width)[words].sum(-2)
        return F.binary_cross_entropy_with_logits(sums @ readout / self.length**0.5, labels)

    def train(
        self, reduce: Callable[[Tensor], Tensor], workers: int, batch: int, steps: int, rate: float
    ) -> list[float]:
        """Plain SGD. Returns the loss on held-out texts, measured ten times during training."""
        gradient, losses = torch.func.vmap(torch.func.grad(self.loss), in_dims=(None, 0, 0)), []
        tested = self.texts(2000)
        for step in range(steps):
            self.parameters = self.parameters - rate * reduce(gradient(self.parameters, *self.texts(workers, batch)))
            if (step + 1) % max(1, steps // 10) == 0:
                losses.append(float(self.loss(self.parameters, *tested)))
        return losses
