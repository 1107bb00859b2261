"""Metrics for TensorBoard, Weights & Biases or MLflow (`tracker=`): beside metrics.jsonl, never instead of it.

A run has one run of its tracker. Which one that is, its manifest says, so that a run that is resumed goes on there. A
tracker that fails is given up with a warning, and training goes on.
"""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

from cdgrab.errors import first_line, warn
from experiments.store.files import RESULTS, RUNS, own_folder


class TensorBoard:
    """Event files in the run's own folder: `tensorboard --logdir results/runs` shows them all."""

    def __init__(self, directory: Path, settings: dict, name: str | None, epochs: int) -> None:
        """settings: flat. name: of the tracker's run to go on with, if there is one. epochs: those done; later ones are
        dropped."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.name, self._event, self._summary, self._writer = "tensorboard", Event, Summary, RecordWriter
        folder = own_folder(directory / self.name)
        self._path = folder / f"events.out.tfevents.{time.time_ns()}"  # files are read in the order of their names
        self._write(file_version="brain.Event:2")
        self._write(step=epochs + 1, session_log=SessionLog(status=SessionLog.START))

    def record(self, epoch: int, values: dict[str, float]) -> None:
        tagged = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(step=epoch, summary=self._summary(value=tagged))

    def finish(self, status: str) -> None:
        """Everything is written already."""

    def _write(self, **what: object) -> None:
        event = self._event(wall_time=time.time(), **what)
        with open(self._path, "ab") as file:
            self._writer(file).write(event.SerializeToString())


class WandB:
    """A run of the project that WANDB_PROJECT names, or `cdgrab`; WANDB_MODE=offline needs no account."""

    def __init__(self, directory: Path, settings: dict, name: str | None, epochs: int) -> None:
        import wandb

        own_folder(directory / "wandb")
        self.name = name or uuid4().hex[:8]
        label = _label(directory)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "cdgrab"),
            dir=directory,
            id=self.name,
            name=label,
            group=str(Path(label).parent),
            config=settings,
            resume="allow",
            reinit="create_new",  # runs that train together share this process
            settings=wandb.Settings(silent=True, console="off", init_timeout=30, finish_timeout=60),
        )

    def record(self, epoch: int, values: dict[str, float]) -> None:
        if epoch >= self._run.step:  # else it was sent before the run was killed
            self._run.log(values, step=epoch)

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=int(status != "finished"))


class MLflow:
    """A run of the experiment that MLFLOW_EXPERIMENT_NAME names, or `cdgrab`, on the server that MLFLOW_TRACKING_URI
    names, or in files under results/mlruns."""

    statuses = {"finished": "FINISHED", "diverged": "FAILED"}  # others: KILLED

    def __init__(self, directory: Path, settings: dict, name: str | None, epochs: int) -> None:
        for setting, value in {"ALLOW_FILE_STORE": "true", "HTTP_REQUEST_MAX_RETRIES": "2"}.items():
            os.environ.setdefault(f"MLFLOW_{setting}", value)
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or (RESULTS / "mlruns").as_uri())
        if name:
            self._client.update_run(name, status="RUNNING")
            history = self._client.get_metric_history(name, "train_loss")
            self.name, self._sent = name, max((metric.step for metric in history), default=0)
        else:
            made = self._client.create_run(self._experiment(), run_name=_label(directory))
            self.name, self._sent = made.info.run_id, 0
            self._client.log_batch(self.name, params=[Param(key, str(value)) for key, value in settings.items()])

    def record(self, epoch: int, values: dict[str, float]) -> None:
        if epoch > self._sent:  # else it was sent before the run was killed
            now = time.time_ns() // 10**6
            self._client.log_batch(self.name, [self._metric(key, value, now, epoch) for key, value in values.items()])

    def finish(self, status: str) -> None:
        self._client.set_terminated(self.name, self.statuses.get(status, "KILLED"))

    def _experiment(self) -> str:
        """Its id. Another process may make it at the same time."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "cdgrab")
        if not (found := self._client.get_experiment_by_name(name)):
            try:
                return self._client.create_experiment(name)
            except Exception:
                if not (found := self._client.get_experiment_by_name(name)):
                    raise
        return found.experiment_id


# each needs the package, and the extra, of its name
TRACKERS = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
NAMES = ("none", *TRACKERS)


def missing_package(tracker: str) -> str | None:
    """A sentence if the tracker cannot be used, since its package is missing."""
    if tracker not in TRACKERS or find_spec(tracker):
        return None
    return f"tracker={tracker} needs a package that is not installed: `pip install '.[{tracker}]'` gets it"


class Tracking:
    """Passes a run's metrics on to its tracker, until that fails."""

    def __init__(self, tracker: str, directory: Path, settings: dict, before: dict, lines: list[dict]) -> None:
        """settings and lines: flat. before: the names of the run's tracker runs, by tracker. lines: the metrics so far,
        of which a new tracker run is told."""
        self._kind, self._tracker, self.names = tracker, None, dict(before)
        if tracker == "none":
            return
        try:
            self._tracker = TRACKERS[tracker](directory, settings, before.get(tracker), len(lines))
            self.names[tracker] = self._tracker.name
        except Exception as error:
            self._give_up(error)
        for line in lines if tracker not in before else ():
            self.record(line)

    def record(self, line: dict) -> None:
        """The metrics of one epoch. Words among them are left out."""
        values = {key.replace(".", "/"): value for key, value in line.items() if isinstance(value, int | float)}
        self._tell("record", values.pop("epoch"), values)

    def finish(self, status: str) -> None:
        self._tell("finish", status)

    def _tell(self, what: str, *content: object) -> None:
        if self._tracker:
            try:
                getattr(self._tracker, what)(*content)
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._tracker = None
        warn(f"tracker={self._kind} failed and is given up ({first_line(error)}); metrics.jsonl has all metrics")


def _label(directory: Path) -> str:
    """A run's folder under results/runs, or its name alone."""
    folder = directory.resolve()
    return str(folder.relative_to(RUNS)) if folder.is_relative_to(RUNS) else folder.name
