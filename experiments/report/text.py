"""Numbers and tables as text."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from itertools import zip_longest

from experiments.report.kinds import Series
from experiments.store.files import figures_folder

READABLE = 12  # characters: narrower cells are not broken
FEWEST_SEEDS = 3  # for a spread, a band or a p value


def markdown(rows: list[dict[str, str]]) -> str:
    """A Markdown table; every row has the same keys. Nothing, if there are no rows."""
    if not rows:
        return ""
    lines = [list(rows[0]), *([row[name] for name in rows[0]] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) for cells in lines]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {cells} |" for cells in lines[1:])])


def narrow(page: str) -> str:
    """Tables without padding, which long cells make very wide."""

    def narrowed(line: re.Match) -> str:
        return re.sub(r"\|-{2,}(?=\|)", "|---", re.sub(r" +\|", " |", line[0]))

    return re.sub(r"^ *\|.*$", narrowed, page, flags=re.M)


def show(page: str) -> None:
    """Print it, on a terminal as wide as that."""
    print(for_terminal(page, shutil.get_terminal_size().columns) if sys.stdout.isatty() else page, flush=True)


def for_terminal(page: str, columns: int) -> str:
    """The same in so many columns: wide tables stand on their side, or their widest cells take several lines."""
    blocks = re.findall(r"(?:^\|.*\n?)+|^.*\n?", page, flags=re.M)
    return "\n".join(_fitted(block.rstrip("\n"), columns) for block in blocks if block)


def _fitted(block: str, columns: int) -> str:
    if not block.startswith("|"):
        return textwrap.fill(block.rstrip(), columns, break_long_words=False, break_on_hyphens=False)
    if _width(block) <= columns:
        return block
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
    cells = [lines[0], *lines[2:]]
    narrowest = min((cells, list(zip(*cells, strict=True))), key=lambda rows: _width(_drawn(rows)))
    return _drawn(_broken(narrowest, _width(_drawn(narrowest)) - columns))


def _broken(cells: Sequence[Sequence[str]], excess: int) -> list[Sequence[str]]:
    """Cells of the widest columns take several lines, so that the table loses so many characters, if it can."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    while excess > 0 and max(widths) > READABLE:
        widths[widths.index(max(widths))] -= 1
        excess -= 1
    parts = [[textwrap.wrap(cell, max(1, width)) for cell, width in zip(row, widths, strict=True)] for row in cells]
    return [line for row in parts for line in zip_longest(*row, fillvalue="")]


def _drawn(cells: Sequence[Sequence[str]]) -> str:
    names = [str(number) for number in range(len(cells[0]))]  # a table may have the same heading twice
    lines = markdown([dict(zip(names, row, strict=True)) for row in cells]).splitlines()
    return "\n".join([lines[2], lines[1], *lines[3:]])


def _width(block: str) -> int:
    return max(map(len, block.splitlines()))


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
