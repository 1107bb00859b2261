"""Gradients of the LSTMs of several runs at once, by hand: what a GPU does for a group of runs. Needs Triton.

The workers of a run share its parameters [runs, ...], and each has a gradient of its own [runs, workers, ...]. Written
out, a group needs few and large products: those of weight gradients over all time steps at once, those of the forward
pass over all workers of a run. The scores for the whole vocabulary are never written: see `vocabulary_kernels`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from experiments.tasks import lstm_kernels, vocabulary_kernels

READ_AT_ONCE = 2**20  # words in an evaluation, over all runs
WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")  # of nn.LSTM


def write_gradients(
    parameters: dict[str, Tensor],
    carry: tuple[Tensor, Tensor],
    inputs: Tensor,
    targets: Tensor,
    into: dict[str, Tensor],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The gradients of all workers, written `into` tensors [runs, workers, ...]; their mean losses and their carries.

    inputs, targets [runs, workers, time, columns]; carry [runs, workers, layers, columns, hidden].
    """
    embeddings, workers = parameters["embedding.weight"], inputs.shape[1]
    words, goals = (chunks.movedim(2, 0).flatten(2) for chunks in (inputs, targets))  # [time, runs, rows]
    layers = _layers(parameters, words, [state.movedim(2, 0).flatten(2, 3) for state in carry])
    sequence = layers[-1][2][1:]
    losses, gradient = _output_layer(sequence, embeddings, goals, workers, into["embedding.weight"])
    for names, sequence, hiddens, cells, values in reversed(layers):
        gates = lstm_kernels.recur_backward(gradient, cells, values, parameters[names[1]])
        gradient, to_gates = gates @ parameters[names[0]], _by_worker(gates, workers)
        for name, factor in zip(names[:2], (sequence, hiddens[:-1]), strict=True):
            into[name].copy_(to_gates.mT @ _by_worker(factor, workers))
        for name in names[2:]:
            into[name].copy_(to_gates.sum(2))
    vocabulary_kernels.add_rows(into["embedding.weight"], _by_worker(words, workers), _by_worker(gradient, workers))
    last = (torch.stack([layer[kind][-1] for layer in layers], dim=1) for kind in (2, 3))
    return losses, tuple(state.unflatten(2, (workers, -1)).movedim(2, 1) for state in last)


def losses_in_order(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
    """The losses of all words of a text [time, columns], read from its beginning by every run: [runs, time, columns],
    a piece of the text after the other."""
    embeddings, count = parameters["embedding.weight"], sum(name.startswith("lstm.weight_hh") for name in parameters)
    carry = [embeddings.new_zeros(count, len(embeddings), inputs.shape[1], embeddings.shape[2]) for _ in range(2)]
    length = max(1, READ_AT_ONCE // (len(embeddings) * inputs.shape[1]))
    for words, goals in zip(inputs.split(length), targets.split(length), strict=True):
        layers = _layers(parameters, words[:, None], carry)
        carry = [torch.stack([layer[kind][-1] for layer in layers]) for kind in (2, 3)]
        outputs = layers[-1][2][1:].transpose(0, 1).flatten(1, 2)
        losses = vocabulary_kernels.losses(outputs, embeddings, goals.flatten().expand(len(embeddings), -1))
        yield losses.view(-1, *goals.shape)


def _layers(parameters: dict[str, Tensor], words: Tensor, carry: list[Tensor]) -> list[tuple]:
    """Layer by layer: its parameters' names, its inputs, all hidden states and cells, the gates' values.

    words [time, runs, rows] or, the same for all runs, [time, 1, rows]; carry [layers, runs, rows, hidden] each."""
    embeddings, layers = parameters["embedding.weight"], []
    sequence = embeddings[torch.arange(len(embeddings), device=words.device)[:, None], words]
    for number, states in enumerate(zip(*carry, strict=True)):
        names = [f"lstm.{kind}_l{number}" for kind in WEIGHTS]
        from_inputs, from_hidden, *biases = (parameters[name] for name in names)
        gates = sequence @ from_inputs.mT + sum(biases)[:, None]
        layers.append((names, sequence, *lstm_kernels.recur(gates, *states, from_hidden)))
        sequence = layers[-1][2][1:]
    return layers


def _by_worker(sequence: Tensor, workers: int) -> Tensor:
    """[time, runs, rows, ...] -> [runs, workers, time · columns, ...]"""
    return sequence.unflatten(2, (workers, -1)).movedim(0, 2).flatten(2, 3)


def _output_layer(
    sequence: Tensor, embeddings: Tensor, targets: Tensor, workers: int, into: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean losses [runs, workers] and the gradient of `sequence`; that of the embeddings is written `into`."""
    outputs, targets = _by_worker(sequence, workers), _by_worker(targets, workers)
    losses, gradient = vocabulary_kernels.cross_entropy(outputs, embeddings, targets, into)
    return losses.mean(-1), gradient.unflatten(2, (len(sequence), -1)).movedim(2, 0).flatten(2, 3)
