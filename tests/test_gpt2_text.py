"""The text of GPT2-WikiText-103: blocks of tokens from novels, WikiText or embedded articles."""

import hashlib
import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from novels import NOVELS, write_novels

from cdgrab.errors import CdgrabError
from experiments.data import bpe, text_blocks, wikitext
from experiments.tasks import make_task
from experiments.training.config import compose
from experiments.training.gradients import FlatParameters

CONTEXT, VOCABULARY = 8, 300

real_data = pytest.mark.skipif(
    not (os.environ.get("CDGRAB_DATA") and Path(os.environ["CDGRAB_DATA"], "gpt2").is_dir()),
    reason="needs GPT-2's tokens: set CDGRAB_DATA (`make data-gpt2-wiki103`)",
)
real_novels = pytest.mark.skipif(
    not (os.environ.get("CDGRAB_DATA") and Path(os.environ["CDGRAB_DATA"], "novels").is_dir()),
    reason="needs a folder of novels in CDGRAB_DATA",
)
packaged_data = pytest.mark.skipif(
    importlib.util.find_spec("gensim") is None, reason="needs the embedded Wikipedia articles: `make setup`"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CDGRAB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path):
    """A data folder with novels."""
    return write_novels(tmp_path)


def naive_blocks(root, tokenizer, longest, context):
    """Novel by novel, line by line, token by token."""
    parts = {"train": [], "valid": []}
    for number in range(NOVELS):
        raw = (root / "novels" / f"Novel_{number:02}.txt").read_bytes().decode("utf-8-sig")
        for line in raw.replace("\r\n", "\n").split("\n"):
            if line.strip():
                parts["valid" if number in (0, 20) else "train"] += tokenizer.encode(line + "\n").ids[:longest]
    return {
        part: [tokens[i : i + context] for i in range(0, len(tokens) - context + 1, context)]
        for part, tokens in parts.items()
    }


@pytest.mark.parametrize("longest", [None, 3])
@pytest.mark.parametrize("most", [(None, None), (7, 2)])
def test_blocks_equal_a_naive_implementation(root, longest, most, monkeypatch):
    monkeypatch.setattr(bpe, "LINES_AT_ONCE", 5)
    source = text_blocks.locate(root=str(root))
    tokenizer, _ = text_blocks.tokenizer(source, VOCABULARY)
    expected = naive_blocks(root, tokenizer, longest, CONTEXT)
    for _ in range(2):  # made, then from the cache
        blocks, checksums = text_blocks.load(source, VOCABULARY, CONTEXT, longest, most)
        assert blocks.train.tolist() == expected["train"][: most[0]]
        assert blocks.valid.tolist() == expected["valid"][: most[1]]
        assert blocks.vocabulary == VOCABULARY
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted_novels(root)]
    assert checksums == {"novels": hashlib.sha256("".join(sums).encode()).hexdigest()}


def sorted_novels(root):
    return sorted((root / "novels").iterdir())


def test_changed_text_is_read_anew(root):
    source = text_blocks.locate(root=str(root))
    before, _ = text_blocks.load(source, VOCABULARY, CONTEXT)
    path = sorted_novels(root)[1]
    path.write_text("Another beginning.\n" + path.read_text("utf-8-sig"))
    after, _ = text_blocks.load(source, VOCABULARY, CONTEXT)
    assert not np.array_equal(before.train[0], after.train[0])


def test_trained_tokens_are_the_same_every_time_and_give_the_text_back(root):
    lines = text_blocks._read_lines(text_blocks.locate(root=str(root)))["train"]
    tokenizer = bpe.train(lines, VOCABULARY)
    again = bpe.train(lines[::-1], VOCABULARY)
    assert tokenizer.to_str() == again.to_str()
    unseen = "Ünseen\ttext: 数 🙂  and the old sea\n"
    for text in ("".join(lines), unseen):
        tokens = bpe.encode(tokenizer, text.splitlines(keepends=True))
        assert tokenizer.decode(tokens.tolist()) == text and tokens.max() < VOCABULARY


def test_wikitext_comes_before_novels_and_neither_is_called_the_other(root, monkeypatch):
    monkeypatch.setattr(text_blocks, "VALID", None)
    monkeypatch.setattr(text_blocks, "TRAIN_LINES", 36)
    novels = text_blocks.locate(root=str(root))
    assert novels.label == "novels" and novels.description == f"{NOVELS} novels" and not novels.papers_own
    (root / "wikitext-103").mkdir()
    (root / "wikitext-103" / "valid.tokens").write_text(" \n = Title = \n \n the valid part \n" * 9)
    assert text_blocks.locate(root=str(root)) == novels  # without its training part it is of no use
    (root / "wikitext-103" / "train.tokens").write_text(" \n = Title = \n \n the old sea \n" * 9)
    source = text_blocks.locate(root=str(root))
    assert source.label == "WikiText-103" and "raw text" in source.description and source.papers_own
    blocks, checksums = text_blocks.load(source, 262, 4)
    assert checksums.keys() == {"train.tokens", "valid.tokens"}
    tokenizer, _ = text_blocks.tokenizer(source, 262)
    assert tokenizer.decode(blocks.train.ravel().tolist()).startswith(" = Title = \n the old sea \n = Title")
    assert tokenizer.decode(blocks.valid.ravel().tolist()).startswith(" = Title = \n the valid part \n = Title")


