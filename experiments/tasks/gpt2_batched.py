"""Gradients and losses of the Tiny GPT-2s of several runs at once: what a GPU does for a group of runs. Needs Triton.

The scores for the whole vocabulary are never written: see `vocabulary_kernels`. All layers below are small beside it;
they are computed once more for their gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from experiments.tasks import vocabulary_kernels
from experiments.tasks.tiny_gpt2 import Body

TOKENS = "body.tokens.weight"


class Reader(nn.Module):
    """Embedded tokens [time, width] -> hidden states, with parameters named like those of TinyGpt2."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body

    def forward(self, embedded: Tensor) -> Tensor:
        return self.body.read(embedded)


def write_gradients(
    body: Body, parameters: dict[str, Tensor], blocks: Tensor, into: dict[str, Tensor]
) -> tuple[Tensor, tuple]:
    """The gradients of all workers, written `into` tensors [runs, workers, ...]; their mean losses, and no carry.

    parameters [runs, ...], blocks [runs, workers, context].
    """
    read, others = _reader(body), _without_tokens(parameters)

    def weighted(others: dict[str, Tensor], embedded: Tensor, slopes: Tensor) -> Tensor:
        return (read(others, embedded) * slopes).sum()

    tokens, targets = blocks[..., :-1], blocks[..., 1:]
    embedded = _embedded(parameters[TOKENS], tokens)
    hidden = vmap(vmap(read, (None, 0)))(others, embedded)
    losses, slopes = vocabulary_kernels.cross_entropy(hidden, parameters[TOKENS], targets, into[TOKENS])
    gradients, of_embedded = vmap(vmap(grad(weighted, argnums=(0, 1)), (None, 0, 0)))(others, embedded, slopes)
    for name, gradient in gradients.items():
        into[name].copy_(gradient)
    vocabulary_kernels.add_rows(into[TOKENS], tokens, of_embedded)
    return losses.mean(-1), ()


def losses(body: Body, parameters: dict[str, Tensor], blocks: Tensor) -> Tensor:
    """Of every block: blocks [runs, n, context] -> [runs, n]."""
    hidden = vmap(_reader(body))(_without_tokens(parameters), _embedded(parameters[TOKENS], blocks[..., :-1]))
    targets = blocks[..., 1:]
    found = vocabulary_kernels.losses(hidden.flatten(1, 2), parameters[TOKENS], targets.flatten(1))
    return found.view(targets.shape).mean(-1)


def _without_tokens(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in parameters.items() if name != TOKENS}


def _reader(body: Body) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    reader = Reader(body)
    return lambda parameters, embedded: functional_call(reader, parameters, (embedded,))


def _embedded(embeddings: Tensor, tokens: Tensor) -> Tensor:
    """embeddings [runs, vocabulary, width], tokens [runs, ...] -> [runs, ..., width]"""
    runs = torch.arange(len(embeddings), device=tokens.device)
    return embeddings[runs.view(-1, *(1 for _ in tokens.shape[1:])), tokens]
