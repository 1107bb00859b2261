"""GLUE: sentences, or pairs of them, are classified (paper: Table 1).

There are three encoders. `tiny_gpt2`, as in the paper: the language model from the GPT-2 experiment with the same
sorter is fine-tuned as a whole, with a classification head. `random_gpt2`: the same model with new initial weights,
which shows what pretraining contributes. `frozen`, as in an earlier version of the paper: a sentence encoder is kept as
it is; its outputs are computed once, and only a linear head on them is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from cdgrab import streams
from experiments.data import encoder, glue
from experiments.data.sources import Source, sha256
from experiments.tasks.base import DTYPES, Classification, initialised
from experiments.tasks.finetuning import Classifier, load_pretrained, untrained
from experiments.tasks.settings import limit, one_of, text

EVALUATED_AT_ONCE = {"frozen": 4096, "tiny_gpt2": 256, "random_gpt2": 256}  # rows
Texts = dict[str, list[tuple[str, ...]]]  # by split


@dataclass(frozen=True)
class Encoded:
    """The output of an encoder: the model's inputs by split, tensors [rows, ...] each, and the model."""

    inputs: dict[str, tuple[Tensor, ...]]
    build_model: Callable[[], nn.Module]  # inputs -> logits [..., classes]
    checksums: dict[str, str]


class Glue(Classification):
    """Units are rows: a sentence or a pair. MNLI's validation rows are the matched ones, then the mismatched."""

    name = "glue"
    settings = {"encoder": one_of("frozen", "tiny_gpt2", "random_gpt2"), "pooling": one_of(*encoder.POOLINGS)}
    settings |= {"encoder_name": text, "checkpoint": text, "limit": limit, "validation_limit": limit}

    @staticmethod
    def locate(config: DictConfig, data: str, root: str | None) -> Source:
        return glue.locate(config.dataset, data, root)

    def __init__(self, config: DictConfig, source: Source, workers: int, seed: int, device: torch.device) -> None:
        super().__init__(config, source, workers)
        sentences, checksums = glue.load(source)
        train = _some(sentences.train, config.limit)
        validation = [_some(part, config.validation_limit) for part in sentences.validation]
        texts = {"train": train.texts, "test": [text for part in validation for text in part.texts]}
        labels = {"train": train.labels, "test": np.concatenate([part.labels for part in validation])}
        texts_key = checksums | {"limits": [config.limit, config.validation_limit], "code": sha256(Path(glue.__file__))}
        encoded = ENCODERS[config.encoder](self, texts, texts_key, sentences.classes, seed, device)
        source.checksums.update(checksums | encoded.checksums)
        self.data = {
            split: (*inputs, torch.as_tensor(labels[split], device=device)) for split, inputs in encoded.inputs.items()
        }
        self._first_part = len(validation[0].labels)  # of the validation rows
        self.evaluated_at_once = EVALUATED_AT_ONCE[config.encoder]
        units = {"train": self.train_units, "validation": self.test_units}
        self.rows = {"all": sum(units.values()), **units, "skipped": sentences.skipped}
        self.rows["largest_class"] = int(np.bincount(validation[0].labels).max())  # of the first validation part
        self.model = initialised(encoded.build_model, seed, config.dtype, device)

    def metrics(self, train: dict[str, float], test: dict[str, float]) -> dict[str, float]:
        """`val_accuracy_mm` is the accuracy on MNLI's mismatched part, which no other dataset has."""
        named = super().metrics(train, test)
        metrics = {name.replace("test_", "val_"): value for name, value in named.items()}
        if test["count_mm"]:
            metrics["val_accuracy_mm"] = 100.0 * test["correct_mm"] / test["count_mm"]
        return metrics

    def measure(self, split: str, parameters: dict[str, Tensor], units: Tensor) -> dict[str, Tensor]:
        *inputs, labels = self.fetch(split, units)
        logits = self.apply(parameters, *inputs)
        losses, correct = F.cross_entropy(logits, labels, reduction="none"), logits.argmax(-1) == labels
        if split == "train":
            return {"loss": losses.sum(), "correct": correct.sum(), "count": torch.tensor(len(units))}
        second = units >= self._first_part
        return {
            "loss": losses[~second].sum(),
            "correct": (correct & ~second).sum(),
            "count": (~second).sum(),
            "correct_mm": (correct & second).sum(),
            "count_mm": second.sum(),
        }


def _frozen(task: Glue, texts: Texts, texts_key: dict, classes: int, seed: int, device: torch.device) -> Encoded:
    config, dtype = task.config, DTYPES[task.config.dtype]
    features, weights = encoder.encoded(texts, config.encoder_name, config.pooling, texts_key, device)
    inputs = {split: (torch.as_tensor(some, dtype=dtype, device=device),) for split, some in features.items()}
    size = features["train"].shape[1]
    return Encoded(inputs, lambda: nn.Linear(size, classes), {f"encoder {config.encoder_name}": weights})


def _tiny_gpt2(task: Glue, texts: Texts, texts_key: dict, classes: int, seed: int, device: torch.device) -> Encoded:
    config = task.config
    wanted_seed = seed if config.pretrained_seed is None else config.pretrained_seed
    wanted = (config.checkpoint, config.pretrained_by, wanted_seed, config.pretrained_size)
    pretrained = load_pretrained(*wanted, task.source)
    inputs = {}
    for split, some in texts.items():
        arrays = pretrained.tokenise(some, texts_key | {"split": split})
        inputs[split] = tuple(torch.as_tensor(array, device=device) for array in arrays)
    body = pretrained.model.body
    if config.encoder == "random_gpt2":
        return Encoded(inputs, lambda: Classifier(untrained(body), classes), {})
    return Encoded(inputs, lambda: Classifier(body, classes), pretrained.checksums)


ENCODERS = {"frozen": _frozen, "tiny_gpt2": _tiny_gpt2, "random_gpt2": _tiny_gpt2}


def _some(part: glue.Part, limit: int | None) -> glue.Part:
    """At most `limit` rows, in file order: a random choice that is the same for every seed, to be encoded only once."""
    if limit is None or limit >= len(part.labels):
        return part
    kept = streams.permutation(len(part.labels), 0, "split")[:limit].sort().values.tolist()
    return glue.Part([part.texts[row] for row in kept], part.labels[kept])
