"""One run from the command line: what it leaves behind, interruption and resuming, divergence, nothing overwritten."""

import json
import math
import time
from functools import partial

import pytest
import torch
from forked import started_run, stop_after, wait_until_stopped

from cdgrab.balance import reference
from cdgrab.runtime.group import WorkerGroup
from cdgrab.sorters import SORTERS
from experiments import train
from experiments.store import checkpoint
from experiments.store.records import read_manifest, read_metrics
from experiments.tasks import make_task
from experiments.training.clock import PHASES
from experiments.training.config import compose
from experiments.training.loop import Trainer, alone


def run(folder, *settings, expect=0):
    assert train.main(["data=embedded", f"run_dir={folder}", *settings]) == expect
    return read_metrics(folder / "metrics.jsonl")


def without_time(lines):
    return [{key: value for key, value in line.items() if key not in ("seconds", "phases")} for line in lines]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(folder, "epochs=12")
    return folder


def test_metrics_and_manifest(finished):
    lines, manifest = read_metrics(finished / "metrics.jsonl"), read_manifest(finished)
    assert [line["epoch"] for line in lines] == list(range(1, 13))
    assert lines[-1]["train_loss"] < lines[0]["train_loss"] < math.log(2)
    assert all(len(line["order_hash"]) == 64 and line["seconds"] > 0 for line in lines)
    assert manifest["status"] == "finished" and manifest["seed"] == 0
    assert manifest["data"]["label"] == "embedded" and manifest["data"]["rows"]["train"] == 1591
    assert manifest["sizes"] == {"workers": 4, "units": 397, "microbatch": 4, "steps_per_epoch": 100, "parameters": 56}
    assert manifest["versions"]["torch"] == torch.__version__
    assert set(manifest["timing"]["phases"]) == set(lines[0]["phases"]) == set(PHASES)
    mean = sum(line["seconds"] for line in lines) / 12
    assert manifest["timing"]["seconds_per_epoch"] == pytest.approx(mean, abs=1e-4)
    training = sum(seconds for phase, seconds in lines[3]["phases"].items() if phase != "evaluation")
    assert lines[3]["seconds"] == pytest.approx(training, abs=1e-5)


def test_metrics_equal_an_independent_training_loop(tmp_path):
    """The whole pipeline against plain PyTorch and the reference sorter: float64, odd units, short last step."""
    lines = run(tmp_path / "run", "epochs=3", "workers=2", "task.batch=6", "task.limit=310")
    config = compose(["data=embedded", "workers=2", "task.batch=6", "task.limit=310"])
    task = make_task(config.config, config.source, torch.device("cpu"))
    owned = alone(config, task, WorkerGroup(2), torch.device("cpu")).owned
    model, units = task.model, owned.shape[1]
    assert units % 2 and units % 3  # a unit without a partner, and a short last step
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    sorter_order = alone(config, task, WorkerGroup(2), torch.device("cpu")).members[0].sorter.order(0).tolist()
    for line in lines:
        seen = [[], []]
        for start in range(0, units, 3):
            total = [torch.zeros_like(p) for p in model.parameters()]
            count = min(3, units - start)
            for w in range(2):
                for position in range(start, start + count):
                    x, y = task.fetch("train", owned[w][sorter_order[w][position]])
                    gradient = torch.autograd.grad(bce(model(x)[0], y), list(model.parameters()))
                    seen[w].append(torch.cat([g.flatten() for g in gradient]).numpy())
                    total = [t + g / (2 * count) for t, g in zip(total, gradient, strict=True)]
            for p, g in zip(model.parameters(), total, strict=True):
                p.grad = g
            optimiser.step()
        x, y = task.fetch("train", owned.flatten())
        assert line["train_loss"] == pytest.approx(bce(model(x)[:, 0], y).item(), abs=1e-12)
        x, y = task.fetch("test", torch.arange(task.test_units))
        assert line["test_accuracy"] == pytest.approx(100 * float(((model(x)[:, 0] > 0) == (y > 0.5)).double().mean()))
        sorter_order = reference.cd_grab(sorter_order, seen)


