"""GPT2-WikiText-103: Tiny GPT-2 predicts the next token of Wikipedia articles (paper: Figure 11)."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from cdgrab.errors import CdgrabError
from experiments.data import bpe, text_blocks
from experiments.data.sources import Source
from experiments.store import checkpoint
from experiments.tasks.base import DTYPES, Task, initialised, perplexity
from experiments.tasks.settings import limit, whole
from experiments.tasks.tiny_gpt2 import TinyGpt2

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SIZES = ("context", "width", "layers", "heads")
IN_REGISTERS = 128  # the largest width that a program of `vocabulary_kernels` can hold
READ_AT_ONCE = 2**19  # tokens in an evaluation, over all runs
SCORE_BYTES = {"cpu": 2**26, "cuda": 2**30}  # of scores in memory during evaluation; for a moment twice as much


class Gpt2Wiki103(Task):
    """Units are blocks of `context` tokens. Every token of a block but the first is predicted from those before it.

    The second split is the text's validation part (which the published code calls test): its metrics are named so.
    """

    name, dataset = "gpt2_wiki103", text_blocks
    settings = {"context": whole(2), "width": whole(1), "layers": whole(1), "heads": whole(1)}
    settings |= {"vocabulary": whole(bpe.BYTES, bpe.MOST, optional=True)}
    settings |= {"truncate_lines": limit, "limit": limit, "valid_limit": limit}

    @staticmethod
    def refuse_missing(config: DictConfig, source: Source) -> None:
        if config.vocabulary is None:
            text_blocks.refuse_missing_tokens(source)

    def __init__(self, config: DictConfig, source: Source, workers: int, seed: int, device: torch.device) -> None:
        super().__init__(config, source, workers)
        if config.width % config.heads:
            raise CdgrabError(f"task.width={config.width} cannot be split evenly over task.heads={config.heads}")
        limits = (config.limit, config.valid_limit)
        blocks = self.load(config.vocabulary, config.context, config.truncate_lines, limits)
        parts = {"train": blocks.train, "test": blocks.valid}
        self.data = {name: (torch.as_tensor(part, device=device, dtype=torch.int32),) for name, part in parts.items()}
        self.rows = {
            "all": blocks.train.size + blocks.valid.size,
            "vocabulary": blocks.vocabulary,
            "train": blocks.train.size,
            "valid": blocks.valid.size,
        }
        sizes = {name: config[name] for name in SIZES}
        self.model = initialised(lambda: TinyGpt2(blocks.vocabulary, **sizes), seed, config.dtype, device)
        self.evaluated_at_once = blocks_at_once(device, config.context, blocks.vocabulary, DTYPES[config.dtype])

    def fetch(self, split: str, indices: Tensor) -> tuple[Tensor, ...]:
        return (super().fetch(split, indices)[0].long(),)

    def loss(self, parameters: dict[str, Tensor], carry: tuple, *batch: Tensor) -> tuple[Tensor, tuple]:
        (blocks,) = batch
        scores = self.apply(parameters, blocks[..., :-1])
        return F.cross_entropy(scores.flatten(0, -2), blocks[..., 1:].flatten()), carry

    def _write_gradients(self, parameters: dict[str, Tensor], carry: tuple, blocks: Tensor, into: dict) -> tuple:
        from experiments.tasks.gpt2_batched import write_gradients

        return write_gradients(self.model.body, parameters, blocks, into)

    @property
    def write_gradients(self) -> Callable[..., tuple] | None:
        fits = self.units_per_step == 1 and self.config.width <= IN_REGISTERS
        return self._write_gradients if fits and find_spec("triton") else None

    @property
    def evaluated_together(self) -> bool:
        return self.write_gradients is not None

    def totals_together(self, split: str, parameters: dict[str, Tensor], units: Tensor) -> dict[str, Tensor]:
        from experiments.tasks.gpt2_batched import losses

        runs = len(next(iter(parameters.values())))
        parts = units.expand(runs, -1).split(max(1, READ_AT_ONCE // (runs * self.config.context)), dim=1)
        means = torch.cat([losses(self.model.body, parameters, *self.fetch(split, some)) for some in parts], dim=1)
        total = means.double().sum(1)
        return {"loss": total, "count": torch.full_like(total, means.shape[1])}

    def metrics(self, train: dict[str, float], test: dict[str, float]) -> dict[str, float]:
        """`val_ppl_authors` is the published code's: the sum of all blocks' losses divided by their number less one."""
        valid_loss = test["loss"] / test["count"]
        return {
            "train_loss": train["loss"] / train["count"],
            "val_loss": valid_loss,
            "val_ppl": perplexity(valid_loss),
            "val_ppl_authors": perplexity(test["loss"] / max(test["count"] - 1, 1)),
        }

    def measure(self, split: str, parameters: dict[str, Tensor], units: Tensor) -> dict[str, Tensor]:
        if not len(units):  # more workers than validation blocks
            return {"loss": torch.zeros(()), "count": torch.zeros(())}
        mean = self.loss(parameters, (), *self.fetch(split, units))[0]
        return {"loss": mean.double() * len(units), "count": torch.tensor(len(units))}


def blocks_at_once(device: torch.device, context: int, vocabulary: int, dtype: torch.dtype) -> int:
    """The number of blocks whose scores fit into SCORE_BYTES; at least one."""
    return max(1, SCORE_BYTES[device.type] // (context * vocabulary * dtype.itemsize))


def pretrained(directory: Path, data: str = "auto", root: str | None = None) -> tuple[TinyGpt2, Tokenizer]:
    """The model that a run left in its folder, and the tokenizer of its text, which is located as in the run."""
    content = checkpoint.load(directory)
    if content is None:
        raise CdgrabError(f"{directory} holds no checkpoint of Tiny GPT-2; `make reproduce-gpt2-wiki103` leaves one")
    science, vector = content["science"], content["parameters"]
    source = text_blocks.locate(data, root)
    if source.label != science["source"]:
        raise CdgrabError(f"{directory} was trained on {science['source']}, but the text found here is {source.label}")
    tokenizer, _ = text_blocks.tokenizer(source, science["task.vocabulary"])
    model = TinyGpt2(tokenizer.get_vocab_size(), **{name: science[f"task.{name}"] for name in SIZES}).to(vector.dtype)
    if sum(p.numel() for p in model.parameters()) != len(vector):
        raise CdgrabError(f"the checkpoint in {directory} does not fit its settings; move it away and run again")
    vector_to_parameters(vector, model.parameters())
    return model, tokenizer
