"""WikiText and GPT-2's tokens of the hub, what holds for all its datasets, and the command that gets data."""

import re
import sys
from pathlib import Path

import datasets
import huggingface_hub
import pytest
from hub_repositories import REAL, known, make_repository, needs, offline  # noqa: F401

from cdgrab.errors import CdgrabError
from experiments.data import hub, text_blocks, wikitext
from scripts import get_data

LINES = [" \n", " = Title = \n", " \n", " a naïve <unk> \u2028 of 戦場 . \n", " second \x85 , line \n", " \n"]
TEXTS = {"train": LINES * 700, "validation": LINES[1:], "test": LINES[:4]}


def as_on_the_hub(lines):
    """An empty line is an empty row; all others keep their line ends."""
    return datasets.Dataset.from_dict({"text": [line if line.strip() else "" for line in lines]})


def wikitext_repository(folder, config, texts=TEXTS):
    return make_repository(folder, {config: {split: as_on_the_hub(lines) for split, lines in texts.items()}})


def files_of(texts, suffix):
    return {f"{s.replace('validation', 'valid')}{suffix}": "".join(lines).encode() for s, lines in texts.items()}


def test_wikitext2_gives_the_original_files(tmp_path, monkeypatch):
    content = files_of(TEXTS, ".txt")
    monkeypatch.setattr(wikitext, "PUBLISHED", known(content))
    repository = wikitext_repository(tmp_path / "repository", "wikitext-2-v1")
    paths = hub.wikitext2(tmp_path / "data", repository, known(content))
    assert {path.name: path.read_bytes() for path in paths} == content
    corpus, checksums = wikitext.load(wikitext.locate(root=str(tmp_path / "data")))
    words = [w for line in LINES for w in (*line.split(), "<eos>")]
    assert corpus.vocabulary[corpus.train].tolist() == words * 700 and len(checksums) == 3


def test_wikitext103_gives_the_original_files(tmp_path):
    content = files_of(TEXTS, ".tokens")
    train = len(TEXTS["train"])
    published = {name: value for name, value in known(content).items() if name != "train.tokens"}
    repository = wikitext_repository(tmp_path / "repository", "wikitext-103-v1")
    with pytest.raises(CdgrabError, match="does not give the published file train.tokens"):
        hub.wikitext103(tmp_path / "data", repository, published, train + 1)
    assert not (tmp_path / "data").exists()
    paths = hub.wikitext103(tmp_path / "data", repository, published, train)
    assert {path.name: path.read_bytes() for path in paths} == content
    source = text_blocks.locate(root=str(tmp_path / "data"))
    assert source.label == "WikiText-103" and source.files[:2] == tuple(paths[:2])


@needs("wikitext-2/train.txt", "wikitext-2/valid.txt", "wikitext-2/test.txt")
def test_real_wikitext2_survives_the_hub(tmp_path, monkeypatch, capsys):
    """The whole command, with the published checksums."""
    names = {"train": "train", "validation": "valid", "test": "test"}
    texts = {split: (REAL / f"wikitext-2/{name}.txt").open(encoding="utf-8") for split, name in names.items()}
    wikitext_repository(tmp_path / "clones" / hub.WIKITEXT, "wikitext-2-v1", texts)
    assert command(monkeypatch, tmp_path / "data", "lstm-wiki2", "--clones", tmp_path / "clones") == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / f"data/wikitext-2/{n}.txt") for n in names.values()]


# -- what holds for all of them ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda texts: texts["test"].__setitem__(1, " = Other = \n"), "does not give the published file test.txt"),
        (lambda texts: texts["test"].pop(), "does not give the published file test.txt"),
        (lambda texts: texts.pop("test"), "cannot be loaded"),
    ],
)
def test_wrong_rows_are_refused_and_nothing_is_left(tmp_path, damage, message):
    published = known(files_of(TEXTS, ".txt"))
    texts = {split: list(lines) for split, lines in TEXTS.items()}
    damage(texts)
    repository = wikitext_repository(tmp_path / "repository", "wikitext-2-v1", texts)
    with pytest.raises(CdgrabError, match=message) as refused:
        hub.wikitext2(tmp_path / "deep" / "data", repository, published)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "deep").exists()


def test_right_files_are_kept_and_wrong_ones_replaced_only_by_right_ones(tmp_path):
    content = files_of(TEXTS, ".txt")
    repository = wikitext_repository(tmp_path / "repository", "wikitext-2-v1")
    train, valid, test = hub.wikitext2(tmp_path, repository, known(content))
    valid.write_bytes(b"damaged")
    inode = train.stat().st_ino
    with pytest.raises(CdgrabError, match="published file valid.txt"):
        hub.wikitext2(tmp_path, repository, known(content | {"valid.txt": b"something else"}))
    assert valid.read_bytes() == b"damaged" and len(list(train.parent.iterdir())) == 3
    hub.wikitext2(tmp_path, repository, known(content))
    assert valid.read_bytes() == content["valid.txt"] and train.stat().st_ino == inode
    Path(repository, "README.md").unlink()  # with all files there the repository is not even opened
    assert hub.wikitext2(tmp_path, "no/repository", known(content)) == [train, valid, test]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "README.md").write_text("---\nconfigs: 3\n---\n"), "cannot be loaded"),
        (lambda folder: [p.write_bytes(b"PAR1") for p in folder.glob("*/train-*")], "cannot be loaded"),
        (lambda folder: [p.unlink() for p in folder.glob("*/train-*")], "cannot be loaded"),
        (lambda folder: next(folder.glob("*/train-00001*")).unlink(), "cannot be loaded"),  # rows are missing
    ],
)
def test_damaged_repositories_are_one_sentence(tmp_path, damage, message):
    repository = wikitext_repository(tmp_path / "repository", "wikitext-2-v1")
    damage(tmp_path / "repository")
    with pytest.raises(CdgrabError, match=message) as refused:
        hub.wikitext2(tmp_path / "data", repository)
    assert "\n" not in str(refused.value) and not (tmp_path / "data").exists()


