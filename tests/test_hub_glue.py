"""GLUE of the hub, from small repositories in its format: files that the suite's own reader takes."""

import csv
import re
from dataclasses import replace

import datasets
import pytest
from hub_repositories import REAL, make_repository, needs, offline  # noqa: F401

from cdgrab.errors import CdgrabError
from experiments.data import glue, hub_glue
from experiments.data.sources import sha256

HUB_TEXTS = {"MNLI": ("premise", "hypothesis"), "QQP": ("question1", "question2"), "QNLI": ("question", "sentence")}
HUB_TEXTS |= {
    "SST-2": ("sentence",),
    "CoLA": ("sentence",),
    **dict.fromkeys(("MRPC", "RTE"), ("sentence1", "sentence2")),
}
SENTENCES = ['He said "no', "naïve, 戦場 \u2028 x", "it's \x85 'so'", '"', "1\t2\r\n3", "trailing "]


def glue_rows(name, count, labels=None, classes=None):
    """As on the hub: texts, label, idx."""
    classes = classes or hub_glue.TABLES[name].classes
    columns = {c: [f"{SENTENCES[(i + k) % 6]}" for i in range(count)] for k, c in enumerate(HUB_TEXTS[name])}
    labels = labels or [i % len(classes) for i in range(count)]
    features = {c: datasets.Value("string") for c in columns} | {"label": datasets.ClassLabel(names=list(classes))}
    table = columns | {"label": labels, "idx": list(range(count))}
    return datasets.Dataset.from_dict(table, datasets.Features(features | {"idx": datasets.Value("int32")}))


def glue_repository(folder, name, **changes):
    """And the layout that goes with it: 12 rows for training, 6 or 5 for validation."""
    counts = dict(zip(glue.LAYOUTS[name].rows, (12, 6, 5), strict=False))
    splits = {file[:-4].replace("dev", "validation"): glue_rows(name, n, **changes) for file, n in counts.items()}
    repository = make_repository(folder, {hub_glue.TABLES[name].config: splits})
    return repository, splits, {name: replace(glue.LAYOUTS[name], rows=counts)}


@pytest.mark.parametrize("name", hub_glue.TABLES)
def test_glue_is_read_back_as_it_was(tmp_path, monkeypatch, name):
    repository, splits, layouts = glue_repository(tmp_path / "repository", name)
    paths = hub_glue.glue(tmp_path / "data", name, repository, layouts)
    assert [path.name for path in paths] == list(layouts[name].rows)
    for layout_name, layout in layouts.items():
        monkeypatch.setitem(glue.LAYOUTS, layout_name, layout)
    sentences, _ = glue.load(glue.locate(name, root=str(tmp_path / "data")))
    for part, rows in zip((sentences.train, *sentences.validation), splits.values(), strict=True):
        texts = zip(*(rows[column] for column in HUB_TEXTS[name]), strict=True)
        plain = [tuple(re.sub(r"[\t\r\n]", " ", text).strip() for text in row) for row in texts]
        assert part.texts == plain and part.labels.tolist() == rows["label"]
    assert sentences.classes == len(hub_glue.TABLES[name].classes) and sentences.skipped == 0


