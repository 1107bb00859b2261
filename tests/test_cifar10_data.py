"""CIFAR-10's files: read as published, downloaded, and refused where they are damaged."""

import gzip
import hashlib
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from cdgrab.errors import CdgrabError
from experiments.data import cifar10
from experiments.data.sources import sha256
from experiments.tasks import make_task
from experiments.training.config import compose

REAL_FOLDER = Path(os.environ.get("CDGRAB_DATA", "/nowhere")) / cifar10.FOLDER
# torchvision's list: what the files are known by elsewhere
PUBLISHED_MD5 = [
    *("c99cafc152244af753f735de768cd75f", "d4bba439e000b95fd0a9bffe97cbabec", "54ebc095f3ab1f0389bbae665268c751"),
    *("634d18415352ddfa80567beed471001a", "482c414d41f54cd18b22e5b47cb7c3cb", "40351d587109b95175f43aff81a1287e"),
]
PUBLISHED_BINARY_MD5 = [
    *("5dd7e06a14cb22eb9f671a540d1b7c25", "5ea93a67294ea407fff1d09f752e9692", "942cd6a4bcdd0dd3c604fbe906cb4421"),
    *("ae636b3ba5c66a11e91e8cb52e771fcb", "53f37980c15c3d472c316c40844f3f0d", "803d5f7f4d78ea53de84dbe85f74fb6d"),
]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """20 + … + 20 and 10 made-up pictures in the published layout, and the table of checksums that goes with them."""
    rng = np.random.default_rng(0)
    (tmp_path / cifar10.FOLDER).mkdir()
    known = {}
    for name in cifar10.PUBLISHED:
        count = 10 if name == "test_batch" else 20
        content = {
            b"batch_label": b"made up",
            b"data": rng.integers(0, 256, (count, 3072), dtype=np.uint8),
            b"labels": rng.integers(0, 10, count).tolist(),
        }
        path = tmp_path / cifar10.FOLDER / name
        path.write_bytes(pickle_as_published(content))
        known[name] = (path.stat().st_size, sha256(path))
    monkeypatch.setattr(cifar10, "PUBLISHED", known)
    return tmp_path


def pickle_as_published(content):
    """The published files say `numpy.core`, as numpy did when they were written."""
    return pickle.dumps(content, protocol=3).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


@pytest.mark.parametrize(("normalisation", "mean", "std"), [("cifar10", 0.4465, 0.2010), ("imagenet", 0.406, 0.225)])
def test_a_small_dataset_in_the_published_layout(normalisation, mean, std, files):
    pictures, checksums = cifar10.load(cifar10.locate(root=str(files)))
    assert pictures.images.shape == (110, 3, 32, 32) and pictures.train == 100 and len(checksums) == 6
    first = pickle.loads((files / cifar10.FOLDER / "data_batch_1").read_bytes())
    assert pictures.labels[:20].tolist() == first[b"labels"]
    settings = ["task.limit=64", "task.dtype=float64", f"task.normalisation={normalisation}"]
    run = compose(["task=cifar10", f"data_root={files}", *settings])
    task = make_task(run.config, run.source, torch.device("cpu"))
    assert task.rows == {"all": 110, "train": 64, "test": 10} and task.source.papers_own
    images, labels = task.fetch("train", torch.tensor([[3, 5]]))
    channel, row, column = 2, 7, 30  # channels, then rows, then columns, as the published files say
    raw = first[b"data"][5, 1024 * channel + 32 * row + column]
    assert float(images[0, 1, channel, row, column]) == pytest.approx((raw / 255 - mean) / std)
    assert labels.tolist() == [[first[b"labels"][3], first[b"labels"][5]]]


class Malicious:
    def __reduce__(self):
        return os.system, ("echo owned",)


def batch(data=None, labels=(1,), **more):
    return {b"data": np.zeros((1, 3072), np.uint8) if data is None else data, b"labels": list(labels), **more}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(Malicious()), "posix.system"),
        (pickle_as_published(batch() | {b"more": Malicious()}), "posix.system"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "builtins.eval"),
        (pickle_as_published(batch())[:-900], "cannot be read"),
        (b"", "cannot be read"),
        (pickle_as_published({b"data": 1}), "cannot be read"),
        (pickle_as_published(batch(labels=[10])), "labels from 10"),
        (pickle_as_published(batch(labels=[1, 2])), "shapes"),
        (pickle_as_published(batch(data=np.zeros((1, 3072)))), "float64 images"),
        (pickle_as_published(batch(data=np.zeros((1, 3000), np.uint8))), "cannot be read"),
    ],
)
def test_files_that_are_not_pictures_are_refused(tmp_path, capfd, content, message):
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    with pytest.raises(CdgrabError, match=message) as refused:
        cifar10._read_batch(path)
    assert "\n" not in str(refused.value) and "make data-cifar10" in str(refused.value)
    assert "owned" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-5]), "is damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"), "is damaged"),
    ],
)
def test_missing_and_damaged_files_are_named(files, damage, message):
    damage(files / cifar10.FOLDER / "data_batch_3")
    with pytest.raises(CdgrabError, match=f"data_batch_3 {message}.*make data-cifar10"):
        cifar10.load(cifar10.locate(root=str(files)))


