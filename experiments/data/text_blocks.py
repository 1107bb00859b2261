"""Text for language models in blocks of tokens: WikiText-103, else novels, else Wikipedia articles of a pip package."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cdgrab.errors import CdgrabError
from experiments.data import bpe, wikitext
from experiments.data.cache import cached
from experiments.data.sources import Source, check_file, data_root, require_file, sha256

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GET = "get it with `make data-gpt2-wiki103`"
VALID = (1142309, "9aee9f52d6e77de6c7751fc5e7c44287db3ec0eaf15477098acc6b93c1c4250b")  # valid.tokens as published
TRAIN_LINES = 1_801_350  # of train.tokens, for which no checksum was published
LEARNT_FROM = 10_000_000  # characters of the training text that the tokenizer is trained on; more changes little
HELD_OUT_EVERY = 20  # of novels (by file name) and articles (in file order) the 1st, 21st, 41st … are for validation


@dataclass(frozen=True)
class Blocks:
    """Tokens in rows of equal length, uint16 [blocks, context], and the size of the vocabulary."""

    train: np.ndarray
    valid: np.ndarray
    vocabulary: int


def locate(data: str = "auto", root: str | None = None) -> Source:
    """The source that a run with these settings uses. Does not read the files yet.

    The first of its files are text; the last two, where it is not embedded, are GPT-2's tokens.
    """
    folder = data_root(root, data)
    if folder:
        tokens = tuple(folder / "gpt2" / name for name in bpe.PUBLISHED)
        train, valid = (folder / "wikitext-103" / f"{part}.tokens" for part in ("train", "valid"))
        if train.is_file():
            require_file(valid, GET)
            # the word-level files spell rare words <unk>; perplexities differ a little from the raw text's
            description = "WikiText-103, word-level (the published code reads the raw text)"
            return Source("WikiText-103", description, (train, valid, *tokens), papers_own=True)
        novels = folder / "novels"
        if count := len(_novels(novels)):
            return Source("novels", f"{count} novel{'s' * (count > 1)}", (novels, *tokens))
        if train.parent.is_dir() or novels.is_dir():
            raise CdgrabError(
                f"there is no {train} ({GET}) and no text file in {novels}; data=embedded needs neither of them"
            )
    return wikitext.PACKAGED.source("106 articles of Wikipedia (gensim)")


def load(
    source: Source,
    vocabulary: int | None,
    context: int,
    longest_line: int | None = None,
    most: tuple[int | None, int | None] = (None, None),
) -> tuple[Blocks, dict[str, str]]:
    """The blocks, at most `most` of train and valid, and the files' checksums. `vocabulary` as for `tokenizer`.

    The tokens of all lines are concatenated; what does not fill a block at the end of a part is dropped. Empty lines
    give no tokens (as in the `datasets` library's WikiText), others at most `longest_line`.
    """
    checksums, key = _identity(source)
    coder, coder_checksums = tokenizer(source, vocabulary)
    most_tokens = {part: blocks and blocks * context for part, blocks in zip(("train", "valid"), most, strict=True)}

    def build() -> dict[str, np.ndarray]:
        return {
            part: bpe.encode(coder, lines, longest_line, most_tokens[part], f"{source.label} ({part})")
            for part, lines in _read_lines(source).items()
        }

    settings = {"vocabulary": vocabulary, "longest_line": longest_line, "most": most_tokens, **coder_checksums}
    parts = {part: pack(tokens, context) for part, tokens in cached("tokens", key | settings, build).items()}
    for part, blocks in parts.items():
        if not len(blocks):
            raise CdgrabError(f"{source.description}: the {part} part is too short for one block of {context} tokens")
    return Blocks(**parts, vocabulary=coder.get_vocab_size()), checksums | coder_checksums


def tokenizer(source: Source, vocabulary: int | None) -> tuple[Tokenizer, dict[str, str]]:
    """`vocabulary` tokens trained on the source's training text; None: GPT-2's own, and their files' checksums."""
    if vocabulary is None:
        refuse_missing_tokens(source)
        return bpe.read_gpt2(source.files[-1].parent, GET)

    def build() -> dict[str, np.ndarray]:
        lines = _read_lines(source)["train"]
        ends = np.cumsum([len(line) for line in lines])
        lines = lines[: 1 + np.searchsorted(ends, LEARNT_FROM)]
        return {"tokenizer": np.array(bpe.train(lines, vocabulary).to_str())}

    stored = cached("tokenizer", _identity(source)[1] | {"vocabulary": vocabulary}, build)
    return bpe.from_text(str(stored["tokenizer"])), {}


def refuse_missing_tokens(source: Source) -> None:
    """Refuse a source without the files of GPT-2's own tokens."""
    if source.embedded:
        raise CdgrabError("GPT-2's own tokens are not embedded: set task.vocabulary to a number of tokens to train")
    for path in source.files[-len(bpe.PUBLISHED) :]:
        require_file(path, GET)


def pack(tokens: np.ndarray, context: int) -> np.ndarray:
    """[tokens] -> [blocks, context]."""
    return tokens[: len(tokens) // context * context].reshape(-1, context)


def _identity(source: Source) -> tuple[dict[str, str], dict]:
    """Checksums of the text, and the key for everything made from it."""
    if source.embedded:
        (path,) = source.files
        checksums = wikitext.PACKAGED.check(path)
    elif source.papers_own:
        train, valid, *_ = source.files
        if (found := count_lines(train)) != TRAIN_LINES:
            raise CdgrabError(
                f"{train} is not the training part of WikiText-103: {found:,} lines instead of {TRAIN_LINES:,}; {GET}"
            )
        checksums = {train.name: sha256(train), valid.name: check_file(valid, VALID, GET)}
    else:
        novels = "".join(f"{sha256(path)}  {path.name}\n" for path in _novels(source.files[0]))
        checksums = {"novels": hashlib.sha256(novels.encode()).hexdigest()}  # of what sha256sum *.txt prints
    code = {module.__name__: sha256(Path(module.__file__)) for module in (bpe, wikitext)}
    code |= {__name__: sha256(Path(__file__)), "tokenizers": metadata.version("tokenizers")}
    return checksums, {"text": checksums, "code": code}


def count_lines(path: Path) -> int:
    with open(path, "rb") as file:
        return sum(1 for _ in file)


def _read_lines(source: Source) -> dict[str, list[str]]:
    """Lines with their ends, by part; blank ones are left out."""
    if source.papers_own:
        texts = [_read(path) for path in source.files[:2]]
        return {"train": _lines(texts[:1]), "valid": _lines(texts[1:])}
    if source.embedded:
        texts = [wikitext.strip_markup(markup) + "\n" for markup in wikitext.articles(source.files[0])]
    else:
        texts = [_read(path) for path in _novels(source.files[0])]
    if len(texts) < 2:
        raise CdgrabError(f"{source.files[0]} must hold at least two text files, one of them for validation")
    held_out = texts[::HELD_OUT_EVERY]
    del texts[::HELD_OUT_EVERY]
    return {"train": _lines(texts), "valid": _lines(held_out)}


def _lines(texts: list[str]) -> list[str]:
    return [f"{line}\n" for text in texts for line in text.removesuffix("\n").split("\n") if line.strip()]


def _novels(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.txt"), key=lambda path: path.name)


def _read(path: Path) -> str:
    """All kinds of line ends become one kind; a byte order mark is dropped."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CdgrabError(f"the data file {path} cannot be read as UTF-8 text ({error})") from error
