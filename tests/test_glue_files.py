"""GLUE: every format of file, what is missing or broken, and the embedded sentences."""

import os
import sys

import numpy as np
import pytest
from glue_cases import packaged_sentences, use_counts, write

from cdgrab.errors import CdgrabError
from experiments.data import glue
from scripts import reproduce

# Two rows of each dataset in its own layout, and what they mean. Quotation marks are ordinary characters.
FILES = {
    "MNLI": (
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
        "sentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label\n"
        '0\t31\t31n\tfiction\t( a )\t( b )\t(A)\t(B)\tShe said "no.\tShe spoke.\tneutral\tneutral\n'
        "1\t32\t32c\tfiction\t( a )\t( b )\t(A)\t(B)\tIt rains.\tIt is dry.\tcontradiction\tcontradiction\n",
        [(('She said "no.', "She spoke."), 1), (("It rains.", "It is dry."), 2)],
    ),
    "QQP": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
        '1\t2\t3\tWhat is "x"?\tWhat is y?\t0\n4\t5\t6\tWhy?\tFor what reason?\t1\n',
        [(('What is "x"?', "What is y?"), 0), (("Why?", "For what reason?"), 1)],
    ),
    "QNLI": (
        "index\tquestion\tsentence\tlabel\n0\tWho?\tHe did.\tentailment\n1\tWhen?\tHe did.\tnot_entailment\n",
        [(("Who?", "He did."), 0), (("When?", "He did."), 1)],
    ),
    "SST-2": ('sentence\tlabel\na "fine film \t1\ndull \t0\n', [(('a "fine film',), 1), (("dull",), 0)]),
    "CoLA": ("gj04\t1\t\tHe sings.\ngj04\t0\t*\tSings he the.\n", [(("He sings.",), 1), (("Sings he the.",), 0)]),
    "MRPC": (
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t10\t11\tHe 's left .\tHe left .\n0\t12\t13\t\" A\tB\n",
        [(("He 's left .", "He left ."), 1), (('" A', "B"), 0)],
    ),
    "RTE": (
        "index\tsentence1\tsentence2\tlabel\n0\tA and B.\tA.\tentailment\n1\tA.\tB.\tnot_entailment\n",
        [(("A and B.", "A."), 0), (("A.", "B."), 1)],
    ),
}


@pytest.mark.parametrize("dataset", FILES)
def test_every_layout_is_read_as_published(tmp_path, monkeypatch, dataset):
    use_counts(monkeypatch, 2)
    text, expected = FILES[dataset]
    write(tmp_path, dataset, text)
    source = glue.locate(dataset, root=str(tmp_path))
    sentences, checksums = glue.load(source)
    for part in (sentences.train, *sentences.validation):
        assert list(zip(part.texts, part.labels.tolist(), strict=True)) == expected
    assert len(sentences.validation) == (2 if dataset == "MNLI" else 1) and sentences.skipped == 0
    assert sentences.classes == (3 if dataset == "MNLI" else 2) and set(checksums) == set(glue.LAYOUTS[dataset].rows)
    assert source.papers_own == (dataset in ("MNLI", "QQP", "QNLI", "SST-2")) and dataset in source.description


def test_broken_rows_are_skipped_and_counted_but_a_cut_file_is_refused(tmp_path, monkeypatch):
    use_counts(monkeypatch, 2)
    write(tmp_path, "SST-2", FILES["SST-2"][0] + "no label\nthree\tcells\there\nunknown label\t7\n")
    sentences, _ = glue.load(glue.locate("SST-2", root=str(tmp_path)))
    assert sentences.skipped == 6 and len(sentences.train.texts) == 2
    use_counts(monkeypatch, 67_349)
    with pytest.raises(CdgrabError, match=r"train.tsv is damaged: 2 rows and 3 broken ones instead of 67,349; get it"):
        glue.load(glue.locate("SST-2", root=str(tmp_path)))


