"""CIFAR-10 of the hub, from small repositories in its format, and through torchvision."""

import sys
import textwrap

import datasets
import numpy as np
import pytest
from hub_repositories import known, make_repository, offline  # noqa: F401
from PIL import Image

from cdgrab.errors import CdgrabError
from experiments.data import cifar10, hub


@pytest.fixture
def pictures(monkeypatch):
    """By name, the content of binary files of 6 made-up pictures each, with the checksums that go with them."""
    rng = np.random.default_rng(0)
    content = {}
    for name in cifar10.BINARY:
        records = rng.integers(0, 256, (6, cifar10.RECORD), dtype=np.uint8)
        records[:, 0] %= 10
        content[name] = records.tobytes()
    monkeypatch.setattr(cifar10, "BINARY", known(content))
    return content


def cifar10_repository(folder, content, order=(4, 3, 2, 5, 1)):
    """The hub's order of batches is that of the author's archive."""
    splits = {"train": b"".join(content[f"data_batch_{i}.bin"] for i in order), "test": content["test_batch.bin"]}
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    made = {}
    for split, data in splits.items():
        records = np.frombuffer(data, np.uint8).reshape(-1, cifar10.RECORD)
        images = [Image.fromarray(r[1:].reshape(3, 32, 32).transpose(1, 2, 0)) for r in records]
        made[split] = datasets.Dataset.from_dict({"img": images, "label": records[:, 0].tolist()}, features)
    return make_repository(folder, {"plain_text": made})


def test_cifar10_pictures_become_the_binary_files(tmp_path, pictures):
    repository = cifar10_repository(tmp_path / "repository", pictures)
    paths = hub.cifar10_pictures(tmp_path / "data", repository)
    assert {path.name: path.read_bytes() for path in paths} == pictures
    source = cifar10.locate(root=str(tmp_path / "data"))
    assert source.description == "CIFAR-10 (binary files)" and source.papers_own and source.files == tuple(paths)
    loaded, checksums = cifar10.load(source)
    everything = np.frombuffer(b"".join(pictures.values()), np.uint8).reshape(36, -1)
    assert (loaded.images.reshape(36, -1) == everything[:, 1:]).all() and loaded.train == 30
    assert (loaded.labels == everything[:, 0]).all() and len(checksums) == 6
    assert cifar10.download(tmp_path / "data", origin="file:///nowhere") == paths, "complete: nothing to download"


@pytest.mark.parametrize("name", ["data_batch_2.bin", "test_batch.bin"])
def test_wrong_pictures_are_refused_and_nothing_is_left(tmp_path, pictures, name):
    changed = bytearray(pictures[name])
    changed[100] ^= 1
    for number, content in enumerate([bytes(changed), pictures[name][: -cifar10.RECORD]]):
        repository = cifar10_repository(tmp_path / f"repository-{number}", pictures | {name: content})
        with pytest.raises(CdgrabError, match="does not give the published file"):
            hub.cifar10_pictures(tmp_path / "data", repository)
        assert not (tmp_path / "data").exists()


def test_pictures_that_cannot_be_read_are_refused(tmp_path, pictures):
    features = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
    for number, (image, label) in enumerate(
        [({"bytes": b"no picture"}, 1), (None, 1), (Image.new("RGB", (32, 32)), -1)]
    ):
        rows = datasets.Dataset.from_dict({"img": [image] * 2, "label": [label] * 2}, features)
        repository = make_repository(tmp_path / f"repository-{number}", {"plain_text": {"train": rows}})
        with pytest.raises(CdgrabError, match="a picture of the train split cannot be read"):
            hub.cifar10_pictures(tmp_path / "data", repository)
        assert not (tmp_path / "data").exists()


def test_damaged_binary_files_are_named(tmp_path, pictures):
    paths = hub.cifar10_pictures(tmp_path / "data", cifar10_repository(tmp_path / "repository", pictures))
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    with pytest.raises(CdgrabError, match="data_batch_3.bin is damaged.*make data-cifar10"):
        cifar10.load(cifar10.locate(root=str(tmp_path / "data")))
    (tmp_path / "data" / cifar10.FOLDER).mkdir()  # an incomplete set of the other kind does not hide this one
    assert hub.cifar10_pictures(tmp_path / "data", str(tmp_path / "repository")) == paths
    assert cifar10.locate(root=str(tmp_path / "data")).files == tuple(paths)


def test_cifar10_through_torchvision(tmp_path, monkeypatch):
    """torchvision cannot be imported everywhere, so that a module with its interface stands in for it here.

    It shows what is done with the files that torchvision leaves, and with its errors; not that torchvision works.
    """
    content = {name: name.encode() * 10 for name in cifar10.PUBLISHED}
    monkeypatch.setattr(cifar10, "PUBLISHED", known(content))
    (tmp_path / "site" / "torchvision").mkdir(parents=True)
    (tmp_path / "site" / "torchvision" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name in {"torchvision", "torchvision.datasets", *(n for n in sys.modules if n.startswith("torchvision."))}:
        monkeypatch.setitem(sys.modules, name, None)  # so that what stands in for it goes again
        del sys.modules[name]
    module = tmp_path / "site" / "torchvision" / "datasets.py"
    with pytest.raises(CdgrabError, match=r"torchvision cannot be used \(No module named 'torchvision.datasets'\)"):
        cifar10.download_with_torchvision(tmp_path / "data")
    write = """
        from pathlib import Path

        class CIFAR10:
            def __init__(self, root, train=True, transform=None, target_transform=None, download=False):
                folder = Path(root) / "cifar-10-batches-py"
                folder.mkdir()
                (folder.parent / "cifar-10-python.tar.gz").touch()
                for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch", "batches.meta"]:
                    (folder / name).write_bytes(NAME.encode() * 10)
    """
    outcomes = [
        ("raise", r"cannot download CIFAR-10 \(Dataset not found or corrupted\)"),
        ("wrong", "torchvision does not give the published file data_batch_1"),
        ("right", None),
    ]
    for outcome, message in outcomes:
        text = textwrap.dedent(write).replace("NAME", {"wrong": "name[::-1]"}.get(outcome, "name"))
        if outcome == "raise":
            text = text.replace(
                "folder = ", 'raise RuntimeError("Dataset not found or corrupted.\\nUse download=True") #'
            )
        module.write_text(text)
        sys.modules.pop("torchvision.datasets", None)
        sys.modules.pop("torchvision", None)
        if message:
            with pytest.raises(CdgrabError, match=message) as refused:
                cifar10.download_with_torchvision(tmp_path / "data")
            assert "\n" not in str(refused.value) and not (tmp_path / "data").exists()
        else:
            paths = cifar10.download_with_torchvision(tmp_path / "data")
            assert {path.name: path.read_bytes() for path in paths} == content
            assert [path.name for path in (tmp_path / "data").iterdir()] == [cifar10.FOLDER]
            assert sorted(path.name for path in paths[0].parent.iterdir()) == sorted(content)
