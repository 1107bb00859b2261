"""Runs that are stopped, killed or disturbed from outside: real processes, signals, files and disks."""

import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from forked import elsewhere, started_run, stop_after, wait_until_stopped
from interrupted import SMALL, Log, fit

from cdgrab.errors import Stopped
from cdgrab.runtime.group import WorkerGroup
from experiments import train
from experiments.store import checkpoint
from experiments.store.files import ROOT
from experiments.store.records import read_manifest, read_metrics
from experiments.tasks import make_task
from experiments.training import runlog, session, signals
from experiments.training.config import compose
from experiments.training.grouping import make_member
from experiments.training.loop import Trainer, alone
from experiments.training.runlog import RunLog

RUN = [*SMALL, "task=lr_hmda", "task.limit=400", "epochs=8", "checkpoint.every_steps=5"]
SHORT = [*RUN, "epochs=4"]  # the rate is constant: these are the first ones of the others


def start(folder, *more, processes=1):
    command = [sys.executable, "-m"]
    if processes > 1:  # in tests/system
        launcher = ["--standalone", "--max-restarts=3", "--monitor-interval=0.1", f"--nproc-per-node={processes}", "-m"]
        command += ["torch.distributed.run", *launcher]
    command += ["experiments.train", *RUN, f"run_dir={folder}", *more]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # the tests themselves may have been started in the background of a shell, where Ctrl-C is ignored
    listen = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, preexec_fn=listen, **pipes)


def wait_for(folder, epochs, alive):
    while len(read_metrics(folder / "metrics.jsonl")) < epochs:
        assert alive()
        time.sleep(0.005)