def test_glue_columns_stand_where_the_usual_script_puts_them(tmp_path):
    """Positions, which other people's readers go by: the texts' and the label's, from the first column."""
    expected = {
        "CoLA": [(3, 1)] * 2,
        "SST-2": [(0, 1)] * 2,
        "MRPC": [(3, 4, 0)] * 2,
        "RTE": [(1, 2, 3)] * 2,
        "QNLI": [(1, 2, 3)] * 2,
        "QQP": [(3, 4, 5)] * 2,
        "MNLI": [(8, 9, 11), (8, 9, 15), (8, 9, 15)],
    }
    for name, positions in expected.items():
        repository, splits, layouts = glue_repository(tmp_path / f"repository-{name}", name)
        layout = layouts[name]
        files = hub_glue.glue(tmp_path / "data", name, repository, layouts)
        for path, columns, rows in zip(files, positions, splits.values(), strict=True):
            lines = [line.split("\t") for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
            if name != "CoLA":
                header = lines.pop(0)
                assert [header[c] for c in columns] == [*layout.sentences, layout.label]
            first = [*(rows[0][column] for column in HUB_TEXTS[name]), layout.classes[rows[0]["label"]]]
            assert [lines[0][c] for c in columns] == first and len(lines) == len(rows)


@needs("glue/RTE/train.tsv", "glue/SST-2/train.tsv", "glue/QNLI/dev.tsv")
def test_real_glue_files_survive_the_hub_to_the_byte(tmp_path):
    """The files of three datasets hold nothing that the hub does not have."""
    for name, names in {"RTE": ("train", "dev"), "SST-2": ("train", "dev"), "QNLI": ("dev",)}.items():
        table, layout, splits = hub_glue.TABLES[name], glue.LAYOUTS[name], {}
        for file in names:
            with open(REAL / f"glue/{name}/{file}.tsv", encoding="utf-8", newline="") as opened:
                rows = list(csv.DictReader(opened, delimiter="\t", quoting=csv.QUOTE_NONE))
            columns = {column: [row[column] for row in rows] for column in HUB_TEXTS[name]}
            columns |= {"label": [layout.classes.index(row["label"]) for row in rows], "idx": list(range(len(rows)))}
            features = {c: datasets.Value("string") for c in HUB_TEXTS[name]}
            features |= {"label": datasets.ClassLabel(names=list(table.classes)), "idx": datasets.Value("int32")}
            splits[file.replace("dev", "validation")] = datasets.Dataset.from_dict(columns, datasets.Features(features))
        repository = make_repository(tmp_path / name, {table.config: splits})
        wanted = {name: replace(layout, rows={f"{file}.tsv": layout.rows[f"{file}.tsv"] for file in names})}
        for path in hub_glue.glue(tmp_path, name, repository, wanted):
            assert sha256(path) == sha256(REAL / "glue" / name / path.name)


@pytest.mark.parametrize(
    ("changes", "rows", "message"),
    [
        ({}, {"train.tsv": 13}, "has 12 good rows and 0 others, instead of 13"),
        ({}, {"train.tsv": 12_000}, "instead of 12,000"),
        ({"classes": ("not_entailment", "entailment")}, {}, "are .'not_entailment', 'entailment'., not entailment"),
    ],
)
def test_wrong_glue_is_refused_and_nothing_is_left(tmp_path, changes, rows, message):
    repository, _, layouts = glue_repository(tmp_path / "repository", "RTE", **changes)
    layouts = {"RTE": replace(layouts["RTE"], rows=layouts["RTE"].rows | rows)}
    with pytest.raises(CdgrabError, match=message):
        hub_glue.glue(tmp_path / "data", "RTE", repository, layouts)
    assert not (tmp_path / "data").exists()


def test_glue_without_labels_is_refused(tmp_path):
    """The hub marks the labels of test splits, which are secret, by -1."""
    _, splits, layouts = glue_repository(tmp_path / "right", "RTE")
    splits["train"] = glue_rows("RTE", 12, labels=[0, 1, -1] * 4)
    repository = make_repository(tmp_path / "wrong", {"rte": splits})
    with pytest.raises(CdgrabError, match="4 broken ones|4 others"):
        hub_glue.glue(tmp_path / "data", "RTE", repository, layouts)
    assert not (tmp_path / "data").exists()


def test_glue_files_of_other_people_are_kept(tmp_path):
    repository, _, layouts = glue_repository(tmp_path / "repository", "SST-2")
    path = tmp_path / "glue" / "SST-2" / "train.tsv"
    path.parent.mkdir(parents=True)
    mine = "sentence\tlabel\n" + "mine\t1\n" * 12
    path.write_text(mine)
    hub_glue.glue(tmp_path, "SST-2", repository, layouts)
    assert path.read_text() == mine and (path.parent / "dev.tsv").is_file()
    path.write_text(mine[:30])
    hub_glue.glue(tmp_path, "SST-2", repository, layouts)
    assert path.read_text() != mine and len(path.read_text().splitlines()) >= 13
