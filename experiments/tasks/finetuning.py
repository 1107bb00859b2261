"""Turns a trained Tiny GPT-2 into a classifier: finds the checkpoint, tokenises sentences, adds the head."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, nn

from cdgrab.errors import CdgrabError
from experiments.data.cache import cached
from experiments.data.progress import progress
from experiments.data.sources import Source, sha256
from experiments.store import checkpoint
from experiments.store.files import RUNS
from experiments.store.records import read_manifest
from experiments.tasks.gpt2_wiki103 import pretrained
from experiments.tasks.tiny_gpt2 import SPREAD, Body, TinyGpt2

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PRETRAINED = RUNS / "gpt2_wiki103"
LINE_END = "\n"  # how sentences end in the text that the model was trained on
TEXTS_AT_ONCE = 10_000
Texts = list[tuple[str, ...]]


class Classifier(nn.Module):
    """Tokens [..., time] and the position of the last one that is not padding [...] -> logits [..., classes].

    The head reads the hidden state of that token, as `transformers`' GPT2ForSequenceClassification does.
    """

    def __init__(self, body: Body, classes: int) -> None:
        super().__init__()
        self.body = copy.deepcopy(body)
        self.head = nn.Linear(body.tokens.embedding_dim, classes, bias=False)
        nn.init.normal_(self.head.weight, std=SPREAD)

    def forward(self, tokens: Tensor, last: Tensor) -> Tensor:
        hidden = self.body(tokens)
        position = last[..., None, None].expand(*last.shape, 1, hidden.shape[-1])
        return self.head(hidden.gather(-2, position).squeeze(-2))


def untrained(body: Body) -> Body:
    """A body of the same sizes with new initial weights."""
    tokens, positions, blocks = body.tokens, body.positions, body.blocks
    sizes = (tokens.num_embeddings, positions.num_embeddings, tokens.embedding_dim, len(blocks))
    return Body(*sizes, heads=blocks[0].attention.heads)


@dataclass(frozen=True)
class Pretrained:
    """A model, its tokenizer, and the run that trained it."""

    directory: Path
    model: TinyGpt2
    tokenizer: Tokenizer

    @property
    def checksums(self) -> dict[str, str]:
        """Named after the run: <experiment>/<data source and settings>/<sorter>-s<seed>."""
        name = "/".join(self.directory.resolve().parts[-3:])
        return {f"checkpoint {name}": sha256(self.directory / checkpoint.FILE)}

    def tokenise(self, texts: Texts, texts_key: dict) -> tuple[np.ndarray, np.ndarray]:
        """Token numbers int32 [texts, time], padded with 0, and the position of each text's last token, int64 [texts].

        A line end follows every sentence. Texts longer than the model's context are cut at the ends of their sentences,
        the longer sentence first. `texts_key` names the texts in the cache.
        """
        context = self.model.body.positions.num_embeddings
        tokenizer = hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest()
        key = {"texts": texts_key, "tokenizer": tokenizer, "context": context, "code": sha256(Path(__file__))}
        arrays = cached("glue-tokens", key, lambda: _tokenise(texts, self.tokenizer, context))
        return arrays["tokens"], arrays["last"]


def load_pretrained(directory: str | None, sorter: str, seed: int, size: str, source: Source) -> Pretrained:
    """From a run's folder, or from the newest finished run of this sorter, seed and size. Embedded sentences use runs
    on embedded text, and files use the others."""
    if directory:
        found = Path(directory)
    else:
        runs = [path.parent for path in PRETRAINED.glob(f"*/*/{sorter}-s{seed}/{checkpoint.FILE}")]
        found = _newest({run: read_manifest(run) for run in runs}, sorter, seed, size, source.embedded)
    embedded = read_manifest(found).get("data", {}).get("embedded", source.embedded)
    # Its text is looked for where the sentences are: <root>/glue/<dataset>/train.tsv
    root = None if source.embedded else str(source.files[0].parents[2])
    return Pretrained(found, *pretrained(found, "embedded" if embedded else "auto", root))


def _newest(manifests: dict[Path, dict], sorter: str, seed: int, size: str, embedded: bool) -> Path:
    fitting = {
        run: manifest["ended"]
        for run, manifest in manifests.items()
        if manifest.get("status") == "finished" and (manifest["size"], manifest["data"]["embedded"]) == (size, embedded)
    }
    if not fitting:
        text, option = ("embedded", " DATA=embedded") if embedded else ("real", "")
        raise CdgrabError(
            f"there is no finished GPT-2 run of sorter {sorter}, seed {seed} and size {size} on {text} text: make one "
            f"with `make reproduce-gpt2-wiki103 SIZE={size}{option}`, name one with task.checkpoint=, or use "
            "task.encoder=frozen"
        )
    return max(fitting, key=fitting.get)


def _tokenise(texts: Texts, tokenizer: Tokenizer, context: int) -> dict[str, np.ndarray]:
    rows: list[list[int]] = []
    with progress(total=len(texts), unit="text", desc="tokenising") as bar:
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            some = texts[start : start + TEXTS_AT_ONCE]
            sides = [tokenizer.encode_batch_fast([s + LINE_END for s in side]) for side in zip(*some, strict=True)]
            rows += [fitted([part.ids for part in parts], context) for parts in zip(*sides, strict=True)]
            bar.update(len(some))
    lengths = np.array([len(row) for row in rows])
    tokens = np.zeros((len(rows), lengths.max()), dtype=np.int32)
    for row, padded in zip(rows, tokens, strict=True):
        padded[: len(row)] = row
    return {"tokens": tokens, "last": lengths - 1}


def fitted(parts: list[list[int]], context: int) -> list[int]:
    """All parts concatenated, at most `context` tokens: tokens before the last one of the longest part are dropped."""
    parts = list(parts)
    while sum(map(len, parts)) > context:
        longest = max(range(len(parts)), key=lambda part: len(parts[part]))
        parts[longest] = [*parts[longest][:-2], parts[longest][-1]]
    return [token for part in parts for token in part]
