"""WikiText-2: the published files, or an eighth as much of Wikipedia that ships in a pip package."""

from __future__ import annotations

import bz2
import html
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from experiments.data.cache import cached
from experiments.data.download import fetch_missing
from experiments.data.progress import progress
from experiments.data.sources import PackagedFile, Source, check_files, data_root, sha256

END, UNKNOWN = "<eos>", "<unk>"
ORIGIN = "https://raw.githubusercontent.com/pytorch/examples/HEAD/word_language_model/data/wikitext-2"
GET = "get it with `make data-lstm-wiki2`"
PUBLISHED = {
    "train.txt": (10797148, "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f"),
    "valid.txt": (1121681, "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"),
    "test.txt": (1256449, "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"),
}
PACKAGED = PackagedFile(
    *("gensim", "test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2", "gensim==4.4.0"),
    (1695871, "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d"),
)
SLICE = (250_000, 15_000, 15_000)  # words taken from the packaged articles for train, valid and test
RARE = 3  # a word that occurs less often in the slice becomes <unk>


@dataclass(frozen=True)
class Corpus:
    """Three texts as word numbers, line ends included, and the words by number."""

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    vocabulary: np.ndarray


def locate(data: str = "auto", root: str | None = None) -> Source:
    """The source that a run with these settings uses. Does not read the files yet."""
    folder = data_root(root, data)
    if folder and (folder / "wikitext-2").is_dir():
        files = tuple(folder / "wikitext-2" / name for name in PUBLISHED)
        description = "WikiText-2, as in PyTorch's word language model"
        return Source("WikiText-2", description, files, papers_own=True, how_to_get=GET)
    return PACKAGED.source(f"{sum(SLICE):,} words of Wikipedia (gensim)")


def download(root: Path, origin: str = ORIGIN) -> list[Path]:
    """All three files; those already there and right are kept."""
    return fetch_missing(root / "wikitext-2", {name: f"{origin}/{name}" for name in PUBLISHED}, PUBLISHED)


def load(source: Source) -> tuple[Corpus, dict[str, str]]:
    """The corpus, and the files' checksums."""
    if source.embedded:
        (path,) = source.files
        checksums = PACKAGED.check(path)
        return _kept("wikipedia", checksums, lambda: _cut_slice(path)), checksums
    checksums = check_files(source.files, PUBLISHED, GET)
    return _kept("wikitext-2", checksums, lambda: number_words(*map(_read_words, source.files))), checksums


def number_words(train: list[str], valid: list[str], test: list[str]) -> Corpus:
    """Words get numbers in the order in which they first occur, over all three texts."""
    numbers: dict[str, int] = {}
    texts = [
        np.array([numbers.setdefault(word, len(numbers)) for word in words], dtype=np.int32)
        for words in (train, valid, test)
    ]
    return Corpus(*texts, vocabulary=np.array(list(numbers)))


def _read_words(path: Path) -> list[str]:
    with open(path, encoding="utf-8") as file:
        lines = progress(file, unit="line", desc=f"reading {path.name}")
        return [word for line in lines for word in (*line.split(), END)]


def _kept(name: str, checksums: dict[str, str], build: Callable[[], Corpus]) -> Corpus:
    """From the cache if it is there. This file holds all rules and settings, so its checksum is part of the key."""
    return Corpus(**cached(name, {"source": checksums, "code": sha256(Path(__file__))}, lambda: vars(build())))


# -- the packaged articles --------------------------------------------------------------------------------------------


def _cut_slice(path: Path) -> Corpus:
    """The first words of the articles in file order: train, then valid, then test."""
    needed = sum(SLICE)
    words: list[str] = []
    with progress(total=needed, unit="word", desc="reading Wikipedia") as bar:
        for markup in articles(path):
            before = len(words)
            for line in strip_markup(markup).splitlines():
                words += (*split_words(line), END)
            bar.update(min(len(words), needed) - before)
            if len(words) >= needed:
                break
    words = mark_rare(words[:needed], RARE)
    train, valid = SLICE[0], SLICE[0] + SLICE[1]
    return number_words(words[:train], words[train:valid], words[valid:])


def articles(path: Path) -> Iterator[str]:
    """The markup of every article of a Wikipedia dump; redirects and talk pages are not articles."""
    with bz2.open(path) as file:
        for _, element in ElementTree.iterparse(file):
            if not element.tag.endswith("}page"):
                continue
            if element.find("{*}redirect") is None and element.findtext("{*}ns") == "0":
                yield element.findtext("{*}revision/{*}text") or ""
            element.clear()


def mark_rare(words: list[str], least: int) -> list[str]:
    """Words that occur less than `least` times become <unk>."""
    counts = Counter(words)
    return [word if counts[word] >= least else UNKNOWN for word in words]


def split_words(line: str) -> list[str]:
    """Lower-case words (with inner apostrophes and hyphens), numbers and single punctuation marks."""
    return re.findall(r"\d+(?:[.,]\d+)+|\w+(?:['’-]\w+)*|[^\w\s]", line.lower())


def _rule(pattern: str, replacement: str = "") -> tuple[re.Pattern, str]:
    return re.compile(pattern, re.DOTALL | re.MULTILINE | re.IGNORECASE), replacement


_NOT_PROSE = "ref|math|gallery|timeline|source|syntaxhighlight|score|imagemap|code|pre"
# Brackets nest: these rules remove the innermost ones, again and again.
_NESTED = (
    _rule(r"\{\{[^{}]*\}\}"),  # templates
    _rule(r"\{\|(?:(?!\{\||\|\}).)*\|\}"),  # tables
    # pictures, categories, the same article in other languages
    _rule(r"\[\[:?(?:file|image|category|[a-z]{2,3}(?:-[a-z]+)*):[^\[\]]*\]\]"),
    _rule(r"\[\[(?:[^\[\]|]*\|)*([^\[\]|]*)\]\]", r"\1"),  # links show their last part
)
_FLAT = (
    _rule(r"\[(?:https?:)?//[^\s\]]*\s*([^\]]*)\]", r"\1"),  # links to other sites
    _rule(r"https?://\S+"),
    _rule(r"</?[a-z][^<>]*>", " "),  # what is inside other tags is text
    _rule(r"__[a-z]+__"),  # switches such as __NOTOC__
    _rule(r"'{2,}"),  # bold and italics
    _rule(r"^=+[ \t]*(.*?)[ \t]*=+[ \t]*$", r"\1"),  # headings stay, as lines of their own
    _rule(r"^[*#:;]+[ \t]*"),  # list markers
    _rule(r"^[ \t]*[|!{}].*$"),  # what is left of broken tables and templates
    _rule(r"\([\s,;]*\)"),  # brackets whose content was a template
)
_INVISIBLE = (
    _rule(r"<!--.*?-->"),
    _rule(rf"<({_NOT_PROSE})\b[^<>]*/>"),
    _rule(rf"<({_NOT_PROSE})\b[^<>]*>.*?</\1\s*>"),
)


def strip_markup(text: str) -> str:
    """Wikipedia's markup -> the text that a reader sees, one paragraph, list entry or heading per line."""
    for pattern, replacement in _INVISIBLE:
        text = pattern.sub(replacement, text)
    changes = 1
    while changes:
        changes = 0
        for pattern, replacement in _NESTED:
            text, count = pattern.subn(replacement, text)
            changes += count
    text = html.unescape(text)
    for pattern, replacement in _FLAT:
        text = pattern.sub(replacement, text)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line)
