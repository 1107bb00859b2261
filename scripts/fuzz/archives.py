"""Archives of datasets: damaged, or with members that are no ordinary files."""

from __future__ import annotations

import io
import random
import shutil
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from cdgrab.errors import CdgrabError
from experiments.data import cifar10, hmda
from scripts.fuzz.damage import contents, damage

STATE = "TX"  # without published checksums: what the archive holds is believed
KINDS = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR)
TAR_KINDS = [bytes([kind]) for kind in b"12356S"]  # links, devices, folders, fifos, sparse files
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


def archives(generator: random.Random, scratch: Path) -> Iterator[Callable[[], object]]:
    """Download and unpack one. What is taken must be what was packed, and nothing may be left of what is refused."""
    tables = {f"2017-{STATE}-{part}.csv": f"{part}\n".encode() * 300 for part in hmda.PARTS}

    def attempt(root: Path, download: Callable[[Path], object]) -> None:
        folder = root / "data" / "hmda"
        try:
            download(root / "data")
            whole = {str(folder / name): table for name, table in tables.items()}
            assert contents(folder) == whole, "another content was unpacked"
        except CdgrabError:
            assert not (root / "data").exists(), "something was left behind"
            raise
        finally:
            shutil.rmtree(root)

    while True:
        root = Path(tempfile.mkdtemp(dir=scratch))
        if generator.random() < 0.7:
            bad = generator.choice(list(tables))
            (root / STATE).mkdir()
            for name, table in tables.items():
                _zip(root / STATE / f"{Path(name).stem}.zip", name, table, generator if name == bad else None)
            download = partial(hmda.download, origin=root.as_uri(), states=(STATE,))
        else:
            _tar(root / "archive", generator)
            download = partial(cifar10.download, origin=(root / "archive").as_uri())
        yield partial(attempt, root, download)


def _zip(path: Path, name: str, table: bytes, generator: random.Random | None) -> None:
    method = generator.choice(METHODS) if generator else zipfile.ZIP_DEFLATED
    member = zipfile.ZipInfo(generator.choice((name, name, name, f"../{name}", name.upper())) if generator else name)
    if generator and generator.random() < 0.3:
        member.external_attr = generator.choice(KINDS) << 16
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr(member, table, method)
    if generator:
        if generator.random() < 0.2:
            _change_both_headers(path, generator)
        else:
            damage(path, generator)


def _change_both_headers(path: Path, generator: random.Random) -> None:
    """Of the member, alike: whether it is encrypted, or how it is compressed."""
    content = bytearray(path.read_bytes())
    central = content.rfind(b"PK\x01\x02")
    place, value = generator.choice(((6, 1), (8, generator.randrange(100))))
    content[place], content[central + 2 + place] = value, value
    path.write_bytes(content)


def _tar(path: Path, generator: random.Random) -> None:
    """Its contents are not those that were published: it is never taken."""
    with tarfile.open(path, generator.choice(("w", "w:gz", "w:bz2", "w:xz"))) as opened:
        odd = generator.choice(list(cifar10.PUBLISHED))
        for name in cifar10.PUBLISHED:
            member = tarfile.TarInfo(f"{cifar10.FOLDER}/{name}")
            member.size = 400
            if name == odd and generator.random() < 0.5:
                member.type, member.linkname = generator.choice(TAR_KINDS), generator.choice(("/etc/passwd", odd, ".."))
            opened.addfile(member, io.BytesIO(generator.randbytes(400)))
    damage(path, generator)
