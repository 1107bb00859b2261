"""Tasks by name. A new task is one file here, one data loader under `cdgrab/data` and one yaml under `configs/task`."""

from __future__ import annotations

import torch
from omegaconf import DictConfig

from cdgrab.errors import CdgrabError
from experiments.data import hmda, m4, text_blocks
from experiments.data.cifar10 import locate as locate_cifar10
from experiments.data.glue import locate as locate_glue
from experiments.data.sources import Source
from experiments.data.wikitext import locate as locate_wikitext
from experiments.tasks.base import Task
from experiments.tasks.cifar10 import Cifar10
from experiments.tasks.glue import Glue
from experiments.tasks.gpt2_wiki103 import Gpt2Wiki103
from experiments.tasks.lr_hmda import LrHmda
from experiments.tasks.lstm_wiki2 import LstmWiki2
from experiments.tasks.mlp_m4 import MlpM4

# name -> (class, function of the config that finds the data)
TASKS = {
    "cifar10": (Cifar10, lambda config: locate_cifar10(config.data, config.data_root)),
    "glue": (Glue, lambda config: locate_glue(config.task.dataset, config.data, config.data_root)),
    "gpt2_wiki103": (Gpt2Wiki103, lambda config: text_blocks.locate(config.data, config.data_root)),
    "lr_hmda": (LrHmda, lambda config: hmda.locate(config.task.state, config.data, config.data_root)),
    "lstm_wiki2": (LstmWiki2, lambda config: locate_wikitext(config.data, config.data_root)),
    "mlp_m4": (MlpM4, lambda config: m4.locate(config.data, config.data_root)),
}


def locate_data(config: DictConfig) -> Source:
    """Where a run with this config takes its data from."""
    if config.data not in ("auto", "embedded"):
        raise CdgrabError(f"data must be auto or embedded, got {config.data!r}")
    return _entry(config.task.name)[1](config)


def make_task(config: DictConfig, source: Source, device: torch.device) -> Task:
    return _entry(config.task.name)[0](config.task, source, config.workers, config.seed, device)


def _entry(name: str) -> tuple:
    if name not in TASKS:
        raise CdgrabError(f"unknown task {name!r}; the tasks are {', '.join(TASKS)}")
    return TASKS[name]
