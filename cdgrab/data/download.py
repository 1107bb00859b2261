"""Verified, atomic downloads: a file is either absent or complete and checked."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

from tqdm import tqdm

from ..errors import CdgrabError
from .sources import sha256

POINTER = b"version https://git-lfs"


def fetch(url: str, target: Path, known: tuple[int, str] | None = None, member: str | None = None) -> None:
    """Download `url` to `target`, or one `member` of the zip archive at `url`. Nothing is left behind on failure.

    `known` is the (size, sha256) that the finished file must have.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as folder:
        path = _download(url, Path(folder) / "download")
        if member:
            path = _extract(path, member, Path(folder) / "member", url)
        _verify(path, known, url)
        os.replace(path, target)


def fetch_missing(urls: dict[Path, str], published: dict[str, tuple[int, str]]) -> list[Path]:
    """Download the files that are not there yet; `published` has their (size, sha256) by name."""
    for path, url in urls.items():
        if not path.exists():
            fetch(url, path, published[path.name])
    return list(urls)


def _download(url: str, path: Path) -> Path:
    try:
        with urllib.request.urlopen(url, timeout=60) as response, open(path, "wb") as file:
            total = int(response.headers.get("Content-Length") or 0)
            bar = tqdm(
                total=total or None,
                unit="B",
                unit_scale=True,
                desc=url.rpartition("/")[2],
                disable=not sys.stderr.isatty(),
            )
            with bar:
                while block := response.read(1 << 16):
                    file.write(block)
                    bar.update(len(block))
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise CdgrabError(f"{url} cannot be downloaded ({getattr(error, 'reason', error)})") from error
    if total and path.stat().st_size != total:
        raise CdgrabError(f"{url} broke off after {path.stat().st_size:,} of {total:,} bytes; try again")
    with open(path, "rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise CdgrabError(f"{url} is a pointer to a large file, not the file itself; download it with git lfs")
    return path


def _extract(archive: Path, member: str, path: Path, url: str) -> Path:
    """Reads one member by name, so that nothing can be written elsewhere."""
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(member) as source, open(path, "wb") as target:
            shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CdgrabError(f"{url} is not a zip archive that holds {member}") from error
    return path


def _verify(path: Path, known: tuple[int, str] | None, url: str) -> None:
    if known and (path.stat().st_size, sha256(path)) != known:
        raise CdgrabError(f"{url} is not the published file: its size or checksum differs")
