"""Trackers: what was written there is read back and compared with metrics.jsonl."""

import json
import os
import struct

import pytest

from experiments import launch, train
from experiments.store.records import read_manifest, read_metrics
from experiments.training.config import compose, flatten
from experiments.training.loop import Trainer
from experiments.training.trackers import Tracking, missing_package

LITTLE = ["data=embedded", "task.limit=100", "compile=off", "epochs=4"]


def numbers(folder):
    """{metric: {epoch: value}} of metrics.jsonl."""
    lines = [flatten(line) for line in read_metrics(folder / "metrics.jsonl")]
    names = [key for key, value in lines[0].items() if isinstance(value, int | float) and key != "epoch"]
    return {name.replace(".", "/"): {line["epoch"]: line[name] for line in lines} for name in names}


def in_tensorboard(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    events = {tag: read.Scalars(tag) for tag in read.Tags()["scalars"]}
    assert all(len({event.step for event in some}) == len(some) for some in events.values())
    return {tag: {event.step: event.value for event in some} for tag, some in events.items()}


def in_wandb(folder):
    """From the files of offline mode, whose records are kept as LevelDB keeps its log."""
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found, names = {}, set()
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        content, position = path.read_bytes(), 7
        while position + 7 <= len(content) < 2**15:  # of one block
            length = struct.unpack_from("<H", content, position + 4)[0]
            record = proto.Record.FromString(content[position + 7 : position + 7 + length])
            names |= {record.run.run_id} - {""}
            values = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            for name in values.keys() - {"_step", "_runtime", "_timestamp"}:
                found.setdefault(name, {})[record.history.step.num] = json.loads(values[name])
            position += 7 + length
    assert names == {read_manifest(folder)["trackers"]["wandb"]}
    return found


def in_mlflow(folder):
    client = pytest.importorskip("mlflow").MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    run = client.get_run(read_manifest(folder)["trackers"]["mlflow"])
    assert run.info.status == "FINISHED" and run.data.params["task.name"] == "lr_hmda"
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    assert all(len(history) == 4 for history in histories.values())
    return {name: {metric.step: metric.value for metric in history} for name, history in histories.items()}


READERS = {"tensorboard": in_tensorboard, "wandb": in_wandb, "mlflow": in_mlflow}


@pytest.fixture
def nowhere_else(tmp_path, monkeypatch):
    """Trackers write below this folder."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    return tmp_path


def stopped_after_writing(epoch, monkeypatch, folder, *settings):
    """A run that is ended between an epoch's metrics and its checkpoint, so that it has to make the epoch again."""
    save = Trainer.save

    def stop(self):
        if self.epochs_done == epoch:
            raise KeyboardInterrupt
        save(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "save", stop)
        assert train.main([*LITTLE, f"run_dir={folder}", *settings]) == 130


@pytest.mark.parametrize("tracker", READERS)
def test_a_run_resumes_into_the_same_tracker_run(tracker, nowhere_else, monkeypatch):
    if missing := missing_package(tracker):
        pytest.skip(missing)
    folder = nowhere_else / "run"
    stopped_after_writing(3, monkeypatch, folder, f"tracker={tracker}")
    name = read_manifest(folder)["trackers"]
    assert train.main([*LITTLE, f"run_dir={folder}", f"tracker={tracker}", "resume=true"]) == 0
    assert read_manifest(folder)["trackers"] == name
    found, expected = READERS[tracker](folder), numbers(folder)
    assert found.keys() == expected.keys() and {"train_loss", "test_accuracy", "phases/gradients"} <= found.keys()
    for metric, values in expected.items():
        if not metric.startswith(("seconds", "phases")):  # the epoch that was made twice had another time
            assert found[metric] == pytest.approx(values, rel=1e-6), metric


def test_a_tracker_can_be_added_left_out_and_changes_nothing(nowhere_else, monkeypatch):
    """One that comes later is told of the epochs before; results and folders are those without one."""
    folders = [compose([*LITTLE, f"tracker={tracker}"]) for tracker in ("none", "tensorboard")]
    assert folders[0].directory == folders[1].directory and folders[0].science == folders[1].science
    folder = nowhere_else / "run"
    stopped_after_writing(2, monkeypatch, folder)
    assert "trackers" not in read_manifest(folder)
    stopped_after_writing(3, monkeypatch, folder, "tracker=tensorboard", "resume=true")
    assert train.main([*LITTLE, f"run_dir={folder}", "resume=true"]) == 0
    assert read_manifest(folder)["trackers"] == {"tensorboard": "tensorboard"}
    losses = numbers(folder)["train_loss"]
    assert in_tensorboard(folder)["train_loss"] == pytest.approx({epoch: losses[epoch] for epoch in (1, 2, 3)})


def test_runs_that_train_together_have_a_tracker_run_each(nowhere_else):
    runs = f"run_dir={nowhere_else}/s${{seed}}"
    assert launch.main([*LITTLE, "-m", "seed=0,1", "tracker=tensorboard", runs]) == 0
    for folder in (nowhere_else / "s0", nowhere_else / "s1"):
        assert in_tensorboard(folder)["train_loss"] == pytest.approx(numbers(folder)["train_loss"])


def test_a_failing_tracker_is_given_up_with_one_warning(nowhere_else, capsys):
    folder = nowhere_else / "run"
    folder.mkdir()
    (folder / "tensorboard").touch()
    assert train.main([*LITTLE, f"run_dir={folder}", "tracker=tensorboard"]) == 0
    assert len(read_metrics(folder / "metrics.jsonl")) == 4
    said = capsys.readouterr().err
    assert said.count("warning: tracker=tensorboard failed and is given up (") == 1 and said.count("\n") == 1


def test_a_tracker_that_fails_later_is_given_up_too(tmp_path, capsys):
    tracking = Tracking("tensorboard", tmp_path, {}, {}, [])
    tracking.record({"epoch": 1, "train_loss": 0.5})
    tracking._tracker._path = "/dev/full"
    for epoch in (2, 3):
        tracking.record({"epoch": epoch, "train_loss": 0.25})
    tracking.finish("finished")
    said = capsys.readouterr().err
    assert "No space left" in said and said.count("\n") == 1
    assert in_tensorboard(tmp_path) == {"train_loss": {1: 0.5}}


def test_a_missing_package_and_an_unknown_tracker_are_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr("experiments.training.trackers.find_spec", lambda name: None)
    assert train.main(["data=embedded", "tracker=wandb"]) == 2
    assert capsys.readouterr().err == (
        "error: tracker=wandb needs a package that is not installed: `pip install '.[wandb]'` gets it\n"
    )
    assert train.main(["data=embedded", "tracker=nothing"]) == 2
    assert "tracker must be none, tensorboard, wandb or mlflow, got" in capsys.readouterr().err


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_nothing_is_written_through_a_link(tracker, nowhere_else, capsys):
    if missing := missing_package(tracker):
        pytest.skip(missing)
    elsewhere, folder = nowhere_else / "elsewhere", nowhere_else / "run"
    elsewhere.mkdir(), folder.mkdir()
    (folder / tracker).symlink_to(elsewhere)
    Tracking(tracker, folder, {}, {}, []).finish("finished")
    assert f"{tracker} is a link, and nothing is written through links" in capsys.readouterr().err
    assert not list(elsewhere.iterdir())
