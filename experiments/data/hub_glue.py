"""GLUE of the Hugging Face hub, written as the files of the usual download script."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from cdgrab.errors import CdgrabError
from experiments.data.download import install
from experiments.data.glue import ENTAILMENT, LAYOUTS, Layout, read_part
from experiments.data.hub import open_split, rows

GLUE = "nyu-mll/glue"


@dataclass(frozen=True)
class Table:
    """How a dataset is stored on the hub, and the columns of its files. What the hub lacks stays empty in the files."""

    config: str
    classes: tuple[str, ...]  # their names on the hub, by label
    columns: tuple[str, ...]
    renamed: dict[str, str] = field(default_factory=dict)  # column of the files: column of the hub
    more: tuple[str, ...] = ()  # columns that only validation files have, before their last


SENTENCES = ("sentence1", "sentence2")
# In the order in which they are fetched, small ones first; QQP, whose rows the hub has revised before, is last.
TABLES = {
    "CoLA": Table("cola", ("unacceptable", "acceptable"), ("source", "label", "mark", "sentence")),
    "MRPC": Table(
        *("mrpc", ("not_equivalent", "equivalent"), ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String")),
        {"#1 String": "sentence1", "#2 String": "sentence2"},
    ),
    "RTE": Table("rte", ENTAILMENT, ("index", *SENTENCES, "label"), {"index": "idx"}),
    "SST-2": Table("sst2", ("negative", "positive"), ("sentence", "label")),
    "QNLI": Table("qnli", ENTAILMENT, ("index", "question", "sentence", "label"), {"index": "idx"}),
    "MNLI": Table(
        *("mnli", ("entailment", "neutral", "contradiction")),
        (
            *("index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse"),
            *("sentence1_parse", "sentence2_parse", *SENTENCES, "label1", "gold_label"),
        ),
        {"index": "idx", "sentence1": "premise", "sentence2": "hypothesis"},
        more=("label2", "label3", "label4", "label5"),
    ),
    "QQP": Table(
        "qqp", ("not_duplicate", "duplicate"), ("id", "qid1", "qid2", "question1", "question2", "is_duplicate")
    ),
}
# The hub has left out three broken rows of QQP.
HUB_LAYOUTS = LAYOUTS | {"QQP": replace(LAYOUTS["QQP"], rows=LAYOUTS["QQP"].rows | {"train.tsv": 363_846})}


def glue(root: Path, dataset: str, repository: str = GLUE, layouts: dict[str, Layout] = HUB_LAYOUTS) -> list[Path]:
    """glue/<dataset>/{train,dev}.tsv; MNLI has two validation files. Files that the suite can read are kept."""
    layout = layouts[dataset]

    def is_right(path: Path) -> bool:
        try:
            return path.is_file() and bool(read_part(path, layout))
        except CdgrabError:
            return False

    write = partial(_write, repository, TABLES[dataset], layout)
    return install(root / "glue" / dataset, layout.rows, is_right, write, repository)


def _write(repository: str, table: Table, layout: Layout, path: Path) -> None:
    """Checked by reading it back: every row of the split, and as many as were published."""
    split = path.stem.replace("dev", "validation")
    what = f"{repository} ({table.config}, {split})"
    texts = tuple(table.renamed.get(name, name) for name in layout.sentences)
    found = open_split(repository, table.config, split, (*texts, "label"))
    if (classes := getattr(found.features["label"], "names", None)) != list(table.classes):
        raise CdgrabError(f"the labels of {what} are {classes}, not {', '.join(table.classes)}")
    spelled = dict(enumerate(layout.classes))
    columns = table.columns if split == "train" else (*table.columns[:-1], *table.more, table.columns[-1])
    with open(path, "w", encoding="utf-8", newline="") as file:
        if layout.header is None:
            file.write("\t".join(columns) + "\n")
        for row in rows(found, f"{table.config} ({split})"):
            cells = {name: row.get(table.renamed.get(name, name), "") for name in columns}
            # the hub marks a missing label with -1: the cell stays empty, and the count below refuses the file
            cells[layout.label] = spelled.get(row["label"], "")
            file.write("\t".join(map(_cell, cells.values())) + "\n")
    part, skipped = read_part(path, layout)
    if (len(part.texts), skipped) != (layout.rows[path.name], 0):
        raise CdgrabError(
            f"{what} has {len(part.texts):,} good rows and {skipped:,} others, instead of {layout.rows[path.name]:,}"
        )


def _cell(value: object) -> str:
    """A tab or a line end inside a text would end its cell or row."""
    return "" if value is None else str(value).translate({9: " ", 10: " ", 13: " "})
