"""Verified, atomic downloads: a file is either absent or complete and checked."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import stat
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from cdgrab.errors import CdgrabError, first_line
from experiments.data.progress import progress
from experiments.data.sources import Published, by_checksum

POINTER = b"version https://git-lfs"
MOST = 2**27  # bytes of a file whose size is not published: more than any of them has
WRAPPING = 2**20  # bytes that an archive may have beyond what is wanted of it
BLOCK = 2**12  # bytes read at once; zipfile takes so many packed ones, and bzip2 makes up to 20,000 of each


def reason(error: Exception) -> str:
    """The message of another library's error, short enough for one sentence."""
    return first_line(getattr(error, "reason", None) or error).rstrip(" .:")


@contextlib.contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """A temporary folder inside `folder`, so that moving a file out of it is atomic.

    Folders that were made for it and stay empty are removed: they would look like a dataset with missing files.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
            yield Path(temporary)
    except OSError as error:
        raise CdgrabError(f"the files cannot be written to {folder} ({reason(error)})") from error
    finally:
        for path in made:  # the innermost first; only empty folders can be removed this way
            with contextlib.suppress(OSError):
                path.rmdir()


def install(
    folder: Path, names: Iterable[str], is_right: Callable[[Path], bool], write: Callable[[Path], None], origin: str
) -> list[Path]:
    """Put files with these names into `folder`, all or none. Files that are there and right are kept.

    `write(path)` writes one file from `origin` into a temporary folder. A wrong file is replaced only when all new
    files are written and right.
    """
    paths = [folder / name for name in names]
    wanted = [path for path in paths if not is_right(path)]
    if wanted:
        with staging(folder) as temporary:
            for path in wanted:
                write(temporary / path.name)
                if not is_right(temporary / path.name):
                    raise CdgrabError(f"{origin} does not give the published file {path.name}: its contents differ")
            for path in wanted:
                os.replace(temporary / path.name, path)
    return paths


def fetch(url: str, target: Path, most: int = MOST, member: str | None = None) -> None:
    """Download `url` to `target`, or one `member` of the zip archive at `url`, which is then kept beside it. A file of
    more than `most` bytes is refused."""
    if member:
        archive = target.with_name(f"{target.name}.zip")
        _download(url, archive, most + WRAPPING)
        _extract(archive, member, target, url, most)
    else:
        _download(url, target, most)


def fetch_missing(folder: Path, urls: dict[str, str], published: Published) -> list[Path]:
    """Download the files that are not there or damaged."""
    site = urllib.parse.urlsplit(next(iter(urls.values()))).netloc

    def write(path: Path) -> None:
        fetch(urls[path.name], path, published[path.name][0])

    return install(folder, urls, by_checksum(published), write, site)


def limited(source: BinaryIO, most: int, what: str) -> Iterator[bytes]:
    """All that can be read, in blocks. What was made to fill the disk does not."""
    length = 0
    while block := source.read(BLOCK):
        length += len(block)
        if length > most:
            raise CdgrabError(f"{what} has more than {most:,} bytes: it is not what was published")
        yield block


def _download(url: str, path: Path, most: int) -> None:
    try:
        with urllib.request.urlopen(url, timeout=60) as response, open(path, "wb") as file:
            total = int(response.headers.get("Content-Length") or 0)
            with progress(total=total or None, unit="B", unit_scale=True, desc=url.rpartition("/")[2]) as bar:
                for block in limited(response, most, url):
                    file.write(block)
                    bar.update(len(block))
    except CdgrabError:
        raise
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        raise CdgrabError(f"{url} cannot be downloaded ({reason(error)})") from error
    if total and path.stat().st_size != total:
        raise CdgrabError(f"{url} broke off after {path.stat().st_size:,} of {total:,} bytes; try again")
    with open(path, "rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise CdgrabError(f"{url} is a pointer to a large file, not the file itself; download it with git lfs")


def _extract(archive: Path, member: str, path: Path, url: str, most: int) -> None:
    """Reads one member by name, so that nothing can be written elsewhere."""
    with sound_archive(f"{url} is not a zip archive that holds {member}"), zipfile.ZipFile(archive) as opened:
        kind = stat.S_IFMT(opened.getinfo(member).external_attr >> 16)
        if kind not in (0, stat.S_IFREG):
            raise CdgrabError(f"{member} in {url} is not an ordinary file")
        with opened.open(member) as source, open(path, "wb") as target:
            target.writelines(limited(source, most, f"{member} in {url}"))


@contextlib.contextmanager
def sound_archive(otherwise: str) -> Iterator[None]:
    """A damaged archive can raise nearly anything while it is read: that becomes one sentence. Errors of the disk stay
    what they are."""
    try:
        yield
    except CdgrabError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # EINVAL: an offset before the start
            raise
        raise CdgrabError(f"{otherwise} ({reason(error)})") from error
