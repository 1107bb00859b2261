"""Checkpoints and metrics on a disk that fails, and files that are not what they seem."""

import contextlib
import errno
import json
import os
import pickle
import resource
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cdgrab.errors import CdgrabError, file_error
from experiments.store import checkpoint
from experiments.store.files import append_line, write_atomically
from experiments.store.lock import locked
from experiments.store.records import read_metrics
from experiments.training import session


def content(number):
    return {"number": number, "parameters": torch.arange(50.0) + number, "science": {"epochs": 3, "task.limit": None}}


def test_the_newest_are_kept_and_the_newest_is_loaded(tmp_path):
    for number in range(5):
        checkpoint.save(tmp_path, content(number), keep=3)
        assert checkpoint.load(tmp_path)["number"] == number
    names = ["checkpoint.1.pt", "checkpoint.2.pt", "checkpoint.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    checkpoint.save(tmp_path, content(5), keep=1)  # another stop_request: what is too much goes
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    torch.testing.assert_close(checkpoint.load(tmp_path)["parameters"], torch.arange(50.0) + 5)


def test_a_damaged_one_falls_back_to_the_one_before_with_a_warning(tmp_path, capsys):
    for number in range(3):
        checkpoint.save(tmp_path, content(number), keep=3)
    (tmp_path / "checkpoint.pt").write_bytes((tmp_path / "checkpoint.pt").read_bytes()[:-1])
    assert checkpoint.load(tmp_path)["number"] == 1
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "checksum is wrong" in printed and "checkpoint.1.pt" in printed
    assert (tmp_path / "checkpoint.pt").exists()  # who only reads changes nothing
    (tmp_path / "checkpoint.1.pt").write_bytes(b"")
    assert checkpoint.load(tmp_path, say=lambda _: None)["number"] == 0
    (tmp_path / "checkpoint.2.pt").write_text("something else")
    with pytest.raises(CdgrabError, match="checkpoint.* cannot be read, and there is none before it"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("stop_at", range(4))
@pytest.mark.parametrize("damaged", [False, True])
def test_a_kill_between_any_two_renamings_loses_nothing(tmp_path, monkeypatch, stop_at, damaged):
    for number in range(3):
        checkpoint.save(tmp_path, content(number), keep=3)
    if damaged:
        (tmp_path / "checkpoint.pt").write_bytes(b"damaged")
        assert checkpoint.load(tmp_path, mend=True)["number"] == 1
        assert (tmp_path / checkpoint.DAMAGED).read_bytes() == b"damaged"
    calls, replace = count(), os.replace

    def killed(*paths):
        if next(calls) == stop_at:
            raise KeyboardInterrupt
        replace(*paths)

    monkeypatch.setattr(checkpoint.os, "replace", killed)
    with contextlib.suppress(KeyboardInterrupt):
        checkpoint.save(tmp_path, content(3), keep=3)
    assert checkpoint.load(tmp_path)["number"] == (3 if stop_at else 1 if damaged else 2)
    monkeypatch.undo()
    checkpoint.save(tmp_path, content(4), keep=3)
    assert checkpoint.load(tmp_path)["number"] == 4


@pytest.mark.parametrize("linked", [True, False], ids=["hard links", "none"])
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_another_number_to_keep_after_a_kill(tmp_path, monkeypatch, keep, linked):
    """Killed at every renaming in turn, on file systems with and without hard links: there is always one to load."""

    def no_links(*paths):
        raise OSError

    if not linked:
        monkeypatch.setattr(checkpoint.os, "link", no_links)
    replace, newest = os.replace, -1
    for number in range(12):
        calls = count()

        def killed(*paths, calls=calls, stop_at=number % 4):
            if next(calls) == stop_at:
                raise KeyboardInterrupt
            replace(*paths)

        monkeypatch.setattr(checkpoint.os, "replace", killed)
        with contextlib.suppress(KeyboardInterrupt):
            checkpoint.save(tmp_path, content(number), keep=2)
        monkeypatch.setattr(checkpoint.os, "replace", replace)
        found = checkpoint.load(tmp_path)
        assert found is None or found["number"] >= newest
        assert found is not None or number == 0
        newest = found["number"] if found else newest
    checkpoint.save(tmp_path, content(99), keep=keep)
    checkpoint.save(tmp_path, content(100), keep=keep)
    assert checkpoint.load(tmp_path)["number"] == 100
    assert len([path for path in tmp_path.iterdir() if not path.name.endswith(".tmp")]) == keep


@given(st.data())
def test_no_flipped_bit_goes_unnoticed(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("flipped")
    checkpoint.save(folder, content(0))
    damaged = bytearray((folder / "checkpoint.pt").read_bytes())
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (folder / "checkpoint.pt").write_bytes(damaged)
    with pytest.raises(CdgrabError, match="cannot be read"):
        checkpoint.load(folder)


class Malice:
    def __reduce__(self):
        return (os.mkdir, ("executed",))


@pytest.mark.parametrize("signed", [False, True])
def test_nothing_in_a_checkpoint_is_executed(tmp_path, monkeypatch, signed):
    """Not even with the right checksum."""
    monkeypatch.chdir(tmp_path)
    if signed:
        monkeypatch.setattr(checkpoint.torch, "save", lambda content, file: file.write(pickle.dumps(Malice())))
        checkpoint.save(tmp_path, {})
    else:
        (tmp_path / "checkpoint.pt").write_bytes(pickle.dumps(Malice()))
    with pytest.raises(CdgrabError, match="cannot be read"):
        checkpoint.load(tmp_path)
    assert not (tmp_path / "executed").exists()


@pytest.fixture
def full_disk():
    """No file may grow beyond this size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_what_was_there(tmp_path, full_disk):
    checkpoint.save(tmp_path, content(0), keep=2)
    append_line(tmp_path / "metrics.jsonl", {"epoch": 1})
    write_atomically(tmp_path / "manifest.json", '{"status": "running"}\n')
    full_disk(20)
    for write in (
        lambda: checkpoint.save(tmp_path, content(1), keep=2),
        lambda: append_line(tmp_path / "metrics.jsonl", {"epoch": 2, "train_loss": 0.25}),
        lambda: write_atomically(tmp_path / "manifest.json", '{"status": "finished, and everything is well"}\n'),
    ):
        with pytest.raises(OSError):
            write()
    assert checkpoint.load(tmp_path)["number"] == 0
    assert (tmp_path / "metrics.jsonl").read_text() == '{"epoch": 1}\n'
    assert json.loads((tmp_path / "manifest.json").read_text()) == {"status": "running"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.pt", "manifest.json", "metrics.jsonl"]


@given(st.binary(max_size=60), st.integers(0, 3))
def test_metrics_are_read_up_to_the_first_line_that_is_none(tmp_path_factory, garbage, lines):
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    good = [{"epoch": epoch + 1} for epoch in range(lines)]
    path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in good) + garbage)
    assert read_metrics(path)[:lines] == good


def test_links_that_were_put_there_are_not_followed(tmp_path):
    (precious := tmp_path / "precious").write_text("mine")
    (folder := tmp_path / "run").mkdir()
    (folder / "logs").mkdir()
    for name in (".lock", ".manifest.json.tmp", "metrics.jsonl", "logs/rank0.log"):
        (folder / name).symlink_to(precious)
    with pytest.raises(OSError, match=r"rank0\.log"), session._log_file(SimpleNamespace(directory=folder), 0):
        pass
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        append_line(folder / "metrics.jsonl", {})
    with pytest.raises(OSError, match=r"\.lock"), locked(folder):
        pass
    write_atomically(folder / "manifest.json", "{}")
    assert (folder / "manifest.json").read_text() == "{}" and not (folder / "manifest.json").is_symlink()
    assert precious.read_text() == "mine"


def test_a_disk_that_is_full_at_the_start_names_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError) as caught, locked(tmp_path):
        pass
    assert file_error(caught.value) == f"{tmp_path / '.lock'} cannot be read or written (No space left on device)"


def test_a_folder_has_one_owner_who_is_named(tmp_path):
    with locked(tmp_path):
        with pytest.raises(CdgrabError, match=f"is being written by process {os.getpid()} on "), locked(tmp_path):
            pass
        assert (tmp_path / ".lock").exists()
    with locked(tmp_path):
        pass
    assert not list(tmp_path.iterdir())