@pytest.mark.parametrize("more", [["compile=off"], ["task.gradients=backward"]])
def test_how_gradients_are_computed_changes_no_order(finished, tmp_path, more):
    slow, fast = run(tmp_path / "run", "epochs=2", *more), read_metrics(finished / "metrics.jsonl")
    assert [line["order_hash"] for line in slow] == [line["order_hash"] for line in fast[:2]]
    assert slow[1]["train_loss"] == pytest.approx(fast[1]["train_loss"], abs=1e-12)


def test_a_finished_run_is_not_repeated(finished, capsys):
    before = (finished / "metrics.jsonl").read_bytes(), (finished / "manifest.json").read_bytes()
    run(finished, "epochs=12")
    first, last = capsys.readouterr().out.splitlines()
    loss = read_metrics(finished / "metrics.jsonl")[-1]["train_loss"]
    assert "already complete" in first and last.startswith(f"{finished}: train_loss {loss:.5g}, test_loss ")
    assert before == ((finished / "metrics.jsonl").read_bytes(), (finished / "manifest.json").read_bytes())


def test_another_run_in_the_same_folder_is_refused(finished, capsys):
    before = (finished / "metrics.jsonl").read_bytes()
    run(finished, "epochs=12", "task.lr=0.1", expect=2)
    assert "task.lr 0.05 there, 0.1 here" in capsys.readouterr().err
    run(finished, "epochs=12", "task.limit=100", expect=2)  # null is a setting like any other
    assert "task.limit None there, 100 here" in capsys.readouterr().err
    assert before == (finished / "metrics.jsonl").read_bytes()


def test_killed_and_resumed_gives_the_same_metrics(tmp_path):
    settings = ["epochs=6", "task.limit=400", "data=embedded"]
    folder = tmp_path / "killed"
    with started_run([*settings, f"run_dir={folder}"], tmp_path / "printed", partial(stop_after, 3)) as process:
        wait_until_stopped(process)
    assert len(read_metrics(folder / "metrics.jsonl")) == 3, "the run was to be killed in the middle"
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 99, "tr')  # as if killed while writing
    run(folder, *settings, expect=2)  # an unfinished run is not overwritten by accident
    resumed = run(folder, *settings, "resume=true")
    assert without_time(resumed) == without_time(run(tmp_path / "whole", *settings))
    assert read_manifest(folder)["resumed"]


@pytest.mark.parametrize("sorter", SORTERS)
def test_every_sorter_resumes_exactly(tmp_path, monkeypatch, sorter):
    settings = [f"sorter={sorter}", "epochs=4", "task.batch=64", "task.limit=400", "compile=off"]
    whole = run(tmp_path / "whole", *settings)
    save = Trainer.save

    def interrupted_after_two(self):
        save(self)
        if self.epochs_done == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "save", interrupted_after_two)
        assert len(run(tmp_path / "parts", *settings, expect=130)) == 2
    assert without_time(run(tmp_path / "parts", *settings, "resume=true")) == without_time(whole)


def test_divergence_stops_and_keeps_what_was_good(tmp_path, capsys):
    """The rate grows by 1e25 every second epoch until float32 overflows: epoch and step are named, the rest stays."""
    folder = tmp_path / "run"
    schedule = ["task.schedule.kind=step", "+task.schedule.every=2", "+task.schedule.factor=1e25"]
    run(folder, "task.dtype=float32", "epochs=9", *schedule, expect=3)
    printed = capsys.readouterr().err
    lines = read_metrics(folder / "metrics.jsonl")
    assert (
        printed.count("\n") == 1
        and f"diverged in epoch {len(lines) + 1} at step" in printed
        and "task.lr=0.05" in printed
    )
    assert 2 <= len(lines) < 9 and all(math.isfinite(line["train_loss"]) for line in lines)
    saved = checkpoint.load(folder)
    assert saved["epochs_done"] == len(lines) and saved["parameters"].isfinite().all()
    assert read_manifest(folder)["status"] == "diverged"


