"""Tables of HMDA without a published checksum, in which something was changed: what is read of those that are taken
must be what a plain loop over their cells finds."""

from __future__ import annotations

import csv
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from experiments.data import hmda
from experiments.data.sources import Source
from scripts.fuzz.damage import damage

ROWS = 12
CELLS = ("", "1", "2", " 3", "1.5", "-0", "007", "+4", "1e3", "1e300", "1e400", "nan", "NA", "inf", "0x1", "1_0", "x")
CELLS += ('"1"', '"1', "1,2", "1\r", "1\n2", "\x00", "1\u00a0", "\u0661", "True", "1;2", "#")
CELLS += ("9" * 400, "1e15", "1E+2", "1.e1", ".5", "infinity", "1d3", '"1\n2"', '"1,5"', "\ufeff1", "1 2", "1e-400")
MISSING = ("", "NA", "nan")


def tables(generator: random.Random, scratch: Path) -> Iterator[Callable[[], object]]:
    def attempt(root: Path, files: tuple[Path, ...]) -> None:
        try:
            (features, labels), _ = hmda.load(Source("TX-2017", "made up", files))
            wanted = _cell_by_cell(files)
            assert np.array_equal(labels, wanted[1]), "other labels"
            assert features.shape == wanted[0].shape and np.allclose(features, wanted[0], 1e-15, 0), "other features"
        finally:
            shutil.rmtree(root)

    while True:
        root = Path(tempfile.mkdtemp(dir=scratch))
        files = tuple(root / f"2017-TX-{part}.csv" for part in hmda.PARTS)
        for path, columns in zip(files, hmda.COLUMNS, strict=True):
            rows = [[str(generator.randint(1, 3)) for _ in columns] for _ in range(ROWS)]
            path.write_text("".join(",".join(row) + "\n" for row in (columns, *rows)))
        changed = generator.choice(files)
        if generator.random() < 0.2:
            damage(changed, generator)
        else:
            changed.write_text(_changed(changed.read_text(), generator), newline="")
        yield partial(attempt, root, files)


def _changed(text: str, generator: random.Random) -> str:
    rows = [line.split(",") for line in text.splitlines()]
    row = generator.choice(rows)
    way = generator.choice(("cell", "cell", "cell", "more", "less", "swap", "twice", "blank", "ends"))
    place = generator.randrange(len(row))
    if way == "cell":
        row[place] = generator.choice(CELLS)
    elif way == "more":
        row.insert(place, generator.choice(CELLS))
    elif way == "less":
        del row[place]
    elif way == "swap":  # columns in another order are no damage
        other = generator.randrange(len(rows[0]))
        for each in rows:
            each[place % len(each)], each[other % len(each)] = each[other % len(each)], each[place % len(each)]
    elif way == "twice":
        rows.insert(generator.randrange(len(rows)), list(row))
    elif way == "blank":
        rows.insert(generator.randrange(len(rows) + 1), [generator.choice(("", " ", ",", "\t"))])
    end = generator.choice(("\r\n", "\r")) if way == "ends" else "\n"
    return end.join(map(",".join, rows))


def _cell_by_cell(files: tuple[Path, ...]) -> tuple[np.ndarray, np.ndarray]:
    features, protected, target = (_columns(*pair) for pair in zip(files, hmda.COLUMNS, strict=True))
    kept, labels = [], []
    for mine, (ethnicity, race, sex), (action,) in zip(features, protected, target, strict=True):
        if ethnicity in (1, 2) and race in range(1, 6) and sex in (1, 2) and action in (1, 2, 8, 3, 5, 7):
            kept.append(mine)
            labels.append(float(action in (1, 2, 8)))
    return np.array(kept).reshape(len(kept), len(hmda.COLUMNS[0])), np.array(labels)


def _columns(path: Path, names: list[str]) -> list[list[float]]:
    with open(path, encoding="utf-8", newline="") as file:
        header, *rows = (row for row in csv.reader(file) if "".join(row).strip() or len(row) > 1)  # not blank
    assert all(len(row) == len(header) for row in rows), "rows of another length were taken"
    assert all(header.count(name) == 1 for name in names), "a column is missing, or there twice"
    return [[_number(row[header.index(name)]) for name in names] for row in rows]


def _number(cell: str) -> float:
    return math.nan if cell in MISSING else float(cell)