def test_text_that_is_there_in_part_is_not_replaced_by_embedded_text(tmp_path):
    for folder in ("novels", "wikitext-103"):
        (tmp_path / folder).mkdir()
        with pytest.raises(
            CdgrabError, match=r"no \S+/train.tokens .* no text file in \S+/novels; data=embedded needs"
        ):
            text_blocks.locate(root=str(tmp_path))
        (tmp_path / folder).rmdir()
    (tmp_path / "novels").mkdir()
    (tmp_path / "novels" / "Only.txt").touch()
    assert text_blocks.locate(root=str(tmp_path)).description == "1 novel"


def damage_wikitext(root):
    (root / "wikitext-103").mkdir()
    (root / "wikitext-103" / "train.tokens").write_text("text\n")
    (root / "wikitext-103" / "valid.tokens").write_text("not the published file\n")


def damage_gpt2(root):
    (root / "gpt2").mkdir()
    (root / "gpt2" / "vocab.json").write_text("{}")
    (root / "gpt2" / "merges.txt").touch()


@pytest.mark.parametrize(
    ("damage", "vocabulary", "message"),
    [
        (lambda root: None, None, r"gpt2/vocab.json is missing; get it with `make data-gpt2-wiki103`"),
        (damage_gpt2, None, r"gpt2/vocab.json is damaged: 2 bytes instead of 1,042,301"),
        (damage_wikitext, 300, r"train.tokens is not the training part of WikiText-103: 1 lines instead of"),
        (lambda root: sorted_novels(root)[5].write_bytes(b"\xff\xfe\x00"), 300, "Novel_05.txt cannot be read as UTF-8"),
        (lambda root: [path.unlink() for path in sorted_novels(root)[1:]], 300, "at least two text files"),
    ],
)
def test_missing_and_damaged_files_get_one_sentence(root, damage, vocabulary, message):
    damage(root)
    with pytest.raises(CdgrabError, match=message) as caught:
        text_blocks.load(text_blocks.locate(root=str(root)), vocabulary, CONTEXT)
    assert "\n" not in str(caught.value)


@packaged_data
def test_embedded_default_is_wikipedia_with_tokens_trained_on_it():
    run = compose(["experiment=fig11_gpt2_wiki103", "data=embedded"])
    assert run.source.label == "embedded" and run.source.embedded and not run.source.papers_own
    blocks, _ = text_blocks.load(run.source, run.config.task.vocabulary, 64, most=(1600, None))
    assert blocks.train.shape == (1600, 64) and len(blocks.valid) > 1000 and blocks.vocabulary == 1024
    tokenizer, _ = text_blocks.tokenizer(run.source, 1024)
    valid, train, *others = wikitext.articles(run.source.files[0])
    assert run.source.description == f"{2 + len(others)} articles of Wikipedia (gensim)"
    for tokens, markup in ((blocks.train, train), (blocks.valid, valid)):
        start = tokenizer.decode(tokens[:3].ravel().tolist())
        assert wikitext.strip_markup(markup).startswith(start[:-1]) and len(start) > 200
    with pytest.raises(CdgrabError, match="GPT-2's own tokens are not embedded"):
        text_blocks.tokenizer(run.source, None)


@real_data
def test_gpt2s_tokens_equal_transformers():
    from transformers import GPT2Tokenizer

    folder = Path(os.environ["CDGRAB_DATA"], "gpt2")
    tokenizer, checksums = bpe.read_gpt2(folder, "")
    oracle = GPT2Tokenizer(*(str(folder / name) for name in checksums))
    assert tokenizer.get_vocab_size() == len(oracle) == 50_257
    text = Path(wikitext.__file__).read_text() + "Émile’s 1,851 ½ naïve cafés —  don't   stop\n\n数 🙂\n = Title = \n"
    lines = text.splitlines(keepends=True)
    expected = [token for line in lines for token in oracle(line)["input_ids"]]
    assert bpe.encode(tokenizer, lines).tolist() == expected and len(expected) > 1000


@real_data
@real_novels
def test_real_novels_with_gpt2s_tokens_have_the_papers_model():
    run = compose(["experiment=fig11_gpt2_wiki103", "size=paper", "task.limit=256", "task.valid_limit=8"])
    if run.source.label != "novels":
        pytest.skip("WikiText-103 itself is there")
    task = make_task(run.config, run.source, torch.device("cpu"))
    assert FlatParameters(task.model).dim == 6_846_080
    assert (task.train_units, task.test_units, task.units_per_step) == (256, 8, 1)
    assert task.partition(torch.arange(256)).shape == (64, 4)
    assert run.source.checksums.keys() == {"novels", "vocab.json", "merges.txt"}
