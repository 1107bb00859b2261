"""Byte-level BPE: GPT-2's own tokens, or fewer of them trained on the spot."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cdgrab.errors import CdgrabError
from experiments.data.progress import progress
from experiments.data.sources import check_files

if TYPE_CHECKING:
    from tokenizers import Tokenizer, models

PUBLISHED = {  # the same bytes as encoder.json and vocab.bpe of the GPT-2 release
    "vocab.json": (1042301, "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
    "merges.txt": (456318, "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
}
BYTES = 256  # tokens of one byte: with all of them, every text can be written and read back
MOST = 2**16  # token numbers are stored in two bytes
LINES_AT_ONCE = 2000


def read_gpt2(folder: Path, how_to_get: str) -> tuple[Tokenizer, dict[str, str]]:
    """GPT-2's tokenizer from its two files, and their checksums."""
    from tokenizers import models

    paths = [folder / name for name in PUBLISHED]
    checksums = check_files(paths, PUBLISHED, how_to_get)
    return _byte_level(models.BPE.from_file(*map(str, paths))), checksums


def from_text(text: str) -> Tokenizer:
    """A tokenizer from the output of its `to_str`."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(text)


def train(lines: Iterable[str], vocabulary: int) -> Tokenizer:
    """A tokenizer of exactly `vocabulary` tokens. It does not depend on the order of the lines."""
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise CdgrabError(
            f"the text gives {tokenizer.get_vocab_size():,} different tokens, fewer than task.vocabulary={vocabulary}"
        )
    return tokenizer


def encode(
    tokenizer: Tokenizer, lines: list[str], longest: int | None = None, most: int | None = None, what: str = "text"
) -> np.ndarray:
    """The tokens of all lines, concatenated, uint16; at most `longest` of each line and `most` of all."""
    parts, found = [np.empty(0, dtype=np.uint16)], 0
    with progress(total=len(lines), unit="line", desc=f"tokenising {what}") as bar:
        for start in range(0, len(lines), LINES_AT_ONCE):
            some = tokenizer.encode_batch_fast(lines[start : start + LINES_AT_ONCE])
            tokens = chain.from_iterable(line.ids[:longest] for line in some)
            parts.append(np.fromiter(tokens, dtype=np.uint16))
            bar.update(len(some))
            found += len(parts[-1])
            if most is not None and found >= most:
                break
    return np.concatenate(parts)[:most]


def _byte_level(model: models.BPE) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
