"""Numbers in the prose of pages: does each occur, rounded as it is there, in the tables that its passage refers to?

A passage, or its heading, refers to figures and tables of the paper (Figure 3a), experiments, studies (`study-rates`)
and benchmarks (`BENCH=dropin`). What it has from elsewhere, and percentages of ratios, it lists in comments,
`<!-- not in the tables: 0.25, 12 % (of a ratio) -->`. Whole numbers count only with a unit: % or "of … seeds".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from experiments.report.claims import FIGURES

NUMBER = re.compile(r"(?<![\w.^])(?:\d[\d,]*\.\d+|\d+(?= %))(?![\w])")
SEEDS = re.compile(r"\d+ of \d+ seeds")
EXCEPTED = re.compile(r"<!--\s+not\s+in\s+the\s+tables:\s+(.*?)\s+-->", re.S)
NAMES = re.compile(r"arXiv [\d.]+|https?://\S+|Python ≥ [\d.]+")
WRITTEN = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def passages(page: str) -> Iterator[str]:
    """What stands under a heading, with the heading; bullets with all that is indented below them are passages of their
    own. No tables: those that hold results are computed, others hold settings."""
    for section in re.split(r"^(?=#+ )", page, flags=re.M):
        heading, _, text = section.partition("\n") if section.startswith("#") else ("", "", section)
        for part in re.split(r"^(?=- )", re.sub(r"^ *\|.*\n?", "", text, flags=re.M), flags=re.M):
            if part.strip():
                yield f"{heading}\n{part.strip()}".strip()


def references(passage: str) -> dict[str, list[str]]:
    """What a passage refers to: notebooks, and benchmarks."""
    figures = set(re.findall(r"(?:Figure|Table) \d+[abc]?", passage))
    notebooks = [
        figure.experiment
        for figure in FIGURES
        if figure.name.partition(",")[0] in figures or re.search(rf"\b{figure.experiment}\b", passage)
    ]
    notebooks += [f"study_{name.replace('-', '_')}" for name in re.findall(r"`study-([\w-]+)`", passage)]
    return {"notebooks": list(dict.fromkeys(notebooks)), "benchmarks": re.findall(r"BENCH=(\w+)", passage)}


def missing(passage: str, sources: str) -> list[str]:
    """The numbers of a passage that the sources do not have; and exceptions that are none."""
    listed = " ".join(EXCEPTED.findall(passage))
    excepted = set(NUMBER.findall(listed))
    prose, values = NAMES.sub("", EXCEPTED.sub("", passage)), numbers(sources)
    found = dict.fromkeys(NUMBER.findall(prose))
    lost = [number for number in found if number not in excepted and not _occurs(number, values)]
    seeds = {" ".join(words.split()) for words in SEEDS.findall(" ".join(prose.split()))}
    lost += [words for words in sorted(seeds) if words not in sources and words not in listed]
    return lost + [f"{number} (listed, but not there)" for number in sorted(excepted - found.keys())]


def numbers(sources: str) -> set[float]:
    return {float(number.replace(",", "")) for number in WRITTEN.findall(sources)}


def _occurs(number: str, values: Iterable[float]) -> bool:
    value, digits = float(number.replace(",", "")), len(number.partition(".")[2])
    off = 0.5001 * 10**-digits
    return any(abs(known - value) <= off for known in values)
