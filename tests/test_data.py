"""Where data comes from: the label rule, damaged files, the embedded default, downloads, the real files if there."""

import functools
import http.server
import os
import stat
import threading
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from cdgrab.errors import CdgrabError
from experiments.data import hmda
from experiments.data.download import fetch, install
from experiments.data.sources import sha256
from experiments.tasks import make_task
from experiments.training.config import compose


def needs(*names):
    folder = Path(os.environ.get("CDGRAB_DATA", "")) / "hmda"
    there = bool(os.environ.get("CDGRAB_DATA")) and all((folder / name).is_file() for name in names)
    return pytest.mark.skipif(not there, reason=f"needs {', '.join(names)} in CDGRAB_DATA/hmda (`make data-lr-hmda`)")


@pytest.fixture
def files(tmp_path):
    """A small state in the published format; names unknown to the checksum table."""
    rng, rows = np.random.default_rng(0), 400
    features = pd.DataFrame(rng.normal(size=(rows, 18)), columns=hmda.FEATURES)
    features["has_co_applicant"] = np.where(rng.random(rows) < 0.1, np.nan, 1.0)
    protected = pd.DataFrame(
        {
            "applicant_ethnicity": rng.integers(1, 5, rows),
            "applicant_race_1": rng.integers(1, 9, rows),
            "applicant_sex": rng.integers(1, 5, rows),
            "co_applicant_sex": 5,
        }
    )
    target = pd.DataFrame({"action_taken": rng.integers(1, 9, rows), "denial_reason_1": np.nan})
    (tmp_path / "hmda").mkdir()
    tables = {"features": features, "protected": protected, "target": target}
    for part, table in tables.items():
        table.to_csv(tmp_path / "hmda" / f"2017-XX-{part}.csv", index=False)
    return tmp_path, tables


def load(root):
    return hmda.load(hmda.locate("XX", root=str(root)))


def test_label_rule_row_by_row(files):
    root, tables = files
    (features, labels), _ = load(root)
    expected = []
    for i in range(400):
        who, action = tables["protected"].loc[i], tables["target"].loc[i, "action_taken"]
        person = (
            who.applicant_ethnicity in (1, 2)
            and who.applicant_race_1 in (1, 2, 3, 4, 5)
            and who.applicant_sex in (1, 2)
        )
        if person and action in (1, 2, 8, 3, 5, 7):
            expected.append((*tables["features"].loc[i, hmda.FEATURES], float(action in (1, 2, 8))))
    np.testing.assert_allclose(np.column_stack([features, labels]), expected)
    assert 0 < len(labels) < 400


