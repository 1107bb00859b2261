"""GLUE in the files of the usual download script, or the rated film reviews that ship in a pip package."""

from __future__ import annotations

import csv
import io
import sys
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cdgrab.errors import CdgrabError
from experiments.data.sources import Source, check_file, check_files, data_root

GET = "get it with `make data-glue`"
ENTAILMENT = ("entailment", "not_entailment")


@dataclass(frozen=True)
class Layout:
    """How a dataset's files are organised. `rows`: the published number of rows of each file."""

    rows: dict[str, int]  # the training file first, then one or more validation files
    sentences: tuple[str, ...]  # names of columns
    label: str
    classes: tuple[str, ...] = ("0", "1")
    header: tuple[str, ...] | None = None  # names of the columns, if the file's first line does not have them


# In the order of the paper's Table 1, then those that it leaves out.
LAYOUTS = {
    "MNLI": Layout(
        {"train.tsv": 392_702, "dev_matched.tsv": 9_815, "dev_mismatched.tsv": 9_832},
        ("sentence1", "sentence2"),
        "gold_label",
        ("entailment", "neutral", "contradiction"),
    ),
    "QQP": Layout({"train.tsv": 363_849, "dev.tsv": 40_430}, ("question1", "question2"), "is_duplicate"),
    "QNLI": Layout({"train.tsv": 104_743, "dev.tsv": 5_463}, ("question", "sentence"), "label", ENTAILMENT),
    "SST-2": Layout({"train.tsv": 67_349, "dev.tsv": 872}, ("sentence",), "label"),
    "CoLA": Layout(
        *({"train.tsv": 8_551, "dev.tsv": 1_043}, ("sentence",), "label"),
        header=("source", "label", "mark", "sentence"),
    ),
    "MRPC": Layout({"train.tsv": 3_668, "dev.tsv": 408}, ("#1 String", "#2 String"), "Quality"),
    "RTE": Layout({"train.tsv": 2_490, "dev.tsv": 277}, ("sentence1", "sentence2"), "label", ENTAILMENT),
}
DEFAULT = "SST-2"
PAPERS = ("MNLI", "QQP", "QNLI", "SST-2")
# A file may differ from the published one by this share of its rows: copies of QQP have some broken ones, and at least
# one copy of MRPC lacks a pair.
TOLERATED = 0.001

REQUIREMENT = "vaderSentiment==3.3.2"
PACKAGED_NAME = "vaderSentiment-3.3.2.tar.gz"
PACKAGED = (2466783, "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9")
INNER_ARCHIVE = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
INNER_FILE = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
WEAK = 0.5  # on the scale from -4 to 4


@dataclass(frozen=True)
class Part:
    """texts: one or two sentences per row; labels int64 [rows]."""

    texts: list[tuple[str, ...]]
    labels: np.ndarray


@dataclass(frozen=True)
class Sentences:
    """`validation` has two parts for MNLI (matched and mismatched), otherwise one. `skipped` rows were broken."""

    train: Part
    validation: tuple[Part, ...]
    classes: int
    skipped: int


def locate(dataset: str = DEFAULT, data: str = "auto", root: str | None = None) -> Source:
    """The source that a run with these settings uses. Does not read the files yet."""
    if dataset not in LAYOUTS:
        raise CdgrabError(f"task.dataset must be one of {', '.join(LAYOUTS)}, got {dataset!r}")
    folder = data_root(root, data)
    if dataset == DEFAULT and not (folder and (folder / "glue").is_dir()):
        return _embedded()
    missing = missing_files(root) if data == "auto" else dict.fromkeys(LAYOUTS, ["its files"])
    if missing[dataset]:
        there = [name for name, files in missing.items() if not files]
        others = f"there are {', '.join(there)}" if there else "data=embedded needs no files"
        raise CdgrabError(
            f"task.dataset={dataset} needs {' and '.join(missing[dataset])} in CDGRAB_DATA ({GET}); {others}"
        )
    files = tuple(folder / "glue" / dataset / name for name in LAYOUTS[dataset].rows)
    return Source("GLUE", f"GLUE {dataset}", files, papers_own=dataset in PAPERS)


