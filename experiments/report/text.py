"""Numbers and tables as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import wraps

from experiments.report.kinds import Series
from experiments.store.files import figures_folder

FEWEST_SEEDS = 3  # for a spread, a band or a p value


def markdown(rows: list[dict[str, str]]) -> str:
    """A Markdown table; every row has the same keys."""
    lines = [list(rows[0]), *([row[name] for name in rows[0]] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) for cells in lines]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {cells} |" for cells in lines[1:])])


def narrow(page: str) -> str:
    """Tables without padding, which long cells make very wide."""
    return re.sub(r"^ *\|.*$", lambda line: re.sub(r"-{2,}", "---", re.sub(r" +\|", " |", line[0])), page, flags=re.M)


def table(rows: Callable[..., Iterator[dict[str, str]]]) -> Callable[..., str]:
    """Turns a function that yields the rows of a table into one that returns the table in Markdown."""

    @wraps(rows)
    def written(*arguments: object) -> str:
        return markdown(list(rows(*arguments)))

    return written


def save(text: str, name: str) -> None:
    """results/figures/<name>.md, next to the figure of the same name."""
    path = figures_folder() / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def signed(value: float) -> str:
    """Three significant digits, with a real minus sign."""
    return minus(f"{value:.3g}")


def minus(text: object) -> str:
    return f"{text}".replace("-", "−")


def mean_std(values: Series, digits: int, sign: str = "") -> str:
    """For instance 3.00 ± 0.82, the sample's standard deviation. Too few have none; no value at all gives –."""
    if not len(values):
        return "–"
    spread = f" ± {values.std():.{digits}f}" if len(values) >= FEWEST_SEEDS else ""
    return f"{values.mean():{sign}.{digits}f}{spread}"


def plural(count: int, word: str) -> str:
    """1 seed, 2 seeds; 1 process, 2 processes."""
    return f"{count} {word}" + ("" if count == 1 else "es" if word.endswith("s") else "s")


def enumerated(words: Iterable[str]) -> str:
    """1, 2 and 3"""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last