@pytest.mark.parametrize(
    ("content", "message"),
    [("sentence\tscore\na\t1\n", "names no column 'label'"), ("", "names no column"), ("\xff\tlabel\n", "be read")],
)
def test_files_of_something_else_are_refused(tmp_path, content, message):
    write(tmp_path, "SST-2", "")
    (tmp_path / "glue" / "SST-2" / "train.tsv").write_bytes(content.encode("latin-1"))
    with pytest.raises(CdgrabError, match=message) as refused:
        glue.load(glue.locate("SST-2", root=str(tmp_path)))
    assert "\n" not in str(refused.value) and "train.tsv" in str(refused.value)


def test_missing_datasets_are_listed_and_skipped(tmp_path, monkeypatch, capsys):
    write(tmp_path, "CoLA", FILES["CoLA"][0])
    write(tmp_path, "QNLI", FILES["QNLI"][0], names=["dev.tsv"])
    monkeypatch.setenv("CDGRAB_DATA", str(tmp_path))
    assert glue.missing_files()["QNLI"] == ["glue/QNLI/train.tsv"] and glue.missing_files()["CoLA"] == []
    with pytest.raises(CdgrabError, match=r"QNLI needs glue/QNLI/train.tsv .*make data-glue.*there are CoLA"):
        glue.locate("QNLI")
    with pytest.raises(CdgrabError, match="SST-2 needs"):
        glue.locate()
    with pytest.raises(CdgrabError, match="must be one of MNLI"):
        glue.locate("nonsense")
    with pytest.raises(CdgrabError, match="CoLA needs its files"):
        glue.locate("CoLA", data="embedded")
    assert reproduce._columns_with_files("table1_glue", []) == ["task.dataset=CoLA"]
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == [f"skipped {n}" for n in glue.LAYOUTS if n != "CoLA"]
    assert "needs glue/QNLI/train.tsv in CDGRAB_DATA (get it with `make data-glue`)" in said[2]
    assert reproduce._columns_with_files("fig3a_lr_hmda", ["data=embedded"]) == []


@packaged_sentences
def test_sentences_that_are_there_in_part_are_not_replaced_by_embedded_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("CDGRAB_DATA", str(tmp_path))
    assert glue.locate().embedded
    write(tmp_path, "SST-2", FILES["SST-2"][0], names=["train.tsv"])
    with pytest.raises(CdgrabError, match=r"SST-2 needs glue/SST-2/dev.tsv in CDGRAB_DATA .*data=embedded needs no"):
        glue.locate()
    assert glue.locate(data="embedded").embedded
    assert reproduce._columns_with_files("table1_glue", ["data=embedded"]) == []


def test_embedded_sentences_missing_is_one_sentence_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(CdgrabError, match=r"pip download .*--dest \S+/share/cdgrab vaderSentiment==3.3.2"):
        glue.locate(data="embedded")


@packaged_sentences
def test_embedded_sentences():
    source = glue.locate(data="embedded")
    sentences, _ = glue.load(source)
    (validation,) = sentences.validation
    assert source.embedded and not source.papers_own
    assert len(sentences.train.texts) + len(validation.texts) == 10_605 - 533  # 533 are rated between -0.5 and 0.5
    assert len(validation.texts) == pytest.approx(2_014, abs=100)
    assert not set(sentences.train.texts) & set(validation.texts)
    both = (sentences.train, validation)
    labels = {text: label for part in both for text, label in zip(part.texts, part.labels, strict=True)}
    assert labels[("Offers that rare combination of entertainment and education.",)] == 1  # rated 2.47
    assert labels[("Effective but too tepid biopic",)] == 0  # rated -0.6


@pytest.mark.skipif("CDGRAB_DATA" not in os.environ, reason="needs real GLUE files: set CDGRAB_DATA (`make data-glue`)")
def test_real_files_have_the_published_counts():
    classes = {"SST-2": [29_780, 37_569], "CoLA": [2_528, 6_023], "RTE": [1_249, 1_241]}
    there = [name for name, files in glue.missing_files().items() if not files]
    assert there, "no GLUE dataset under CDGRAB_DATA"
    for name in there:
        sentences, _ = glue.load(glue.locate(name))
        sizes = [len(part.texts) for part in (sentences.train, *sentences.validation)]
        assert sizes == pytest.approx(list(glue.LAYOUTS[name].rows.values()), rel=glue.TOLERATED)
        assert np.bincount(sentences.train.labels).tolist() == classes.get(name) or name not in classes