def missing_files(root: str | None = None) -> dict[str, list[str]]:
    """By dataset, the files that are not there, relative to the data root."""
    folder = data_root(root)
    wanted = {name: [f"glue/{name}/{file}" for file in layout.rows] for name, layout in LAYOUTS.items()}
    return {
        name: [file for file in files if not (folder and (folder / file).is_file())] for name, files in wanted.items()
    }


def load(source: Source) -> tuple[Sentences, dict[str, str]]:
    """All rows, and the files' checksums."""
    if source.embedded:
        return _load_packaged(source.files[0])
    layout = LAYOUTS[source.files[0].parent.name]
    checksums = check_files(source.files, {}, GET)
    parts, skipped = zip(*(read_part(path, layout) for path in source.files), strict=True)
    return Sentences(parts[0], parts[1:], len(layout.classes), sum(skipped)), checksums


def read_part(path: Path, layout: Layout) -> tuple[Part, int]:
    """The rows of one file, and how many were skipped: too few or too many columns, or a label that does not exist."""
    texts, labels, skipped = [], [], 0
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:  # MRPC begins with a byte order mark
            rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            header = layout.header or next(rows, ())
            *columns, label = (_column(header, name, path) for name in (*layout.sentences, layout.label))
            for row in rows:
                if len(row) == len(header) and row[label] in layout.classes:
                    texts.append(tuple(row[column].strip() for column in columns))
                    labels.append(layout.classes.index(row[label]))
                else:
                    skipped += 1
    except (UnicodeError, csv.Error) as error:
        raise CdgrabError(f"the data file {path} cannot be read ({error}); {GET}") from error
    published = layout.rows[path.name]
    if abs(len(texts) - published) > max(1, TOLERATED * published):
        broken = f" and {skipped:,} broken ones" * bool(skipped)
        raise CdgrabError(
            f"the data file {path} is damaged: {len(texts):,} rows{broken} instead of {published:,}; {GET}"
        )
    return Part(texts, np.array(labels, dtype=np.int64)), skipped


def _column(header: tuple[str, ...] | list[str], name: str, path: Path) -> int:
    if name not in header:
        raise CdgrabError(f"the data file {path} is damaged: its first line names no column {name!r}; {GET}")
    return header.index(name)


# -- the packaged film reviews ----------------------------------------------------------------------------------------


def _embedded() -> Source:
    folder = Path(sys.prefix) / "share" / "cdgrab"
    if not (folder / PACKAGED_NAME).is_file():
        raise CdgrabError(
            "the embedded data is in the source distribution of a package: run `pip download --no-deps "
            f"--no-build-isolation --no-binary vaderSentiment --dest {folder} {REQUIREMENT}` (`make setup` does)"
        )
    description = "film reviews rated by people (vaderSentiment)"
    return Source("embedded", description, (folder / PACKAGED_NAME,), embedded=True)


def _load_packaged(path: Path) -> tuple[Sentences, dict[str, str]]:
    """Positive or negative by the sign of the mean rating. Weakly rated sentences are left out, as SST-2 leaves out
    neutral ones. A fifth is for validation, chosen by a checksum of the sentence."""
    checksum = check_file(path, PACKAGED, "delete it and run `make setup` after `rm .venv/.ready`")
    parts: dict[bool, list] = {False: [], True: []}
    for rating, sentence in _rated(path):
        if abs(rating) >= WEAK:
            parts[zlib.crc32(sentence.encode()) % 5 == 0].append((sentence, rating > 0))
    train, validation = (
        Part([(sentence,) for sentence, _ in rows], np.array([positive for _, positive in rows], dtype=np.int64))
        for rows in parts.values()
    )
    return Sentences(train, (validation,), classes=2, skipped=0), {path.name: checksum}


def _rated(path: Path) -> Iterator[tuple[float, str]]:
    """Mean rating and sentence of every row, from an archive inside the archive."""
    with tarfile.open(path) as outer, tarfile.open(fileobj=outer.extractfile(INNER_ARCHIVE)) as inner:
        for line in io.TextIOWrapper(inner.extractfile(INNER_FILE), encoding="utf-8"):
            _, rating, sentence = line.rstrip("\n").split("\t")
            yield float(rating), sentence
