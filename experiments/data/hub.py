"""Datasets of the Hugging Face hub, written as the ordinary files that the suite reads: checked, and all or none.

A repository is named as on the hub, or is a folder in the same format: parquet files, and a dataset card (README.md)
whose yaml part lists them. Files that are there and right are not touched; no wrong or half-written file is left.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cdgrab.errors import CdgrabError
from experiments.data import bpe, cifar10, wikitext
from experiments.data.download import fetch_missing, install, reason
from experiments.data.progress import progress
from experiments.data.sources import Published, by_checksum
from experiments.data.text_blocks import TRAIN_LINES, VALID, count_lines

if TYPE_CHECKING:
    from datasets import Dataset

WIKITEXT, CIFAR10, GPT2 = "Salesforce/wikitext", "uoft-cs/cifar10", "openai-community/gpt2"
GPT2_ORIGIN = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
GPT2_NAMES = {"vocab.json": "encoder.json", "merges.txt": "vocab.bpe"}  # our names: OpenAI's names
ROWS_AT_ONCE = 1000


def open_split(repository: str, config: str, split: str, columns: tuple[str, ...]) -> Dataset:
    """One split of a repository, through the `datasets` library. It must have these columns."""
    _require_network(repository)
    import datasets  # takes a second: only for those who need it

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    name = f"{repository} ({config}, {split})"
    try:
        dataset = datasets.load_dataset(repository, config, split=split)
    except Exception as error:  # of a dozen libraries
        raise CdgrabError(f"{name} cannot be loaded with the datasets library ({reason(error)})") from error
    if missing := [column for column in columns if column not in dataset.column_names]:
        raise CdgrabError(f"{name} has no column {missing[0]!r}, only {', '.join(dataset.column_names)}")
    return dataset


def _require_network(repository: str) -> None:
    """Fails at once where the libraries would keep trying for half a minute. With HF_HUB_OFFLINE only the cache is
    used."""
    from huggingface_hub import constants

    if not Path(repository).is_dir() and not constants.HF_HUB_OFFLINE:
        _ask(constants.ENDPOINT)


@functools.cache
def _ask(address: str) -> None:
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=20).close()
    except urllib.error.HTTPError:
        pass  # an error is an answer too
    except OSError as error:
        raise CdgrabError(f"{address} cannot be reached ({reason(error)})") from error


def rows(dataset: Dataset, what: str) -> Iterator[dict]:
    """Rows one by one, with a progress bar; many are read at once, which is much faster."""
    with progress(total=len(dataset), unit="row", desc=f"writing {what}") as bar:
        for some in _batches_of(dataset, what):
            for values in zip(*some.values(), strict=True):
                yield dict(zip(some, values, strict=True))
            bar.update(len(values))


def _batches_of(dataset: Dataset, what: str) -> Iterator[dict]:
    try:
        yield from dataset.iter(ROWS_AT_ONCE)
    except Exception as error:  # of the libraries that read the files
        raise CdgrabError(f"the rows of {what} cannot be read ({reason(error)})") from error


# -- WikiText ---------------------------------------------------------------------------------------------------------

PUBLISHED_103 = {
    "valid.tokens": VALID,
    "test.tokens": (1281077, "56db52eb157b1ab5c89646eef70510c1eca6e12a3bfdb99f0d6b05b4eacb75b9"),
}
BLANK = " \n"  # an empty line of the original; on the hub it is "", while other rows keep their line ends


def wikitext2(root: Path, repository: str = WIKITEXT, published: Published = wikitext.PUBLISHED) -> list[Path]:
    """wikitext-2/{train,valid,test}.txt"""
    write = functools.partial(_write_text, repository, "wikitext-2-v1")
    return install(root / "wikitext-2", published, by_checksum(published), write, repository)


def wikitext103(
    root: Path, repository: str = WIKITEXT, published: Published = PUBLISHED_103, train_lines: int = TRAIN_LINES
) -> list[Path]:
    """wikitext-103/{train,valid,test}.tokens"""
    as_published = by_checksum(published)

    def is_right(path: Path) -> bool:
        return as_published(path) and (path.name in published or count_lines(path) == train_lines)

    write = functools.partial(_write_text, repository, "wikitext-103-v1")
    return install(root / "wikitext-103", ["train.tokens", *published], is_right, write, repository)


def _write_text(repository: str, config: str, path: Path) -> None:
    split = path.stem.replace("valid", "validation")
    dataset = open_split(repository, config, split, ("text",))
    with open(path, "w", encoding="utf-8", newline="") as file:
        try:
            file.writelines(row["text"] or BLANK for row in rows(dataset, path.name))
        except (TypeError, UnicodeError) as error:
            raise CdgrabError(
                f"the texts of {repository} ({config}, {split}) are no texts ({reason(error)})"
            ) from error


# -- GPT-2's tokens ---------------------------------------------------------------------------------------------------


def gpt2(root: Path, repository: str = GPT2, published: Published = bpe.PUBLISHED) -> list[Path]:
    """gpt2/{vocab.json,merges.txt}"""
    write = lambda path: shutil.copyfile(_file(repository, path.name), path)  # noqa: E731
    return install(root / "gpt2", published, by_checksum(published), write, repository)


def gpt2_from_openai(root: Path, origin: str = GPT2_ORIGIN, published: Published = bpe.PUBLISHED) -> list[Path]:
    """The same files from OpenAI's site, where they have other names."""
    return fetch_missing(root / "gpt2", {name: f"{origin}/{GPT2_NAMES[name]}" for name in published}, published)


def _file(repository: str, name: str) -> Path:
    if Path(repository).is_dir():
        if not (path := Path(repository) / name).is_file():
            raise CdgrabError(f"{repository} has no file {name}")
        return path
    _require_network(repository)
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, name))
    except Exception as error:
        raise CdgrabError(f"{name} of {repository} cannot be downloaded ({reason(error)})") from error


# -- CIFAR-10 ---------------------------------------------------------------------------------------------------------


def cifar10_pictures(root: Path, repository: str = CIFAR10) -> list[Path]:
    """cifar-10-batches-bin/{data_batch_1..5,test_batch}.bin, the published files to the byte.

    The hub has the batches in another order (that of the archive they were read from), without their boundaries and
    picture names. A batch is therefore recognised by its checksum.
    """
    published = cifar10.BINARY

    @functools.cache
    def batches() -> dict[str, bytes]:
        size = published["data_batch_1.bin"][0]
        return {
            hashlib.sha256(batch).hexdigest(): batch
            for split in ("train", "test")
            for batch in _batches(open_split(repository, "plain_text", split, ("img", "label")), split, size)
        }

    def write(path: Path) -> None:
        path.write_bytes(batches().get(published[path.name][1], b""))

    folder = root / cifar10.BINARY_FOLDER
    return cifar10.complete(root) or install(folder, published, by_checksum(published), write, repository)


def _batches(dataset: Dataset, split: str, size: int) -> Iterator[bytes]:
    """Pictures as in the binary files, `size` bytes at once."""
    batch = bytearray()
    try:
        for row in rows(dataset, f"pictures ({split})"):
            pixels = np.asarray(row["img"].convert("RGB"))  # [rows, columns, colours]; the files have colours first
            batch += bytes([row["label"]]) + pixels.transpose(2, 0, 1).tobytes()
            if len(batch) >= size:
                yield bytes(batch)
                batch.clear()
    except (OSError, TypeError, ValueError, AttributeError) as error:
        raise CdgrabError(f"a picture of the {split} split cannot be read ({reason(error)})") from error
    yield bytes(batch)  # not empty where the number of pictures is wrong
