"""A task of one's own: a small network tells two spirals apart.

    python examples/extend/task.py sorter=cd_grab epochs=20

A class with data and a model, a name in TASKS, and task.yaml beside it with the settings that differ from the defaults
in configs/config.yaml. A task that is no classification has `loss`, `measure` and `metrics` of its own.
"""

import math
import sys

sys.path += [f"{sys.path[0]}/../.."] if __name__ == "__main__" else []  # the root of the clone

import torch
from omegaconf import DictConfig
from torch import nn

from experiments.data.sources import Source
from experiments.tasks import TASKS
from experiments.tasks.base import DTYPES, Classification, initialised
from experiments.tasks.settings import whole


class Spirals(Classification):
    name = "spirals"
    settings = {"points": whole(10), "hidden": whole(1)}  # those of task.yaml that no other task has

    @staticmethod
    def locate(config: DictConfig, data: str, root: str | None) -> Source:
        """Nothing to be found: the points are made up."""
        return Source("made-up", f"{config.points} points on two spirals", files=(), embedded=True)

    def __init__(self, config: DictConfig, source: Source, workers: int, seed: int, device: torch.device) -> None:
        super().__init__(config, source, workers)
        draws = torch.Generator().manual_seed(seed)
        labels = torch.arange(config.points) % 2
        turns = 3 * math.pi * torch.rand(config.points, generator=draws, dtype=torch.float64).sqrt()
        angles = turns + math.pi * labels
        points = (turns[:, None] * torch.stack([angles.cos(), angles.sin()], dim=1) / 10).to(DTYPES[config.dtype])
        cut = config.points * 4 // 5
        self.data = {  # tensors [units, ...]; the last one holds the classes
            "train": (points[:cut].to(device), labels[:cut].to(device)),
            "test": (points[cut:].to(device), labels[cut:].to(device)),
        }
        self.train_labels = self.data["train"][1]
        layers = lambda: nn.Sequential(nn.Linear(2, config.hidden), nn.Tanh(), nn.Linear(config.hidden, 2))  # noqa: E731
        self.model = initialised(layers, seed, config.dtype, device)

    def metrics(self, train: dict[str, float], test: dict[str, float]) -> dict[str, float]:
        metrics = super().metrics(train, test)
        return metrics | {"test_error_rate": 100.0 - metrics["test_accuracy"]}


TASKS["spirals"] = Spirals

if __name__ == "__main__":
    from experiments.launch import main

    sys.exit(main(["task=spirals", *sys.argv[1:]], extension=__file__))
