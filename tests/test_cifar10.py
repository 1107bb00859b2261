"""CIFAR-10: the model and its per-example gradients, the files and the embedded digits, the herding metric, a run."""

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
from cdgrab.herding import parallel_herding_bound
from cdgrab.runtime.group import WorkerGroup
from experiments import train
from experiments.data import cifar10
from experiments.data.sources import sha256
from experiments.store.records import read_manifest, read_metrics
from experiments.tasks import make_task
from experiments.training.compiled import Compiled
from experiments.training.config import compose
from experiments.training.evaluation import evaluate, evaluate_together, fixed_herding
from experiments.training.gradients import FlatParameters, gradient_function, over_replicas, summed, together

WORKERS, UNITS = 2, 3

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


def embedded_task(*settings):
    run = compose(["task=cifar10", "data=embedded", *settings])
    return make_task(run.config, run.source, torch.device("cpu"))


@pytest.fixture(scope="module")
def problem():
    """Task, flat parameters, their start, a batch [workers, units, ...]; in float64. Constant images are all ties."""
    task = embedded_task("task.dtype=float64")
    flat = FlatParameters(task.model)
    random = torch.Generator().manual_seed(0)
    images = torch.randn(WORKERS, UNITS, 3, 32, 32, dtype=torch.float64, generator=random)
    images[0, 0], images[1, 2] = 0.0, torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)[:, None, None]
    labels = torch.randint(10, (WORKERS, UNITS), generator=random)
    parameters = flat.flatten({name: p.detach() for name, p in task.model.named_parameters()})
    return task, flat, parameters, (images, labels)


# -- the model --------------------------------------------------------------------------------------------------------


def ordinary_lenet():
    nn = torch.nn
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 120, 5), nn.ReLU(), nn.Flatten(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    ).double()


def test_published_weights_are_those_of_an_ordinary_lenet_after_manual_seed():
    task = embedded_task("task.initial_weights=published", "seed=3", "task.dtype=float64")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = ordinary_lenet()
    for ours, theirs in zip(task.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.flatten(), theirs.flatten())


@pytest.fixture(scope="module")
def one_by_one(problem):
    """Gradients [workers, units, dim] and losses [workers, units] by ordinary backward passes."""
    _, flat, parameters, (images, labels) = problem
    model = ordinary_lenet()
    torch.nn.utils.vector_to_parameters(parameters, model.parameters())
    gradients = torch.empty(WORKERS, UNITS, flat.dim, dtype=torch.float64)
    losses = torch.empty(WORKERS, UNITS, dtype=torch.float64)
    for w, u in np.ndindex(WORKERS, UNITS):
        loss = torch.nn.functional.cross_entropy(model(images[w, u][None]), labels[w, u][None])
        gradient = torch.autograd.grad(loss, list(model.parameters()))
        gradients[w, u], losses[w, u] = torch.cat([g.flatten() for g in gradient]), loss.detach()
    return gradients, losses


@pytest.mark.parametrize("units", [1, UNITS], ids=["one_unit", "several_units"])
@pytest.mark.parametrize(("how", "traced"), [("vmap", False), ("vmap", True), ("backward", False)])
@pytest.mark.parametrize("per_unit", [False, True], ids=["means", "per_unit"])
def test_gradients_equal_a_one_by_one_loop_over_an_ordinary_network(problem, one_by_one, per_unit, how, traced, units):
    task, flat, parameters, batch = problem
    expected, losses, *batch = (tensor[:, :units] for tensor in (*one_by_one, *batch))
    compute = Compiled(gradient_function(task, flat, per_unit, how), traced).for_inputs(parameters, *batch)
    with torch.no_grad():
        for _ in range(3):  # the TorchScript interpreter re-optimises on its second and third call
            gradients, means, worker_losses = compute(parameters, *batch)
    torch.testing.assert_close(means, expected.mean(1), rtol=0, atol=1e-10)
    torch.testing.assert_close(worker_losses, losses.mean(1), rtol=0, atol=1e-10)
    if per_unit:
        torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("lookers", [0, 1])
def test_runs_whose_sorters_do_not_look_get_the_same_mean_gradients(problem, lookers, monkeypatch):
    """In a group with one that looks, or without."""
    task, flat, parameters, batch = problem
    owned, batch = torch.empty(3, WORKERS, 1), [tensor[:, :1].expand(3, *tensor[:, :1].shape) for tensor in batch]
    parameters = parameters * torch.tensor([[1.0], [0.9], [1.1]], dtype=torch.float64)
    each = summed(gradient_function(task, flat, bool(lookers)), WORKERS)
    monkeypatch.setattr("experiments.training.gradients.MANY", 0)
    units, means, losses = together(task, flat, each, "vmap", owned, lookers)(parameters, *batch)
    expected_units, expected_means, expected_losses = over_replicas(each, lookers, "vmap")(parameters, *batch)
    assert units.numel() == expected_units.numel() == lookers * WORKERS * flat.dim
    assert torch.equal(units.flatten(), expected_units.flatten())
    torch.testing.assert_close(means, expected_means, rtol=0, atol=1e-12)
    torch.testing.assert_close(losses.mean(1), expected_losses.mean(1), rtol=1e-12, atol=0)


