"""CIFAR-10 in its original files (Python or binary), or handwritten digits of a pip package, made to look alike."""

from __future__ import annotations

import gzip
import os
import pickle
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cdgrab.errors import CdgrabError
from experiments.data.download import WRAPPING, fetch, install, limited, reason, sound_archive
from experiments.data.sources import PackagedFile, Source, by_checksum, check_files, data_root

CLASSES, SIDE = 10, 32
ORIGIN = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
FOLDER = "cifar-10-batches-py"  # in the archive and under the data root
GET = "get it with `make data-cifar10`"
# The sha256 of files with the published md5 (which a test checks). The last file is the test part.
PUBLISHED = {
    "data_batch_1": (31035704, "54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd"),
    "data_batch_2": (31035320, "766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8"),
    "data_batch_3": (31035999, "0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9"),
    "data_batch_4": (31035696, "3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b"),
    "data_batch_5": (31035623, "d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154"),
    "test_batch": (31035526, "f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831"),
}
# The same pictures in the binary distribution: one byte of label, then the pixels. Nothing else is in these files, so
# they can also be made from copies that lack the picture names. A test checks the published md5.
BINARY_FOLDER = "cifar-10-batches-bin"
BINARY = {
    "data_batch_1.bin": (30730000, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
    "data_batch_2.bin": (30730000, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
    "data_batch_3.bin": (30730000, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
    "data_batch_4.bin": (30730000, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
    "data_batch_5.bin": (30730000, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
    "test_batch.bin": (30730000, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
}
RECORD = 1 + 3 * SIDE * SIDE  # bytes of a picture in a binary file
PACKAGED = PackagedFile(
    *("sklearn", "datasets/data/digits.csv.gz", "scikit-learn==1.7.2"),
    (57523, "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"),
)


@dataclass(frozen=True)
class Pictures:
    """images uint8 [pictures, 3, SIDE, SIDE] with values 0 … white; labels int64 [pictures].

    The first `train` pictures are the published training part; None: there is no published split.
    """

    images: np.ndarray
    labels: np.ndarray
    white: int
    train: int | None


def locate(data: str = "auto", root: str | None = None) -> Source:
    """The source that a run with these settings uses. Does not read the files yet."""
    folder = data_root(root, data)
    there = [files for files in _layouts(folder) if files[0].parent.is_dir()] if folder else []
    if there:  # prefer files that look complete; otherwise loading names the missing or damaged file
        files = next((files for files in there if all(map(_looks_right, files))), there[0])
        binary = " (binary files)" * (files[0].parent.name == BINARY_FOLDER)
        return Source("CIFAR-10", f"CIFAR-10{binary}", files, papers_own=True, how_to_get=GET)
    return PACKAGED.source("1,797 handwritten digits (scikit-learn)")


def complete(root: Path) -> list[Path]:
    """The files of the first layout that is complete and right; an empty list if there is none."""
    right = by_checksum(PUBLISHED | BINARY)
    return next((list(files) for files in _layouts(root) if all(map(right, files))), [])


def download(root: Path, origin: str = ORIGIN) -> list[Path]:
    """All files from the published archive; those already there and right are kept."""

    def unpack(folder: Path) -> None:
        most = sum(size for size, _ in PUBLISHED.values()) + WRAPPING
        fetch(origin, folder / "archive.gz", most)
        with sound_archive(f"{origin} is not a tar archive that holds {', '.join(PUBLISHED)}"):
            with gzip.open(folder / "archive.gz") as packed, open(folder / "archive", "wb") as archive:
                archive.writelines(limited(packed, most, origin))
            take_out(folder)

    def take_out(folder: Path) -> None:
        with tarfile.open(folder / "archive", "r:") as opened:
            for name in PUBLISHED:  # read by name, so that nothing can be written elsewhere
                if not (member := opened.getmember(f"{FOLDER}/{name}")).isreg():
                    raise CdgrabError(f"{member.name} in {origin} is not an ordinary file")
                with opened.extractfile(member) as source, open(folder / name, "wb") as target:
                    target.writelines(limited(source, PUBLISHED[name][0], f"{member.name} in {origin}"))

    return _install(root, unpack, origin)


def download_with_torchvision(root: Path) -> list[Path]:
    """The same files through torchvision, if it is installed."""

    def unpack(folder: Path) -> None:
        try:
            from torchvision.datasets import CIFAR10
        except Exception as error:  # also where it was built for another version of torch
            raise CdgrabError(f"torchvision cannot be used ({reason(error)})") from error
        try:
            CIFAR10(str(folder), download=True)
        except Exception as error:  # of its network library, of its checks
            raise CdgrabError(f"torchvision cannot download CIFAR-10 ({reason(error)})") from error
        for name in PUBLISHED:
            os.replace(folder / FOLDER / name, folder / name)

    return _install(root, unpack, "torchvision")


def _install(root: Path, unpack: Callable[[Path], None], origin: str) -> list[Path]:
    """`unpack` writes all files at once."""

    def write(path: Path) -> None:
        if not path.exists():
            unpack(path.parent)

    return complete(root) or install(root / FOLDER, PUBLISHED, by_checksum(PUBLISHED), write, origin)


def _layouts(root: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    return tuple(root / FOLDER / name for name in PUBLISHED), tuple(root / BINARY_FOLDER / name for name in BINARY)


def _looks_right(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == (PUBLISHED | BINARY)[path.name][0]


def load(source: Source) -> tuple[Pictures, dict[str, str]]:
    """All pictures, and the files' checksums."""
    if source.embedded:
        return _load_packaged(source.files[0])
    checksums = check_files(source.files, PUBLISHED | BINARY, GET)
    batches = [_read_batch(path) for path in source.files]
    images, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    _, test_labels = batches[-1]
    return Pictures(images, labels, white=255, train=len(labels) - len(test_labels)), checksums


class ArraysOnly(pickle.Unpickler):
    """Unpickles numpy arrays and plain values only. Anything else that a pickle may name would be executed."""

    ALLOWED = {
        "numpy.core.multiarray._reconstruct": np.empty(0).__reduce__()[0],
        "numpy.ndarray": np.ndarray,
        "numpy.dtype": np.dtype,
    }

    def find_class(self, module: str, name: str) -> object:
        if f"{module}.{name}" not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return self.ALLOWED[f"{module}.{name}"]


def _read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """images uint8 [pictures, 3, SIDE, SIDE] and labels int64 [pictures] of one file."""
    try:
        images, labels = _read_binary(path) if path.suffix == ".bin" else _read_pickle(path)
        if images.dtype != np.uint8 or labels.dtype != np.int64 or labels.shape != (len(images),):
            kinds = f"{images.dtype} images and {labels.dtype} labels"
            raise ValueError(f"{kinds} of shapes {images.shape}, {labels.shape}")
        if len(labels) and not 0 <= labels.min() <= labels.max() < CLASSES:
            raise ValueError(f"labels from {labels.min()} to {labels.max()}")
        return images.reshape(-1, 3, SIDE, SIDE), labels
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise CdgrabError(f"the data file {path} cannot be read ({error or type(error).__name__}); {GET}") from error


def _read_pickle(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with open(path, "rb") as file:
        content = ArraysOnly(file, encoding="bytes").load()  # written by Python 2: texts are bytes
    return content[b"data"], np.asarray(content[b"labels"])


def _read_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    records = np.fromfile(path, dtype=np.uint8).reshape(-1, RECORD)
    return records[:, 1:], records[:, 0].astype(np.int64)


def _load_packaged(path: Path) -> tuple[Pictures, dict[str, str]]:
    """8 x 8 grey pictures with values 0 … 16, scaled up by repetition and given three equal channels."""
    checksums = PACKAGED.check(path)
    table = np.loadtxt(path, delimiter=",", dtype=np.int64)
    small = table[:, :-1].reshape(-1, 1, 8, 8).astype(np.uint8)
    images = small.repeat(3, axis=1).repeat(SIDE // 8, axis=2).repeat(SIDE // 8, axis=3)
    return Pictures(images, table[:, -1], white=16, train=None), checksums
