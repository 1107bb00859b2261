"""Numbers in README's prose: does each occur, rounded as it is there, in the tables that its paragraph refers to?

A paragraph refers to figures and tables of the paper (Figure 3a), experiments, studies (`study-rates`) and benchmarks
(`BENCH=dropin`). What it has from elsewhere, and percentages of ratios, it lists in a comment,
`<!-- not in the tables: 0.25, 12 % (of a ratio) -->`. Whole numbers count only with a unit: % or "of … seeds".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from experiments.report.claims import FIGURES

NUMBER = re.compile(r"(?<![\w.^])(?:\d[\d,]*\.\d+|\d+(?= %))(?![\w])")
SEEDS = re.compile(r"\d+ of \d+ seeds")
EXCEPTED = re.compile(r"<!-- not in the tables: (.*?) -->", re.S)
WRITTEN = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def paragraphs(page: str) -> Iterator[str]:
    """Bullets with all that is indented below them, and what stands between empty lines; no tables: those that hold
    results are computed, others hold settings."""
    parts = (part.strip() for part in re.split(r"\n{2,}(?![ \n])|\n(?=- )", page))
    return (part for part in parts if not part.startswith("|"))


def references(paragraph: str) -> dict[str, list[str]]:
    """What a paragraph refers to: notebooks, and benchmarks."""
    figures = set(re.findall(r"(?:Figure|Table) \d+[abc]?", paragraph))
    notebooks = [
        figure.experiment
        for figure in FIGURES
        if figure.name.partition(",")[0] in figures or re.search(rf"\b{figure.experiment}\b", paragraph)
    ]
    notebooks += [f"study_{name.replace('-', '_')}" for name in re.findall(r"`study-([\w-]+)`", paragraph)]
    return {"notebooks": list(dict.fromkeys(notebooks)), "benchmarks": re.findall(r"BENCH=(\w+)", paragraph)}


def missing(paragraph: str, sources: str) -> list[str]:
    """The numbers of a paragraph that the sources do not have; and exceptions that are none."""
    listed = EXCEPTED.search(paragraph)
    excepted = set(NUMBER.findall(listed[1])) if listed else set()
    prose, values = EXCEPTED.sub("", paragraph), numbers(sources)
    found = dict.fromkeys(NUMBER.findall(prose))
    lost = [number for number in found if number not in excepted and not _occurs(number, values)]
    seeds = {" ".join(words.split()) for words in SEEDS.findall(" ".join(prose.split()))}
    lost += [words for words in sorted(seeds) if words not in sources and not (listed and words in listed[1])]
    return lost + [f"{number} (listed, but not there)" for number in sorted(excepted - found.keys())]


def numbers(sources: str) -> set[float]:
    return {float(number.replace(",", "")) for number in WRITTEN.findall(sources)}


def _occurs(number: str, values: Iterable[float]) -> bool:
    value, digits = float(number.replace(",", "")), len(number.partition(".")[2])
    off = 0.5001 * 10**-digits
    return any(abs(known - value) <= off for known in values)
