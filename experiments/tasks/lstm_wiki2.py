"""LSTM-WikiText-2: a small LSTM predicts the next word of Wikipedia articles (paper: Figure 3b)."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from cdgrab.errors import CdgrabError
from experiments.data import wikitext
from experiments.data.sources import Source
from experiments.tasks.base import DTYPES, Task, initialised, perplexity
from experiments.tasks.settings import flag, limit, whole

EVALUATED_AT_ONCE = {"cpu": 560, "cuda": 16384}  # words; each has a score for every word of the vocabulary
IN_REGISTERS = 64  # the largest hidden size whose matrices a program of `lstm_kernels` can hold
Carry = tuple[Tensor, Tensor]  # hidden and cell state, [layers, columns, hidden] each


class TiedLstm(nn.Module):
    """Word numbers [time, columns] -> a score for every word that may come next. The output layer is the embedding."""

    def __init__(self, words: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.lstm = nn.LSTM(hidden, hidden, layers)

    def forward(self, words: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        outputs, carry = self.lstm(self.embedding(words), carry)
        return F.linear(outputs, self.embedding.weight), carry


def _contiguous(key: str, value: object) -> None:
    if value != "contiguous":
        raise CdgrabError(f"workers of lstm_wiki2 own columns of the text: {key} must be contiguous")


class LstmWiki2(Task):
    """The training text is laid out in `batch` columns, and every worker owns a block of neighbouring ones. Units are
    chunks: `chunk_length` words of each of the worker's columns, numbered worker by worker in the order of the text.

    As in the published code, the state after a chunk is passed on to the chunk visited next, wherever that is in the
    text. Evaluation reads the text in its own order.
    """

    name, dataset, one_unit_per_step = "lstm_wiki2", wikitext, True
    settings = dict.fromkeys(("chunk_length", "hidden", "layers", "test_columns"), whole(1))
    settings |= {"limit": limit, "test_chunks": whole(2, optional=True)}
    settings |= {"reset_hidden": flag, "partition": _contiguous}

    def __init__(self, config: DictConfig, source: Source, workers: int, seed: int, device: torch.device) -> None:
        super().__init__(config, source, workers)
        self._device = device
        corpus = self.load()

        def columns(text: np.ndarray, count: int) -> Tensor:
            """[count, length]; leftover words at the end are dropped."""
            return torch.as_tensor(text[: len(text) // count * count], dtype=torch.long, device=device).view(count, -1)

        train, test = columns(corpus.train, config.batch), columns(corpus.test, config.test_columns)
        length = config.chunk_length
        if config.test_chunks is not None:
            test = test[:, : config.test_chunks * length + 1]
        # full chunks only; the word after a chunk is its last target
        available, self._test_chunks = ((text.shape[1] - 1) // length for text in (train, test))
        self.chunks = min(available, config.limit or available)
        if self.chunks < 1 or self._test_chunks < 2:
            raise CdgrabError(f"{source.description} is too short for {config.batch} columns of {length}-word chunks")
        # [columns, chunks, length + 1]: a chunk's last target is the next chunk's first input
        windows = train.unfold(1, length + 1, length)[:, : self.chunks].unflatten(0, (workers, -1))
        self.data = {"train": (windows.permute(0, 2, 3, 1).flatten(0, 1),), "test": (test,)}
        self.rows = {
            "all": len(corpus.train) + len(corpus.test),
            "vocabulary": len(corpus.vocabulary),
            "train": len(corpus.train),
            "test": len(corpus.test),
            "chunks": self.chunks,
        }
        sizes = (len(corpus.vocabulary), config.hidden, config.layers)
        self.model = initialised(lambda: TiedLstm(*sizes), seed, config.dtype, device)

    def partition(self, permutation: Tensor, seed: int = 0) -> Tensor:
        """A block of columns each, in file order."""
        kept = self.chunks - self.chunks % 2 if self.config.truncate else self.chunks
        if kept < 1:
            raise CdgrabError("task.truncate leaves no chunk, since there is only one per worker")
        return torch.arange(self.workers)[:, None] * self.chunks + torch.arange(kept)

    def first_carry(self, workers: int) -> tuple[Tensor, ...]:
        return self._zeros(workers, self.config.layers, self.config.batch // self.workers, self.config.hidden)

    def fetch(self, split: str, indices: Tensor) -> tuple[Tensor, ...]:
        """Inputs and targets: train [..., chunk_length, columns of a worker]; test, by column, [..., length]."""
        (chosen,) = super().fetch(split, indices)
        return (chosen[..., :-1], chosen[..., 1:]) if split == "test" else (chosen[..., :-1, :], chosen[..., 1:, :])

    def loss(self, parameters: dict[str, Tensor], carry: tuple[Tensor, ...], *batch: Tensor) -> tuple[Tensor, tuple]:
        if self.config.reset_hidden:
            carry = tuple(torch.zeros_like(state) for state in carry)
        losses, carry = self._losses(parameters, carry, *batch)
        return losses.mean(), carry

    def _write_gradients(self, parameters: dict[str, Tensor], carry: tuple, *batch_and_target: object) -> tuple:
        from experiments.tasks.lstm_batched import write_gradients

        if self.config.reset_hidden:
            carry = tuple(torch.zeros_like(state) for state in carry)
        return write_gradients(parameters, carry, *batch_and_target)

    @property
    def write_gradients(self) -> Callable[..., tuple] | None:
        return self._write_gradients if find_spec("triton") and self.config.hidden <= IN_REGISTERS else None

    @property
    def evaluated_together(self) -> bool:
        return self.write_gradients is not None

    def totals(self, split: str, parameters: dict[str, Tensor], units: Tensor) -> dict[str, Tensor]:
        return self._sums(split, self._losses_in_order(parameters, *self._text(split, units)))

    def totals_together(self, split: str, parameters: dict[str, Tensor], units: Tensor) -> dict[str, Tensor]:
        from experiments.tasks.lstm_batched import losses_in_order

        text = self._text(split, units.view(-1, units.shape[-1])[0])  # every run has the same units
        return self._sums(split, torch.cat(list(losses_in_order(parameters, *text)), dim=1))

    def _sums(self, split: str, losses: Tensor) -> dict[str, Tensor]:
        """From the losses of a text [..., time, columns]."""
        losses = losses.double()
        totals = {"loss": losses.sum((-2, -1))}
        if split == "test":
            totals["full_chunks"] = losses[..., : self._test_chunks * self.config.chunk_length, :].sum((-2, -1))
        return totals | {"count": torch.full_like(totals["loss"], losses.shape[-2:].numel())}

    def _text(self, split: str, units: Tensor) -> tuple[Tensor, Tensor]:
        """The words of some units in the order of the text, and those that follow them: [time, columns] each."""
        if split == "test":
            return tuple(columns.T for columns in self.fetch(split, units))
        # the columns of several workers side by side: [chunks, chunk_length, workers, columns]
        owned = units.sort().values.view(len((units // self.chunks).unique()), -1)
        return tuple(chunks.movedim(0, 2).flatten(0, 1).flatten(1, 2) for chunks in self.fetch(split, owned))

    def metrics(self, train: dict[str, float], test: dict[str, float]) -> dict[str, float]:
        """`test_ppl_authors` is the number that the published code calls perplexity: the sum of the mean losses of all
        full chunks, divided by their number less one; 1.2 % too high on WikiText-2."""
        words_per_chunk = self.config.chunk_length * self.test_units
        return {
            "train_loss": train["loss"] / train["count"],
            "test_ppl": perplexity(test["loss"] / test["count"]),
            "test_ppl_authors": perplexity(test["full_chunks"] / words_per_chunk / (self._test_chunks - 1)),
        }

    def _zeros(self, *shape: int) -> Carry:
        dtype = DTYPES[self.config.dtype]
        return tuple(torch.zeros(shape, dtype=dtype, device=self._device) for _ in range(2))

    def _losses(self, parameters: dict[str, Tensor], carry: tuple, inputs: Tensor, targets: Tensor) -> tuple:
        """The loss of every word, [time, columns], and the carry after the last."""
        scores, carry = self.apply(parameters, inputs, carry)
        losses = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape), carry

    def _losses_in_order(self, parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        """The same for a text of any length, with scores for one chunk at a time in memory."""
        if not inputs.numel():  # more workers than test columns
            return torch.zeros(inputs.shape, device=self._device)
        carry = self._zeros(self.config.layers, inputs.shape[1], self.config.hidden)
        pieces, length = [], max(1, EVALUATED_AT_ONCE[self._device.type] // inputs.shape[1])
        for piece in zip(inputs.split(length), targets.split(length), strict=True):
            losses, carry = self._losses(parameters, carry, *piece)
            pieces.append(losses)
        return torch.cat(pieces)
