"""The models of the study of practice, of the kinds that people train: inputs -> scores [..., classes]."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from experiments.data import encoder
from experiments.studies.practice_data import Examples
from experiments.tasks.cifar10_models import ResNet18, lenet
from experiments.tasks.tiny_gpt2 import SPREAD

HIDDEN = 256  # of the perceptron's two layers


class Gpt(nn.Module):
    """Words [n, time] -> scores of the word that comes next, [n, time, words]. The output layer is the embedding."""

    def __init__(self, words: int, context: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(context, width)
        block = partial(nn.TransformerEncoderLayer, width, heads, 4 * width, dropout, "gelu")
        self.blocks = nn.ModuleList(block(batch_first=True, norm_first=True) for _ in range(layers))
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.register_buffer("future", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)
        for embedding in (self.words, self.positions):
            nn.init.normal_(embedding.weight, std=SPREAD)

    def forward(self, words: Tensor) -> Tensor:
        time = words.shape[1]
        hidden = self.dropout(self.words(words) + self.positions.weight[:time])
        for block in self.blocks:
            hidden = block(hidden, self.future[:time, :time], is_causal=True)
        return self.norm(hidden) @ self.words.weight.T


class FineTuned(nn.Module):
    """A pretrained encoder of sentences, and a new linear layer on the mean of its outputs. Zeros stand for no word."""

    def __init__(self, classes: int, dropout: float) -> None:
        super().__init__()
        from transformers import AutoModel  # takes seconds
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()  # the encoder's own last layer is not needed here
        folder = encoder.encoder_folder(encoder.PACKAGED)
        options = {"local_files_only": True, "dtype": torch.float32, "add_pooling_layer": False}
        options |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        self.encoder = AutoModel.from_pretrained(folder, **options)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(self.encoder.config.hidden_size, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        there = tokens != 0
        hidden = self.encoder(tokens, attention_mask=there).last_hidden_state * there[..., None]
        return self.head(self.dropout(hidden.sum(1) / there.sum(1, keepdim=True)))


def perceptron(features: int, classes: int, dropout: float) -> nn.Module:
    sizes = (features, HIDDEN, HIDDEN)
    layers = ((nn.Linear(a, b), nn.ReLU(), nn.Dropout(dropout)) for a, b in zip(sizes, sizes[1:], strict=False))
    return nn.Sequential(*(part for layer in layers for part in layer), nn.Linear(HIDDEN, classes))


def build(settings: Mapping, examples: Examples) -> nn.Module:
    """With PyTorch's random weights, or those of its pretraining."""
    if settings["model"] == "lenet":
        return lenet(nn.Conv2d)
    if settings["model"] == "resnet18":
        return ResNet18(nn.BatchNorm2d).to(memory_format=torch.channels_last)
    if settings["model"] == "mlp":
        return perceptron(examples.features, examples.kinds, settings["dropout"])
    if settings["model"] == "encoder":
        return FineTuned(examples.kinds, settings["dropout"])
    sizes = (settings[name] for name in ("context", "width", "layers", "heads"))
    return Gpt(examples.kinds, *sizes, dropout=settings["dropout"])