def test_divergence_in_the_first_epoch(tmp_path, capsys):
    run(tmp_path / "run", "task.dtype=float32", "task.lr=3e38", expect=3)
    assert "diverged in epoch 1 at step" in capsys.readouterr().err
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == []


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint", b"\x80\x04cos\nsystem\n(S'true'\ntR."])
def test_a_damaged_checkpoint_is_named(tmp_path, capsys, damage):
    folder = tmp_path / "run"
    run(folder, "epochs=1")
    manifest = read_manifest(folder)
    (folder / "manifest.json").write_text(json.dumps(manifest | {"status": "running"}))
    (folder / "checkpoint.pt").write_bytes(damage)
    (folder / "metrics.jsonl").write_text("")
    run(folder, "epochs=1", "resume=true", expect=2)
    printed = capsys.readouterr().err
    assert "checkpoint.pt" in printed and "cannot be read" in printed and printed.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert train.main(["data=embedded", "epochs=1", f"run_dir={tmp_path / 'file' / 'run'}"]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and str(tmp_path / "file") in printed and "cannot be read or written" in printed


def test_names_do_not_reach_the_terminal_as_they_are(capsys):
    """A line end, a colour, a text that runs from right to left."""
    for name, shown in (("a\nb", r"a\nb"), ("\x1b[31m", r"\x1b[31m"), ("\u202e", r"\u202e"), ("größer –", "größer –")):
        assert train.main([f"data_root='/nowhere/{name}'"]) == 2
        assert f"the data folder /nowhere/{shown} does not exist" in (said := capsys.readouterr().err)
        assert said.count("\n") == 1 and said.rstrip("\n").isprintable()


def test_logs_are_not_written_through_a_link(tmp_path, capsys):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "run"
    elsewhere.mkdir(), folder.mkdir()
    (folder / "logs").symlink_to(elsewhere)
    assert train.main(["data=embedded", "size=smoke", f"run_dir={folder}"]) == 2
    assert "logs is a link" in capsys.readouterr().err and not list(elsewhere.iterdir())


def test_metrics_that_belong_to_nobody_are_not_overwritten(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1}\n')
    run(tmp_path, "epochs=1", expect=2)
    assert "metrics without a manifest" in capsys.readouterr().err


def test_a_lost_checkpoint_is_said(tmp_path, capsys):
    run(tmp_path / "run", "epochs=3")
    manifest = read_manifest(tmp_path / "run") | {"status": "running"}
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest))
    for path in (tmp_path / "run").glob("checkpoint*"):
        path.unlink()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    run(tmp_path / "run", "epochs=3", "checkpoint.every_epochs=9", "resume=true", expect=2)
    assert "no checkpoint to go on from" in capsys.readouterr().err
    assert before == (tmp_path / "run" / "metrics.jsonl").read_bytes()
    manifest["config"]["checkpoint"]["every_epochs"] = 9  # then there has never been one
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest))
    assert len(run(tmp_path / "run", "epochs=3", "resume=true")) == 3


def test_sorters_that_ignore_gradients_never_pay_for_them(tmp_path, monkeypatch):
    """D-RR's step function returns no unit gradients, and its sorter is told nothing."""
    config = compose(["data=embedded", "sorter=d_rr"])
    task = make_task(config.config, config.source, torch.device("cpu"))
    trainer = alone(config, task, WorkerGroup(4), torch.device("cpu"))
    batch = task.fetch("train", trainer.owned[:, :4])
    parameters = trainer.loop.parameters
    assert trainer.gradients(parameters, *batch)[0].numel() == 0
    monkeypatch.setattr("cdgrab.sorters.base.Sorter.observe", lambda *_: pytest.fail("observe was called"))
    run(tmp_path / "run", "epochs=1", "sorter=d_rr")


def test_waiting_for_a_block_is_time_of_training(tmp_path, monkeypatch):
    """On a GPU a block is computed while its losses are looked at."""
    look = Trainer._refuse_divergence
    monkeypatch.setattr(Trainer, "_refuse_divergence", lambda *given, **more: time.sleep(0.2) or look(*given, **more))
    run(tmp_path / "run", "epochs=1", "sorter=d_rr")
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[0]["phases"]["gradients"] > 0.2


def test_a_batch_larger_than_the_data_is_one_short_step(tmp_path):
    run(tmp_path / "run", "epochs=2", "task.batch=8000")
    assert read_manifest(tmp_path / "run")["sizes"]["steps_per_epoch"] == 1