@pytest.mark.parametrize(
    ("part", "damage", "message"),
    [
        ("features", lambda path: path.unlink(), "2017-XX-features.csv is missing"),
        ("target", lambda path: path.write_text(path.read_text()[: path.stat().st_size // 2]), "equally many rows"),
        ("features", lambda path: path.write_text("a,b\n1,2\n"), "cannot be read"),
        ("features", lambda path: path.write_bytes(b"\xff\xfe\x00garbage"), "cannot be read"),
        ("protected", lambda path: path.write_text(""), "cannot be read"),
        (
            "features",
            lambda path: _set(path, hmda.FEATURES[3], "nan"),
            f"non-finite values, the first in column {hmda.FEATURES[3]}",
        ),
        (
            "features",
            lambda path: _set(path, hmda.FEATURES[0], "oops"),
            f"text in the numeric column {hmda.FEATURES[0]}",
        ),
        ("features", lambda path: _set(path, hmda.FEATURES[0], "inf"), "non-finite"),
        ("features", lambda path: _set(path, hmda.FEATURES[0], "1e300"), "huge or non-finite"),
        (
            "features",
            lambda path: path.write_text(path.read_text() + ",".join("1" * 20) + "\n"),
            "20 cells in line 402",
        ),
        ("protected", lambda path: path.write_text(path.read_text().replace(",5\n", ",5,5\n")), "5 cells in line 2"),
        ("target", lambda path: path.write_text(path.read_text() + "1\n"), "1 cells in line 402, its header has 2"),
    ],
)
def test_damaged_files_are_named_in_one_sentence(files, part, damage, message):
    root, _ = files
    damage(root / "hmda" / f"2017-XX-{part}.csv")
    with pytest.raises(CdgrabError, match=message) as caught:
        load(root)
    assert "\n" not in str(caught.value) and "2017-XX" in str(caught.value)


def _set(path, column, value):
    table = pd.read_csv(path).astype(object)
    table[column] = value
    table.to_csv(path, index=False)


def test_published_files_are_checked_by_size_and_checksum(tmp_path):
    folder = tmp_path / "hmda"
    folder.mkdir()
    for part in hmda.PARTS:
        (folder / f"2017-NJ-{part}.csv").write_bytes(b"x" * 100)
    source = hmda.locate(root=str(tmp_path))
    assert source.label == "NJ-2017" and not source.papers_own
    with pytest.raises(CdgrabError, match="100 bytes instead of 39,025,691"):
        hmda.load(source)
    with open(folder / "2017-NJ-features.csv", "wb") as file:  # right size, wrong content
        file.truncate(hmda.PUBLISHED["2017-NJ-features.csv"][0])
    with pytest.raises(CdgrabError, match="checksum"):
        hmda.load(source)


def test_new_york_comes_first_and_is_the_papers_own(tmp_path):
    (tmp_path / "hmda").mkdir()
    for state in ("NJ", "NY"):
        (tmp_path / "hmda" / f"2017-{state}-features.csv").touch()
    source = hmda.locate(root=str(tmp_path))
    assert source.label == "NY-2017" and source.papers_own
    assert hmda.locate("NJ", root=str(tmp_path)).label == "NJ-2017"
    assert hmda.locate(data="embedded", root=str(tmp_path)).embedded


def test_a_state_without_its_features_is_not_replaced_by_the_embedded_default(tmp_path):
    assert hmda.locate(root=str(tmp_path)).embedded
    (tmp_path / "hmda").mkdir()
    with pytest.raises(CdgrabError, match="2017-NY-features.csv is missing"):
        hmda.load(hmda.locate(root=str(tmp_path)))
    (tmp_path / "hmda" / "2017-NJ-target.csv").touch()
    with pytest.raises(CdgrabError, match="2017-NJ-features.csv is missing"):
        hmda.load(hmda.locate(root=str(tmp_path)))


def test_a_complete_state_comes_before_parts_of_new_york(tmp_path):
    (tmp_path / "hmda").mkdir()
    for name in ("NY-features", *(f"NJ-{part}" for part in hmda.PARTS)):
        (tmp_path / "hmda" / f"2017-{name}.csv").touch()
    assert hmda.locate(root=str(tmp_path)).label == "NJ-2017"


def test_missing_folder_is_refused_not_replaced_by_the_embedded_default(tmp_path):
    with pytest.raises(CdgrabError, match="does not exist"):
        hmda.locate(root=str(tmp_path / "nowhere"))


def embedded_task(seed=0, workers=4, **changes):
    settings = ["data=embedded", f"seed={seed}", f"workers={workers}"]
    run = compose([*settings, *(f"task.{k}={v}" for k, v in changes.items())])
    return make_task(run.config, run.source, torch.device("cpu"))


def test_embedded_default_is_the_boston_fed_study():
    task = embedded_task()
    assert task.source.label == "embedded"
    assert task.rows == {"all": 1989, "positive": 1745, "train": 1591, "test": 398}
    features, labels = task.fetch("train", torch.arange(task.train_units))
    assert features.isfinite().all() and set(labels.tolist()) == {0.0, 1.0}
    # standardised on the training split, and only there
    torch.testing.assert_close(features.mean(0), torch.zeros(features.shape[1], dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(features.std(0, correction=0), torch.ones(features.shape[1], dtype=torch.float64))
    # no column gives the label away
    every = torch.cat([features, labels[:, None]], dim=1).T.corrcoef()[-1, :-1].abs()
    assert float(every.max()) < 0.8


def test_split_depends_on_the_seed_alone():
    one, same, other = embedded_task(0), embedded_task(0, lr=0.1), embedded_task(1)
    everything = torch.arange(398)
    assert torch.equal(one.fetch("test", everything)[0], same.fetch("test", everything)[0])
    assert not torch.equal(one.fetch("test", everything)[1], other.fetch("test", everything)[1])


def test_partition_deals_every_unit_once():
    owned = embedded_task().partition(torch.randperm(1591))
    assert owned.shape == (4, 397) and len(owned.unique()) == 4 * 397
    contiguous = embedded_task(workers=2, partition="contiguous").partition(torch.randperm(1591))
    assert torch.equal(contiguous, torch.arange(2 * 795).view(2, 795))
    with pytest.raises(CdgrabError, match="fewer training units"):
        embedded_task(workers=2000, batch=2000).partition(torch.randperm(1591))


def test_truncation_gives_the_papers_counts():
    """195,285 training rows of New York become 4 x 48,816: every worker an even number of full steps."""
    task = embedded_task(truncate=True)
    for rows, workers, batch, units in [
        (195_285, 4, 16, 48_816),
        (107_384, 32, 32, 3_354),
        (50_000, 64, 64, 780),
        (50_000, 4, 64, 12_480),
    ]:
        task.train_units, task.workers, task.config.batch = rows, workers, batch
        assert task.partition(torch.randperm(rows)).shape == (workers, units)


@pytest.fixture
def server(tmp_path):
    """A web server on this machine with one zip archive as published: <origin>/ZZ/2017-ZZ-<part>.zip."""
    site = tmp_path / "site"
    (site / "ZZ").mkdir(parents=True)
    for part in hmda.PARTS:
        with zipfile.ZipFile(site / "ZZ" / f"2017-ZZ-{part}.zip", "w") as archive:
            archive.writestr(f"2017-ZZ-{part}.csv", f"{part}\n1\n")
    (site / "pointer.csv").write_text("version https://git-lfs.github.com/spec/v1\n")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    handler.log_message = lambda *_: None
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()


def test_download_takes_the_first_state_that_is_there(server, tmp_path):
    paths = hmda.download(tmp_path / "data", origin=server, states=("YY", "ZZ"))
    assert [path.read_text() for path in paths] == ["features\n1\n", "protected\n1\n", "target\n1\n"]
    paths[0].write_text("kept")
    assert hmda.download(tmp_path / "data", origin=server, states=("ZZ",))[0].read_text() == "kept"


@pytest.mark.parametrize(
    ("address", "options", "message"),
    [
        ("/missing.csv", {}, "cannot be downloaded"),
        ("/pointer.csv", {}, "pointer to a large file"),
        ("/ZZ/2017-ZZ-target.zip", {"member": "other.csv"}, "not a zip archive that holds"),
        ("/pointer.csv", {"member": "a.csv"}, "pointer"),
    ],
)
def test_failed_downloads_leave_nothing_behind(server, tmp_path, address, options, message):
    folder = tmp_path / "target"
    with pytest.raises(CdgrabError, match=message):
        install(folder, ["file.csv"], Path.is_file, lambda path: fetch(server + address, path, **options), "it")
    assert not folder.exists()


def zip_of(path, info="file.csv", method=zipfile.ZIP_DEFLATED, **fields):
    """A zip archive with one member; bytes: places in its local and in its central header, and what is put there."""
    entry = zipfile.ZipInfo(info)
    entry.compress_type = method
    entry.external_attr = fields.get("mode", 0) << 16
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(entry, b"text of a file, of a file, of a file\n" * 20)
    content = bytearray(path.read_bytes())
    central = content.rindex(b"PK\1\2")
    for in_local, in_central, value in fields.get("bytes", ()):
        content[in_local], content[central + in_central] = value, value
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bytes": [(6, 8, 1)]}, "encrypted"),
        ({"bytes": [(8, 10, 99)]}, "not a zip archive"),
        ({"mode": stat.S_IFLNK | 0o777}, "not an ordinary file"),
        ({"mode": stat.S_IFIFO | 0o666}, "not an ordinary file"),
        ({"mode": stat.S_IFDIR | 0o755}, "not an ordinary file"),
    ],
)
def test_unsuitable_members_of_archives_are_refused_in_one_sentence(tmp_path, fields, message):
    zip_of(tmp_path / "a.zip", **fields)
    with pytest.raises(CdgrabError, match=message) as caught:
        fetch((tmp_path / "a.zip").as_uri(), tmp_path / "file.csv", member="file.csv")
    assert "\n" not in str(caught.value)


BOMB = 3_000_000  # bytes, of which an archive needs few


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_archive_that_unpacks_to_more_than_was_published_is_refused(tmp_path, method, monkeypatch):
    """Also where nothing but the limit for all files is known. What has just as many bytes is taken."""
    (tmp_path / "ZZ").mkdir()
    archive, name = tmp_path / "ZZ" / "2017-ZZ-features.zip", "2017-ZZ-features.csv"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr(name, bytes(BOMB), method)
    monkeypatch.setattr(hmda, "MOST", BOMB - 1)
    with pytest.raises(CdgrabError, match=f"{name} in .* has more than 2,999,999 bytes: it is not what was published"):
        hmda.download(tmp_path / "data", origin=tmp_path.as_uri(), states=("ZZ",))
    assert not (tmp_path / "data").exists()
    monkeypatch.setattr(hmda, "MOST", BOMB)
    with pytest.raises(CdgrabError, match="2017-ZZ-protected.zip cannot be downloaded"):  # the next one
        hmda.download(tmp_path / "data", origin=tmp_path.as_uri(), states=("ZZ",))
    monkeypatch.setitem(hmda.PUBLISHED, name, (100, "0" * 64))
    with pytest.raises(CdgrabError, match="more than 100 bytes"):
        hmda.download(tmp_path / "data", origin=tmp_path.as_uri(), states=("ZZ",))


def test_damaged_archives_are_refused_in_one_sentence_and_the_next_origin_is_tried(tmp_path):
    """Every third byte of a small archive once: what it gives then is the right file or a sentence."""
    (tmp_path / "YY").mkdir()
    archive, right = tmp_path / "YY" / "2017-YY-target.zip", b"text of a file, of a file, of a file\n" * 20
    zip_of(archive, "2017-YY-target.csv")
    whole, sentences = archive.read_bytes(), 0
    for place in range(0, len(whole), 3):
        archive.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            fetch(archive.as_uri(), tmp_path / "file.csv", member="2017-YY-target.csv")
            assert (tmp_path / "file.csv").read_bytes() == right
        except CdgrabError as error:
            assert "\n" not in str(error)
            sentences += 1
    assert sentences > 20
    with pytest.raises(CdgrabError, match="YY.*; .*ZZ"):
        hmda.download(tmp_path / "data", origin=tmp_path.as_uri(), states=("YY", "ZZ"))


def test_download_checks_what_it_got(server, tmp_path, monkeypatch):
    plain = tmp_path / "plain.csv"
    fetch(f"{server}/ZZ/2017-ZZ-target.zip", plain, member="2017-ZZ-target.csv")
    monkeypatch.setitem(hmda.PUBLISHED, "2017-ZZ-target.csv", (plain.stat().st_size, "0" * 64))
    with pytest.raises(CdgrabError, match="ZZ does not give the published file 2017-ZZ-target.csv"):
        hmda.download(tmp_path / "data", origin=server, states=("ZZ",))
    assert not (tmp_path / "data").exists()
    monkeypatch.setitem(hmda.PUBLISHED, "2017-ZZ-target.csv", (plain.stat().st_size, sha256(plain)))
    assert hmda.download(tmp_path / "data", origin=server, states=("ZZ",))[2].read_text() == "target\n1\n"


@needs("2017-NJ-features.csv", "2017-NJ-protected.csv", "2017-NJ-target.csv")
def test_real_new_jersey_has_the_published_counts():
    (features, labels), _ = hmda.load(hmda.locate("NJ"))
    assert features.shape == (192_652, 18) and int(labels.sum()) == 144_623


@needs("2017-NY-protected.csv", "2017-NY-target.csv")
def test_real_new_york_labels_are_the_papers():
    folder = Path(os.environ["CDGRAB_DATA"]) / "hmda"
    keep, labels = hmda.label_rule(*(pd.read_csv(folder / f"2017-NY-{part}.csv") for part in hmda.PARTS[1:]))
    assert (int(keep.sum()), int(labels.sum())) == (244_107, 187_929)
