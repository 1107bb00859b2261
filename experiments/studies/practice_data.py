"""The examples that the study of practice trains on. They stay on the device, and are fetched by their numbers.

Every problem is a classification: of pictures, of applications, of sentences, or of the word that comes next.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cdgrab import streams
from experiments.data import cifar10, encoder, glue, hmda, text_blocks, wikitext
from experiments.data.cache import cached
from experiments.data.sources import Source, sha256
from experiments.tasks.cifar10 import NORMALS

SHIFT = 4  # pixels by which a picture is shifted at most
LONGEST = 64  # tokens of a sentence; hardly one of SST-2 is longer
TRAIN_SHARE = 0.8  # of data without a published split
Arrays = dict[str, tuple[np.ndarray, np.ndarray]]  # inputs and labels of the parts "train" and "valid"


class Examples:
    """Inputs [n, ...] and labels, [n] or one for every word of a block [n, words]. kinds: how many classes or words.

    `examples` and `valid` of the settings limit the parts: a random choice by the seed, of text its beginning.
    """

    def __init__(self, source: Source, settings: Mapping, seed: int, device: torch.device) -> None:
        arrays, self.kinds = READERS[settings["task"]](source, settings, seed)
        self._data = {part: [torch.as_tensor(a, device=device) for a in both] for part, both in arrays.items()}

    def size(self, part: str) -> int:
        return len(self._data[part][1])

    @property
    def features(self) -> int:
        """Numbers of an input."""
        return self._data["train"][0][0].numel()

    def fetch(self, part: str, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels."""
        inputs, labels = (tensor[numbers] for tensor in self._data[part])
        return inputs if inputs.is_floating_point() else inputs.long(), labels.long()


def augmented(pictures: Tensor) -> Tensor:
    """Shifted at random by up to SHIFT pixels in both directions, and every second one as seen in a mirror."""
    many, _, height, width = pictures.shape
    padded, device = F.pad(pictures, (SHIFT,) * 4), pictures.device
    rows, columns = (torch.arange(side, device=device) for side in (height, width))
    down, right = torch.randint(2 * SHIFT + 1, (2, many, 1), device=device)
    mirrored = torch.rand(many, 1, device=device) < 0.5
    rows, columns = rows + down, torch.where(mirrored, columns.flip(0), columns) + right
    numbers = torch.arange(many, device=device)[:, None, None]
    return padded[numbers, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


# -- where they come from ---------------------------------------------------------------------------------------------


def _pictures(source: Source, settings: Mapping, seed: int) -> tuple[Arrays, int]:
    pictures = _read(cifar10, source)
    mean, std = (np.array(values, np.float32)[:, None, None] for values in NORMALS["cifar10"])
    arrays = _split(settings, seed, pictures.train, pictures.images, pictures.labels)
    scale, shift = pictures.white * std, mean / std
    return {part: (images / scale - shift, labels) for part, (images, labels) in arrays.items()}, cifar10.CLASSES


def _applications(source: Source, settings: Mapping, seed: int) -> tuple[Arrays, int]:
    """Features are standardised on the training part."""
    features, labels = _read(hmda, source)
    arrays = _split(settings, seed, None, features.astype(np.float32), labels)
    mean, std = arrays["train"][0].mean(0), arrays["train"][0].std(0)
    return {part: ((some - mean) / (std + (std == 0)), labels) for part, (some, labels) in arrays.items()}, 2


def _words(source: Source, settings: Mapping, seed: int) -> tuple[Arrays, int]:
    corpus = _read(wikitext, source)
    blocks = {part: text_blocks.pack(getattr(corpus, part), settings["context"]) for part in ("train", "valid")}
    return _next_words(blocks, settings), len(corpus.vocabulary)


def _tokens(source: Source, settings: Mapping, seed: int) -> tuple[Arrays, int]:
    most = settings["examples"], settings["valid"]
    found = _read(text_blocks, source, settings["vocabulary"], settings["context"], None, most)
    return _next_words({"train": found.train, "valid": found.valid}, settings), found.vocabulary


def _next_words(blocks: dict[str, np.ndarray], settings: Mapping) -> Arrays:
    """Every word of a block but the first is to be predicted."""
    most = {"train": settings["examples"], "valid": settings["valid"]}
    some = {part: words[: most[part]].astype(np.int32) for part, words in blocks.items()}
    return {part: (words[:, :-1], words[:, 1:]) for part, words in some.items()}


def _sentences(source: Source, settings: Mapping, seed: int) -> tuple[Arrays, int]:
    """Tokens [sentences, LONGEST], filled up with zeros, which stand for no word."""
    sentences, coder = _read(glue, source), encoder.encoder_folder(encoder.PACKAGED) / "tokenizer.json"
    parts = {"train": sentences.train, "valid": sentences.validation[0]}
    key = {"sentences": [sha256(path) for path in source.files], "tokenizer": sha256(coder)}

    def build() -> dict[str, np.ndarray]:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(coder))
        tokenizer.enable_truncation(LONGEST)
        tokenizer.enable_padding(length=LONGEST)
        texts = {part: [text for (text,) in some.texts] for part, some in parts.items()}
        rows = {part: tokenizer.encode_batch_fast(some) for part, some in texts.items()}
        return {part: np.array([row.ids for row in some], np.int32) for part, some in rows.items()}

    tokens = cached("sentences", key | {"code": sha256(Path(__file__))}, build)
    inputs = np.concatenate([tokens[part] for part in parts])
    labels = np.concatenate([part.labels for part in parts.values()])
    return _split(settings, seed, len(tokens["train"]), inputs, labels), sentences.classes


READERS = {
    "cifar10": _pictures,
    "glue": _sentences,
    "gpt2_wiki103": _tokens,
    "lr_hmda": _applications,
    "lstm_wiki2": _words,
}


def _split(settings: Mapping, seed: int, cut: int | None, *arrays: np.ndarray) -> Arrays:
    """cut: where the training part ends, if that is published."""
    rows = streams.permutation(cut or len(arrays[0]), seed, "split").numpy()
    rows = np.concatenate([rows, np.arange(len(rows), len(arrays[0]))])
    cut = cut or int(TRAIN_SHARE * len(rows))
    parts = {"train": rows[:cut][: settings["examples"]], "valid": rows[cut:][: settings["valid"]]}
    return {part: tuple(array[some] for array in arrays) for part, some in parts.items()}


_kept: dict[tuple, object] = {}


def _read(dataset: ModuleType, source: Source, *options: object) -> object:
    """What is in the source, kept for the next run of this process: reading may take longer than a small run."""
    key = (dataset, source.files, options)
    if key not in _kept:
        _kept[key] = dataset.load(source, *options)[0]
    return _kept[key]
