"""The text of LSTM-WikiText-2: words and their numbers, damaged files, markup, the embedded articles, the cache."""

import importlib.util

import numpy as np
import pytest
from tiny_wikitext import write_wikitext

from cdgrab.errors import CdgrabError
from experiments.data import wikitext
from experiments.data.cache import cached

packaged_data = pytest.mark.skipif(
    importlib.util.find_spec("gensim") is None, reason="needs the embedded Wikipedia articles: `make setup`"
)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A data folder with a tiny WikiText-2."""
    return write_wikitext(tmp_path, monkeypatch)


def test_words_are_split_on_white_space_and_numbered_over_all_files(root):
    for name, text in (("train", "the  cat\n\n the\tend\n"), ("valid", "a cat\n"), ("test", "dog\n")):
        (root / "wikitext-2" / f"{name}.txt").write_text(text)
    corpus, checksums = wikitext.load(wikitext.locate(root=str(root)))
    assert corpus.vocabulary.tolist() == ["the", "cat", "<eos>", "end", "a", "dog"]
    assert corpus.train.tolist() == [0, 1, 2, 2, 0, 3, 2]
    assert corpus.valid.tolist() == [4, 1, 2] and corpus.test.tolist() == [5, 2]
    assert set(checksums) == {"train.txt", "valid.txt", "test.txt"}


def test_missing_and_damaged_files_are_named_in_one_sentence(tmp_path):
    (tmp_path / "wikitext-2").mkdir()
    source = wikitext.locate(root=str(tmp_path))
    assert source.label == "WikiText-2" and source.papers_own
    with pytest.raises(CdgrabError, match="train.txt is missing; get it with `make data-lstm-wiki2`"):
        wikitext.load(source)
    path = tmp_path / "wikitext-2" / "train.txt"
    path.write_text("a b c\n")
    with pytest.raises(CdgrabError, match="6 bytes instead of 10,797,148"):
        wikitext.load(source)
    with open(path, "wb") as file:  # right size, wrong content
        file.truncate(wikitext.PUBLISHED["train.txt"][0])
    with pytest.raises(CdgrabError, match="checksum") as caught:
        wikitext.load(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("'''Bold''' and ''italic''", "Bold and italic"),
        ("a [[link]], [[Target page|shown]] and [[plural]]s", "a link, shown and plurals"),
        ("{{Infobox|a={{nested|{{b}}}}\n|c=d}}After", "After"),
        ("before\n{| class=x\n! head\n|-\n| {| \n| inner\n|}\n|}\nafter", "before\nafter"),
        ("fact<ref name=x>{{cite|a}}</ref>, more<ref name=x/>.", "fact, more."),
        ("[[File:a.jpg|thumb|A [[cat]] and [[dog|its dog]]]]text", "text"),
        ("[[Category:Cats]]\n[[de:Katze]]\n[[zh-min-nan:Niau]]\nend", "end"),
        ("see [http://example.org the site] or https://example.org/x now", "see the site or now"),
        ("== Early life ==\n* one\n** two\n: three", "Early life\none\ntwo\nthree"),
        ("<!-- hidden\nlines -->H<sub>2</sub>O &amp;&nbsp;more<br />x", "H 2 O & more x"),
        ("<math>x^2</math><gallery>\nFile:b.jpg\n</gallery>y __NOTOC__", "y"),
        ("Aristotle ({{lang|el}}; ) was", "Aristotle was"),
        ("open {{ never closed\n| a row", "open {{ never closed"),
    ],
)
def test_markup_is_stripped(markup, text):
    assert wikitext.strip_markup(markup) == text


def test_words_punctuation_and_rare_words():
    words = wikitext.split_words("Lincoln's 1,234.5 well-known (U.S.) émigrés—it costs 3%.")
    assert " ".join(words) == "lincoln's 1,234.5 well-known ( u . s . ) émigrés — it costs 3 % ."
    assert wikitext.mark_rare(list("aababc"), 3) == ["a", "a", "<unk>", "a", "<unk>", "<unk>"]


def test_cache_gives_the_same_arrays_and_makes_damaged_files_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("CDGRAB_CACHE", str(tmp_path / "cache"))
    builds = []

    def build():
        builds.append(1)
        return {"numbers": np.arange(1000, dtype=np.int32), "words": np.array(["ä", "bc"])}

    def check(key, expected_builds):
        arrays = cached("test", key, build)
        assert arrays.keys() == {"numbers", "words"} and len(builds) == expected_builds
        assert arrays["numbers"].dtype == np.int32 and arrays["numbers"].tolist() == list(range(1000))
        assert arrays["words"].tolist() == ["ä", "bc"]

    check({"a": 1}, 1)
    check({"a": 1}, 1)
    (path,) = (tmp_path / "cache").iterdir()
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
    for count, damaged in enumerate((whole[:middle], b"", b"not an archive", flipped), start=2):
        path.write_bytes(damaged)
        check({"a": 1}, count)
        check({"a": 1}, count)
    check({"a": 2}, 6)
    assert len(list((tmp_path / "cache").iterdir())) == 2  # nothing half-written is left
    (tmp_path / "file").touch()
    monkeypatch.setenv("CDGRAB_CACHE", str(tmp_path / "file"))  # cannot be a folder: made anew, without a word
    check({"a": 1}, 7)


def test_word_numbers_are_made_once_for_the_same_text(root, monkeypatch):
    source, made = wikitext.locate(root=str(root)), []
    number_words = wikitext.number_words
    monkeypatch.setattr(wikitext, "number_words", lambda *texts: made.append(1) or number_words(*texts))
    fresh, stored = (wikitext.load(source)[0] for _ in range(2))
    assert len(made) == 1 and all(np.array_equal(array, getattr(stored, name)) for name, array in vars(fresh).items())
    with open(root / "wikitext-2" / "valid.txt", "a") as file:
        file.write(" new \n")
    changed, _ = wikitext.load(source)
    assert len(made) == 2 and [changed.vocabulary[n] for n in changed.valid[-2:]] == ["new", wikitext.END]


@packaged_data
def test_embedded_default_is_a_fixed_slice_of_wikipedia(tmp_path, monkeypatch):
    monkeypatch.setenv("CDGRAB_CACHE", str(tmp_path))
    source = wikitext.locate("embedded")
    fresh, checksums = wikitext.load(source)
    stored, _ = wikitext.load(source)
    for name, array in vars(fresh).items():
        assert np.array_equal(array, getattr(stored, name)), name
    assert (len(fresh.train), len(fresh.valid), len(fresh.test)) == wikitext.SLICE and len(checksums) == 1
    assert len(fresh.vocabulary) == 8718
    assert " ".join(fresh.vocabulary[fresh.train[:8]]) == "anarchism is a political philosophy that advocates <unk>"
    counts = np.bincount(np.concatenate([fresh.train, fresh.valid, fresh.test]))
    assert counts.min() >= wikitext.RARE
    assert not any(mark in word for word in fresh.vocabulary for mark in ("[[", "{{", "http"))