def test_a_repository_with_other_columns_is_refused(tmp_path):
    rows = datasets.Dataset.from_dict({"words": ["a", "b"]})
    repository = make_repository(tmp_path / "repository", {"wikitext-2-v1": {"train": rows}})
    with pytest.raises(CdgrabError, match="no column 'text', only words"):
        hub.wikitext2(tmp_path / "data", repository)


def command(monkeypatch, root, *arguments):
    monkeypatch.setenv("CDGRAB_DATA", str(root))
    monkeypatch.setattr(sys, "argv", ["get_data", *map(str, arguments)])
    return get_data.main()


@pytest.mark.parametrize("task", ["glue", "gpt2-wiki103", "GPT2_Wiki103"])
def test_without_a_network_the_command_says_so_in_one_sentence(tmp_path, monkeypatch, capfd, task):
    nobody = "http://127.0.0.1:9"  # a port at which nobody answers
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", nobody)
    only_hub = [
        [o for o in origins if isinstance(o, get_data.FromHub)] for origins in get_data.DATASETS["gpt2-wiki103"]
    ]
    monkeypatch.setitem(get_data.DATASETS, "gpt2-wiki103", only_hub)
    assert command(monkeypatch, tmp_path / "data", task) == 2
    assert re.fullmatch(rf"error: {nobody} cannot be reached \(.*refused\)\n", capfd.readouterr().err)
    assert not (tmp_path / "data").exists()


def test_offline_mode_uses_the_cache_alone(tmp_path, monkeypatch, capfd):
    assert command(monkeypatch, tmp_path / "data", "glue") == 2
    assert re.fullmatch(r"error: nyu-mll/glue \(cola, train\) cannot be loaded .*\n", capfd.readouterr().err)
    assert not (tmp_path / "data").exists()


def test_the_next_origin_is_tried(tmp_path, monkeypatch, capfd):
    repository = wikitext_repository(tmp_path / "repository", "wikitext-2-v1")
    published = known(files_of(TEXTS, ".txt"))
    origins = [
        lambda root: wikitext.download(root, origin=(tmp_path / "nowhere").as_uri()),
        lambda root: hub.wikitext2(root, repository, published),
    ]
    monkeypatch.setitem(get_data.DATASETS, "lstm-wiki2", [origins])
    assert command(monkeypatch, tmp_path / "data", "lstm-wiki2") == 0
    said = capfd.readouterr()
    assert re.match(r"file:.*train.txt cannot be downloaded \(.*\); trying the next origin\n", said.err)
    assert len(said.out.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "unknown task 'nonsense'; the tasks are lr-hmda, lstm-wiki2, mlp-m4, cifar10"),
        (["mlp-m4", "--clones", "."], "is not on the hub"),
        (["glue", "--clones", "nowhere"], "no clone of nyu-mll/glue at nowhere/nyu-mll/glue"),
    ],
)
def test_bad_arguments_are_one_sentence(tmp_path, monkeypatch, capfd, arguments, message):
    assert command(monkeypatch, tmp_path, *arguments) == 2
    assert re.fullmatch(rf"error: .*{re.escape(message)}.*\n", capfd.readouterr().err)


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, capfd):
    (tmp_path / "file").write_text("not a folder")
    wikitext_repository(tmp_path / "clones" / hub.WIKITEXT, "wikitext-2-v1")
    assert command(monkeypatch, tmp_path / "file", "lstm-wiki2", "--clones", tmp_path / "clones") == 2
    assert re.fullmatch(r"error: the files cannot be written to .*file/wikitext-2 \(.*\)\n", capfd.readouterr().err)


# -- GPT-2's tokens ---------------------------------------------------------------------------------------------------


def test_gpt2_files(tmp_path):
    content = {"vocab.json": b"{}", "merges.txt": b"#version: 0.2\n"}
    (tmp_path / "repository").mkdir()
    for name, data in content.items():
        (tmp_path / "repository" / name).write_bytes(data)
        (tmp_path / hub.GPT2_NAMES[name]).write_bytes(data)
    for root, origin, get in [
        ("one", str(tmp_path / "repository"), hub.gpt2),
        ("two", tmp_path.as_uri(), hub.gpt2_from_openai),
    ]:
        paths = get(tmp_path / root, origin, known(content))
        assert {path.name: path.read_bytes() for path in paths} == content
        with pytest.raises(CdgrabError, match="published"):
            get(tmp_path / "wrong", origin, known(content | {"merges.txt": b"other"}))
        assert not (tmp_path / "wrong").exists()
    (tmp_path / "repository" / "vocab.json").unlink()
    with pytest.raises(CdgrabError, match="has no file vocab.json"):
        hub.gpt2(tmp_path / "three", str(tmp_path / "repository"), known(content))