def lines(folder):
    return [
        {key: value for key, value in line.items() if key not in ("seconds", "phases")}
        for line in read_metrics(folder / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train.main([*RUN, f"run_dir={folder}"]) == 0
    return lines(folder)


@pytest.mark.parametrize("number, status, word", [(signal.SIGTERM, 75, "stopped"), (signal.SIGINT, 130, "interrupted")])
def test_a_signal_saves_everything_and_says_how_to_go_on(undisturbed, tmp_path, number, status, word, capsys):
    folder = tmp_path / "run"
    with started_run([*RUN, f"run_dir={folder}"], tmp_path / "printed", partial(stop_after, 2)) as process:
        wait_until_stopped(process)
        assert train.main([*RUN, f"run_dir={folder}", "resume=true"]) == 2
        assert f"is being written by process {process.pid} on" in capsys.readouterr().err
        os.kill(process.pid, number)
        os.kill(process.pid, signal.SIGCONT)
        process.join(timeout=60)
    printed = (tmp_path / "printed").read_text()
    assert process.exitcode == status and f"{word} after" in printed and "resume=true goes on" in printed
    assert "Traceback" not in printed and read_manifest(folder)["status"] == word
    if number == signal.SIGTERM:
        assert train.main([*RUN, f"run_dir={folder}", "resume=true"]) == 0
        assert lines(folder) == undisturbed


def halted(folder):
    """The same run, stopped in its third epoch; returns the contents of its files."""

    run = compose([*SHORT, f"run_dir={folder}"])
    folder.mkdir()
    made = alone(run, make_task(run.config, run.source, torch.device("cpu")), WorkerGroup(4), torch.device("cpu"))
    run_log = RunLog(run, active=True)
    run_log.begin(run, made.task.rows, made.members[0].sizes, 1, torch.device("cpu"))
    with pytest.raises(Stopped):
        fit(made, run_log, lambda: signal.SIGTERM * (made.epochs_done == 2 and made.position > 0))
    run_log.finish("stopped")
    return {path: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("number, status, word", [(signal.SIGTERM, 75, "stopped"), (signal.SIGINT, 130, "interrupted")])
def test_a_signal_while_the_run_starts_is_answered_too(tmp_path, number, status, word):
    process = start(tmp_path / "run")
    while not listens(process.pid, number):
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(number)
    _, printed = process.communicate(timeout=60)
    assert (
        process.returncode == status
        and printed == f"{word} before training started: nothing is lost; run the same command again\n"
    )


def listens(pid, number):
    """Whether a process of Python's has a handler of its own; for SIGINT it always has, so SIGTERM tells of both."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1


def test_metrics_that_were_changed_are_refused_and_stay(tmp_path, capsys):
    before, folder = halted(tmp_path / "run"), tmp_path / "run"
    path = folder / "metrics.jsonl"

    def refused(words):
        assert train.main([*SHORT, f"run_dir={folder}", "resume=true"]) == 2
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1 and words in printed

    for changed in (before[path].replace(b"0.", b"1.", 1), before[path][:-3], b"", before[path].replace(b"{", b"[", 1)):
        path.write_bytes(changed)
        refused("is not what it was at the checkpoint")
        assert path.read_bytes() == changed
    assert {path: path.read_bytes() for path in before} == before | {path: changed}
    for changed in (
        before[path] * 2,
        before[path] + b"{",
        before[path].replace(b"phases", b"places"),
    ):  # with a checkpoint made to fit
        path.write_bytes(changed)
        checkpoint.save(folder, checkpoint.load(folder) | {"metrics": runlog.measured(folder)})
        refused("is not what it was at the checkpoint")
    for changed in ({"resumed": 3}, {"config": []}, {"science": "none"}):
        (folder / "manifest.json").write_text(json.dumps(json.loads(before[folder / "manifest.json"]) | changed))
        refused("the manifest of something else")


COUNTERFEITS = [
    *((name, torch.ones(2, 3)) for name in ("replay", "seconds", "metrics")),  # a tensor takes a name for an index
    *(("epochs_done", value) for value in (None, "text", 10**9, 10**400, -1, [], float("nan"))),
    *(("position", value) for value in (None, -1, 0.5, {}, 10**9)),
    *(("metrics", value) for value in (None, "text", {}, {"bytes": -1, "sha256": ""}, {"bytes": "1", "sha256": ""})),
    *(("optimiser", value) for value in ([], [torch.zeros(1)], [torch.zeros(0)] * 3)),
    *(("parameters", value) for value in (torch.zeros(3), None)),
    *(("data", value) for value in (None, {"another file": "0"}, {"two\nlines": "0"})),
    *(("carry", [torch.zeros(1)]), ("sorter", {}), ("science", None)),
]


def test_checkpoints_of_another_content_are_refused_and_nothing_is_overwritten(tmp_path, capsys):
    """Their checksums are right."""
    folder = tmp_path / "run"
    halted(folder)
    good, run = checkpoint.load(folder), compose([*SHORT, f"run_dir={folder}", "resume=true"])
    for key, value in COUNTERFEITS:
        checkpoint.save(folder, good | {key: value}, keep=1)
        before = {path: path.read_bytes() for path in folder.iterdir()}
        assert session.exit_status(partial(session.carry_out, run)) == 2, (key, value)
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1 and printed.startswith("error: "), printed
        assert {path: path.read_bytes() for path in folder.iterdir()} == before, (key, value)


def test_a_run_does_not_go_on_with_other_data(tmp_path, capsys):
    books = tmp_path / "data" / "novels"
    books.mkdir(parents=True)
    for name in ("one", "two"):
        (books / f"{name}.txt").write_text("".join(f"A line of words , number {n} .\n" for n in range(600)))
    settings = ["task=gpt2_wiki103", "size=smoke", "task.limit=16", "task.vocabulary=300", "workers=4", "compile=off"]
    settings += [f"data_root={tmp_path / 'data'}", f"run_dir={tmp_path / 'run'}", "epochs=2", "resume=true"]
    run = compose(settings)
    (tmp_path / "run").mkdir()
    made = Trainer([make_member(run, WorkerGroup(4), torch.device("cpu"))])
    with pytest.raises(Stopped):
        fit(made, Log(), lambda: signal.SIGTERM)
    with open(books / "two.txt", "a") as file:
        file.write("One line more .\n")
    assert train.main(settings) == 2
    printed = capsys.readouterr().err
    assert "the data changed since the checkpoint" in printed and "(novels); choose another run_dir" in printed


def test_a_damaged_checkpoint_is_said_once_and_in_the_log(undisturbed, tmp_path, capsys):
    folder = tmp_path / "run"
    halted(folder)
    (folder / "checkpoint.pt").write_bytes(b"damaged")
    assert train.main([*SHORT, f"run_dir={folder}", "resume=true"]) == 0
    assert capsys.readouterr().err.count("going on from the one before") == 1
    assert (folder / "logs" / "rank0.log").read_text().count("going on from the one before") == 1
    assert lines(folder) == undisturbed[:4] and (folder / "checkpoint.damaged").read_bytes() == b"damaged"


def test_a_run_stopped_in_its_first_epoch_knows_when_it_began(undisturbed, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    asked = count()
    monkeypatch.setattr(signals.StopRequest, "__call__", lambda stop_request: signal.SIGTERM * (next(asked) == 1))
    assert train.main([*SHORT, f"run_dir={folder}"]) == 75
    assert read_metrics(folder / "metrics.jsonl") == []
    monkeypatch.undo()
    # a clock that is put back, or jumps ahead, while the run is under way: times of day are only written down
    monkeypatch.setattr("experiments.training.runlog.now", lambda: "1999-12-31T23:59:59+00:00")
    monkeypatch.setattr("time.time", lambda: 1e9 * (-1) ** next(asked))
    began = read_manifest(folder)["started"]
    assert train.main([*SHORT, f"run_dir={folder}", "resume=true"]) == 0
    manifest = read_manifest(folder)
    assert manifest["started"] == began and len(manifest["resumed"]) == 1 and manifest["status"] == "finished"
    assert lines(folder) == undisturbed[:4]
    assert all(0 < line["seconds"] < 600 for line in read_metrics(folder / "metrics.jsonl"))


def go_on_without_privileges(runs, printed):
    """Root may write anywhere; not without its capabilities."""
    none = (ctypes.c_uint32 * 6)()
    assert not ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), none)  # the current version, this process
    with open(printed, "w") as sys.stderr:
        assert [train.main(run) for run in runs] == [2, 2]


def test_results_that_cannot_be_written_are_named_and_stay(tmp_path):
    folder = tmp_path / "run"
    halted(folder)
    shutil.copytree(folder, tmp_path / "closed", copy_function=shutil.copy)
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "closed", tmp_path / "empty"):
        path.chmod(0o555)
    directories = [str(tmp_path / "closed"), str(tmp_path / "empty" / "new")]
    runs = [[*SHORT, f"run_dir={directory}", "resume=true"] for directory in directories]
    assert elsewhere(go_on_without_privileges, runs, tmp_path / "printed") == 0
    printed = (tmp_path / "printed").read_text().splitlines()
    for directory, sentence in zip(directories, printed, strict=True):
        assert directory in sentence and "cannot be read or written (Permission denied)" in sentence
    assert {path.name: path.read_bytes() for path in (tmp_path / "closed").iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_when_there_is_room(undisturbed, tmp_path):
    folder = tmp_path / "run"
    full = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**13, 2**13))  # noqa: E731 - less than a checkpoint
    with started_run([*SHORT, f"run_dir={folder}"], tmp_path / "printed", before=full) as process:
        process.join(60)
    printed = (tmp_path / "printed").read_text()
    assert process.exitcode == 2 and printed.count("\n") == 1, printed
    assert "checkpoint.pt" in printed and "cannot be read or written (File too large)" in printed
    assert not list(folder.glob("*.tmp")) and not list(folder.glob(".*"))
    assert train.main([*SHORT, f"run_dir={folder}", "resume=true"]) == 0
    assert lines(folder) == undisturbed[:4]
