"""CIFAR-10: LeNet, or a ResNet-18, classifies small pictures (paper: Figures 4, 9 and 12, with LeNet)."""

from __future__ import annotations

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from cdgrab import streams
from experiments.data import cifar10
from experiments.data.sources import Source
from experiments.tasks.base import DTYPES, Classification, initialised
from experiments.tasks.cifar10_models import ResNet18, lenet, linear
from experiments.tasks.layers import ByWorker, channels_last
from experiments.tasks.settings import limit, one_of, share

NORMALS = {  # means and deviations by channel
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
MODELS = {"lenet": lenet, "linear": linear, "resnet18": ResNet18}


class Cifar10(Classification):
    """Units are images. They stay bytes in memory and are normalised when fetched: a quarter of the space."""

    name, dataset, evaluated_at_once = "cifar10", cifar10, 2000
    settings = {"model": one_of(*MODELS), "limit": limit, "test_limit": limit, "train_share": share}
    settings |= {"normalisation": one_of(*NORMALS), "initial_weights": one_of("own", "published")}

    def __init__(self, config: DictConfig, source: Source, workers: int, seed: int, device: torch.device) -> None:
        super().__init__(config, source, workers)
        pictures = self.load()
        rows, cut = np.arange(len(pictures.labels)), pictures.train
        if cut is None:
            rows, cut = streams.stream(seed, "split").permutation(rows), int(config.train_share * len(rows))
        split = {"train": rows[:cut][: config.limit], "test": rows[cut:][: config.test_limit]}
        self.data = {
            name: tuple(torch.as_tensor(array[part], device=device) for array in (pictures.images, pictures.labels))
            for name, part in split.items()
        }
        self.train_labels = self.data["train"][1]
        self.rows = {"all": len(rows), "train": self.train_units, "test": self.test_units}
        normals = NORMALS[config.normalisation]
        mean, std = (torch.tensor(v, dtype=DTYPES[config.dtype], device=device)[:, None, None] for v in normals)
        self._scale, self._shift = 1.0 / (pictures.white * std), -mean / std
        self.evaluated_together = config.model != "resnet18"  # which keeps a GPU busy on its own
        draws = seed if config.initial_weights == "published" else None
        self.model = initialised(MODELS[config.model], seed, config.dtype, device, draws)

    def apply(self, parameters: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        """With `layers`, a GPU evaluates a model by the kernels that it trains it with: they are faster."""
        if self.config.gradients != "layers" or torch.is_grad_enabled() or not inputs[0].is_cuda:
            return super().apply(parameters, *inputs)
        with ByWorker():
            return super().apply({name: one[None] for name, one in parameters.items()}, *map(channels_last, inputs))

    def fetch(self, split: str, indices: Tensor) -> tuple[Tensor, ...]:
        images, labels = super().fetch(split, indices)
        return images * self._scale + self._shift, labels
