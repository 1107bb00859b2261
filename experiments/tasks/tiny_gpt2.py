"""Tiny GPT-2: a GPT-2 of two small layers, written in plain tensor operations.

`transformers`' own model (to which the tests compare it) makes attention masks and output objects in every call, which
is slow or impossible with `torch.func.vmap`, tracing and captured GPU steps.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SPREAD = 0.02  # standard deviation of all initial weights


class TinyGpt2(nn.Module):
    """Token numbers [..., time] -> a score for every token that may come next, [..., time, vocabulary].

    `body` gives the hidden states; the output layer is the embedding of the tokens. The paper's sizes are the defaults:
    6,846,080 parameters with GPT-2's 50,257 tokens.
    """

    def __init__(self, vocabulary: int, context: int = 128, width: int = 128, layers: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.body = Body(vocabulary, context, width, layers, heads)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.body(tokens), self.body.tokens.weight)


class Body(nn.Module):
    """Token numbers [..., time] -> hidden states [..., time, width], of at most `context` tokens at a time."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"a width of {width} cannot be split over {heads} heads")
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(context, width, heads) for _ in range(layers))
        self.norm = LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=SPREAD)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        for block in self.blocks:  # smaller weights, since the residual stream grows with the number of additions
            for projection in (block.attention.output, block.contract):
                nn.init.normal_(projection.weight, std=SPREAD / math.sqrt(2 * layers))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.read(self.tokens(tokens))

    def read(self, embedded: Tensor) -> Tensor:
        hidden = embedded + self.positions.weight[: embedded.shape[-2]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden)


class Block(nn.Module):
    """Attention and a two-layer network, each on normalised input and added to what came in."""

    def __init__(self, context: int, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = LayerNorm(width), CausalAttention(context, width, heads)
        self.norm = LayerNorm(width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.contract(F.gelu(self.expand(self.norm(hidden)), approximate="tanh"))


class LayerNorm(nn.LayerNorm):
    """The same numbers from elementary operations: TorchScript cannot trace the gradient of PyTorch's LayerNorm."""

    def forward(self, hidden: Tensor) -> Tensor:
        centred = hidden - hidden.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return centred * scale * self.weight + self.bias


class CausalAttention(nn.Module):
    """Every position attends to itself and to those before it, so that padding after a text has no effect on it."""

    future: Tensor

    def __init__(self, context: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.input, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        future = torch.ones(context, context, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        time, width = hidden.shape[-2:]
        parts = self.input(hidden).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for part in parts)
        scores = query @ key.transpose(-1, -2) / math.sqrt(width // self.heads)  # [..., heads, time, time]
        weights = scores.masked_fill(self.future[:time, :time], -math.inf).softmax(-1)
        return self.output((weights @ value).transpose(-2, -3).flatten(-2))