def test_several_runs_evaluated_at_once_have_the_metrics_of_each():
    task = embedded_task("task.dtype=float64", "task.limit=41", "task.test_limit=30", "workers=2", "task.batch=2")
    task.evaluated_at_once = 16
    flat, group = FlatParameters(task.model), WorkerGroup(2)
    parameters = torch.randn(2, flat.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 8
    owned = torch.stack([torch.randperm(40).view(2, 20), torch.arange(1, 41).view(2, 20)])
    found = evaluate_together(task, flat.unflatten(parameters), owned)
    for own, its, metrics in zip(parameters, owned, found, strict=True):
        assert metrics == pytest.approx(evaluate(task, flat.unflatten(own), its, group), rel=1e-12)
    assert found[0]["train_loss"] != found[1]["train_loss"]


def test_the_model_is_lenet(problem):
    _, flat, _, _ = problem
    assert flat.dim == 62_006
    assert [shape.numel() for shape in flat.shapes.values()] == [p.numel() for p in ordinary_lenet().parameters()]


def test_evaluation_in_chunks_equals_the_ordinary_network(problem, monkeypatch):
    task, flat, vector, _ = problem
    monkeypatch.setattr(task, "evaluated_at_once", 150)
    model = ordinary_lenet()
    torch.nn.utils.vector_to_parameters(vector, model.parameters())
    with torch.no_grad():
        units = {"train": torch.arange(200), "test": torch.arange(160)}
        totals = [task.totals(split, flat.unflatten(vector), some) for split, some in units.items()]
        metrics = task.metrics(*({name: float(value) for name, value in total.items()} for total in totals))
        for split, some in units.items():
            images, labels = task.fetch(split, some)
            logits = model(images)
            loss, correct = torch.nn.functional.cross_entropy(logits, labels), logits.argmax(1) == labels
            assert metrics[f"{split}_loss"] == pytest.approx(float(loss), rel=1e-12)
            assert metrics[f"{split}_accuracy"] == pytest.approx(100 * float(correct.double().mean()))


# -- the data ---------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("setting", "message"),
    [("limit=0", "at least 1"), ("train_share=1.5", "above 0 and below 1"), ("herding_every=-1", "at least 0")],
)
def test_bad_settings_are_one_sentence(setting, message):
    with pytest.raises(CdgrabError, match=f"task.{setting.split('=')[0]} must be .*{message}"):
        embedded_task(f"task.{setting}")


def test_embedded_default_is_the_digits():
    task, other = embedded_task("size=paper"), embedded_task("size=paper", "seed=1")
    assert task.source.label == "embedded" and task.rows == {"all": 1797, "train": 1437, "test": 360}
    images, labels = task.fetch("test", torch.arange(task.test_units))
    assert labels.unique().tolist() == list(range(10)) and images.dtype == torch.float32
    grey = images[0, 0] * 0.2023 + 0.4914
    torch.testing.assert_close(grey * 16, (grey * 16).round(), atol=1e-4, rtol=0)
    assert torch.equal(grey, grey[::4, ::4].repeat_interleave(4, 0).repeat_interleave(4, 1))
    assert not torch.equal(images, other.fetch("test", torch.arange(other.test_units))[0])


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


# -- runs and their herding metric ------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatch", [1, 2, 4])
def test_herding_metric_equals_the_bound_of_all_gradients_at_once(microbatch):
    task = embedded_task("task.dtype=float64", "task.limit=16")
    flat, group = FlatParameters(task.model), WorkerGroup(3)
    parameters = flat.flatten({name: p.detach() for name, p in task.model.named_parameters()})
    owned = torch.randperm(15, generator=torch.Generator().manual_seed(1)).view(3, 5)
    order = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(w)) for w in range(3)])
    compute = gradient_function(task, flat, per_unit=True)
    with torch.no_grad():
        found = fixed_herding(task, compute, parameters, owned.gather(1, order), group, microbatch)
        every, *_ = compute(parameters, *task.fetch("train", owned))
    assert found["herding_per_step"] == pytest.approx(parallel_herding_bound(every, order), rel=1e-10)
    assert found["herding_per_vector"] == pytest.approx(parallel_herding_bound(every, order, True), rel=1e-10)


def smoke_run(folder, *more):
    settings = ["task=cifar10", "data=embedded", "size=smoke", "workers=16", "epochs=2", f"run_dir={folder}"]
    assert train.main([*settings, *more]) == 0
    return read_metrics(folder / "metrics.jsonl")


def test_a_run_logs_everything_and_measuring_changes_nothing(tmp_path):
    measure = ("task.herding_every=2", "task.herding_replays=[1, 2]")
    plain, measured = smoke_run(tmp_path / "plain"), smoke_run(tmp_path / "measured", *measure)
    assert {"train_loss", "train_accuracy", "test_loss", "test_accuracy"} <= plain[0].keys()
    sizes = {"workers": 16, "units": 8, "microbatch": 4, "steps_per_epoch": 2, "parameters": 62_006}
    assert read_manifest(tmp_path / "plain")["sizes"] == sizes
    assert "herding_per_step" not in measured[0]
    assert 0 < measured[1]["herding_per_step"] <= measured[1]["herding_per_vector"]
    for key in ("train_loss", "order_hash"):
        assert plain[1][key] == measured[1][key]


def test_herding_is_measured_for_sorters_that_see_no_gradients(tmp_path):
    lines = smoke_run(tmp_path, "sorter=d_rr", "task.herding_every=1")
    assert all(0 < line["herding_per_step"] <= line["herding_per_vector"] for line in lines)


@pytest.mark.parametrize("experiment", ["fig4_cifar10_workers", "fig12_cifar10_lr"])
def test_experiments_have_the_papers_settings(experiment):
    config = compose([f"experiment={experiment}", "data=embedded", "size=paper"]).config
    assert (config.workers, config.epochs, config.task.batch, config.task.truncate) == (64, 100, 64, True)
    assert (config.task.lr, config.task.momentum, config.task.weight_decay) == (1e-3, 0.9, 1e-2)
