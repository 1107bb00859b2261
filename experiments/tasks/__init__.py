"""Tasks by name. A new task is one class (see `base.Task`), its entry in `TASKS`, and a yaml with what differs from the
defaults in configs/config.yaml: configs/task/<name>.yaml, or one beside the class's own file."""

from __future__ import annotations

from pkgutil import resolve_name

import torch
from omegaconf import DictConfig

from cdgrab.checks import look_up, one_of
from experiments.data.sources import Source
from experiments.tasks.base import Task

# a class, or where to find it: a run imports the code of its own task only
TASKS: dict[str, type[Task] | str] = {
    "cifar10": "experiments.tasks.cifar10:Cifar10",
    "glue": "experiments.tasks.glue:Glue",
    "gpt2_wiki103": "experiments.tasks.gpt2_wiki103:Gpt2Wiki103",
    "lr_hmda": "experiments.tasks.lr_hmda:LrHmda",
    "lstm_wiki2": "experiments.tasks.lstm_wiki2:LstmWiki2",
    "mlp_m4": "experiments.tasks.mlp_m4:MlpM4",
}


def task_class(name: str) -> type[Task]:
    found = look_up("task", name, TASKS)
    return resolve_name(found) if isinstance(found, str) else found


def locate_data(config: DictConfig) -> Source:
    """The data source of a run with this config."""
    one_of("data", config.data, ("auto", "embedded"))
    source = task_class(config.task.name).locate(config.task, config.data, config.data_root)
    source.refuse_missing()
    return source


def make_task(config: DictConfig, source: Source, device: torch.device) -> Task:
    return task_class(config.task.name)(config.task, source, config.workers, config.seed, device)