def test_download_takes_the_files_out_of_the_archive(files, tmp_path):
    archive, target = tmp_path / "archive.tar.gz", tmp_path / "target"
    with tarfile.open(archive, "w:gz") as opened:
        opened.add(files / cifar10.FOLDER, cifar10.FOLDER)
    paths = cifar10.download(target, origin=archive.as_uri())
    assert [path.read_bytes() for path in paths] == [(files / cifar10.FOLDER / p.name).read_bytes() for p in paths]
    assert [path.name for path in target.iterdir()] == [cifar10.FOLDER]
    paths[0].unlink()
    archive.write_bytes(b"something else")
    with pytest.raises(CdgrabError, match="not a tar archive"):
        cifar10.download(target, origin=archive.as_uri())
    assert not paths[0].exists()
    for kind in (tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE):
        with tarfile.open(archive, "w:gz") as opened:
            member = tarfile.TarInfo(f"{cifar10.FOLDER}/{paths[0].name}")
            member.type, member.linkname = kind, "elsewhere"
            opened.addfile(member)
        with pytest.raises(CdgrabError, match="not an ordinary file"):
            cifar10.download(target, origin=archive.as_uri())


def member_of_holes(name, size):
    """A header of GNU's sparse format, as which tarfile reads files but does not write them."""
    header = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT))
    header[156:157], header[483:495] = tarfile.GNUTYPE_SPARSE, b"%011o\0" % size
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * ord(" ") + sum(header[156:]))
    return bytes(header)


@pytest.mark.parametrize("large", ["a member", "a member of holes", "what is packed", "the archive"])
def test_an_archive_that_unpacks_to_more_than_was_published_is_refused(files, tmp_path, large, monkeypatch):
    monkeypatch.setattr(cifar10, "WRAPPING", 2**16)
    name, size = f"{cifar10.FOLDER}/data_batch_1", cifar10.PUBLISHED["data_batch_1"][0]
    if large == "a member":
        content = tarfile.TarInfo(name)
        content.size = size + 1
        content = content.tobuf() + bytes(2 * size)
    elif large == "a member of holes":
        content = member_of_holes(name, 2**32) + bytes(1024)
    else:
        content = (os.urandom if large == "the archive" else bytes)(6 * size + 2**16)
    archive = tmp_path / "archive.tar.gz"
    archive.write_bytes(gzip.compress(content, 1))
    named = name if "member" in large else archive.as_uri()
    with pytest.raises(CdgrabError, match=f"^{named}.* has more than [0-9,]* bytes: it is not what was published"):
        cifar10.download(tmp_path / "target", origin=archive.as_uri())
    assert not (tmp_path / "target").exists()


@pytest.mark.skipif(not REAL_FOLDER.is_dir(), reason="needs the real CIFAR-10 files under CDGRAB_DATA")
def test_real_files_have_the_published_counts_and_means():
    source = cifar10.locate()
    assert [hashlib.md5(path.read_bytes()).hexdigest() for path in source.files] == PUBLISHED_MD5
    pictures, _ = cifar10.load(source)
    assert pictures.train == 50_000
    assert np.bincount(pictures.labels[:50_000]).tolist() == [5000] * 10
    assert np.bincount(pictures.labels[50_000:]).tolist() == [1000] * 10
    means = pictures.images[:50_000].mean(axis=(0, 2, 3)) / 255
    np.testing.assert_allclose(means, [0.49140, 0.48216, 0.44653], atol=5e-6)


@pytest.mark.skipif(not REAL_FOLDER.is_dir(), reason="needs the real CIFAR-10 files under CDGRAB_DATA")
def test_checksums_of_the_binary_files_belong_to_the_published_md5():
    for path, md5, known in zip(cifar10.locate().files, PUBLISHED_BINARY_MD5, cifar10.BINARY.values(), strict=True):
        images, labels = cifar10._read_batch(path)
        content = np.column_stack([labels.astype(np.uint8), images.reshape(len(labels), -1)]).tobytes()
        assert hashlib.md5(content).hexdigest() == md5
        assert (len(content), hashlib.sha256(content).hexdigest()) == known


def test_a_damaged_file_is_downloaded_again_and_kept_until_then(files, tmp_path):
    archive, damaged = tmp_path / "archive.tar.gz", files / cifar10.FOLDER / "data_batch_2"
    with tarfile.open(archive, "w:gz") as opened:
        opened.add(files / cifar10.FOLDER, cifar10.FOLDER)
    right = damaged.read_bytes()
    damaged.write_bytes(b"damaged")
    with pytest.raises(CdgrabError, match="cannot be downloaded"):
        cifar10.download(files, origin=(tmp_path / "nowhere").as_uri())
    assert damaged.read_bytes() == b"damaged" and len(list(damaged.parent.iterdir())) == 6
    cifar10.download(files, origin=archive.as_uri())
    assert damaged.read_bytes() == right
