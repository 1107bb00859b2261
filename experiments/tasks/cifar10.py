"""CIFAR-10: LeNet, or a ResNet-18, classifies small pictures (paper: Figures 4, 9 and 12, with LeNet)."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.func import functional_call

from cdgrab import streams
from cdgrab.errors import CdgrabError
from experiments.data import cifar10
from experiments.data.sources import Source
from experiments.tasks.base import DTYPES, Task, add_totals, initialised
from experiments.tasks.resnet import ResNet18

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # the published code's, by channel
EVALUATED_AT_ONCE = 2000  # images


class Cifar10(Task):
    """Units are images. They stay bytes in memory and are normalised when fetched: a quarter of the space."""

    name, counted = "cifar10", "pictures"

    def __init__(self, config: DictConfig, source: Source, workers: int, seed: int, device: torch.device) -> None:
        pictures, checksums = cifar10.load(source)
        source.checksums.update(checksums)
        super().__init__(config, source, workers)
        if config.model not in MODELS:
            raise CdgrabError(f"task.model must be {' or '.join(MODELS)}, got {config.model!r}")
        rows, cut = np.arange(len(pictures.labels)), pictures.train
        if cut is None:
            rows, cut = streams.stream(seed, "split").permutation(rows), int(config.train_share * len(rows))
        split = {"train": rows[:cut][: config.limit], "test": rows[cut:][: config.test_limit]}
        self._data = {
            name: tuple(torch.as_tensor(array[part], device=device) for array in (pictures.images, pictures.labels))
            for name, part in split.items()
        }
        self.train_units, self.test_units = len(split["train"]), len(split["test"])
        self.train_labels = self._data["train"][1]
        self.rows = {"all": len(rows), "train": self.train_units, "test": self.test_units}
        mean, std = (torch.tensor(v, dtype=DTYPES[config.dtype], device=device)[:, None, None] for v in (MEAN, STD))
        self._scale, self._shift = 1.0 / (pictures.white * std), -mean / std
        self.model = initialised(MODELS[config.model], seed, config.dtype, device)

    def fetch(self, split: str, indices: Tensor) -> tuple[Tensor, ...]:
        images, labels = self._data[split]
        return images[indices] * self._scale + self._shift, labels[indices]

    def loss(self, parameters: dict[str, Tensor], carry: tuple, *batch: Tensor) -> tuple[Tensor, tuple]:
        images, labels = batch
        return F.cross_entropy(functional_call(self.model, parameters, (images,)), labels), carry

    def totals(self, split: str, parameters: dict[str, Tensor], units: Tensor) -> dict[str, Tensor]:
        return add_totals([self._totals(split, parameters, some) for some in units.split(EVALUATED_AT_ONCE)])

    def metrics(self, train: dict[str, float], test: dict[str, float]) -> dict[str, float]:
        return {
            "train_loss": train["loss"] / train["count"],
            "train_accuracy": 100.0 * train["correct"] / train["count"],
            "test_loss": test["loss"] / test["count"],
            "test_accuracy": 100.0 * test["correct"] / test["count"],
        }

    def _totals(self, split: str, parameters: dict[str, Tensor], units: Tensor) -> dict[str, Tensor]:
        images, labels = self.fetch(split, units)
        logits = functional_call(self.model, parameters, (images,))
        losses = F.cross_entropy(logits, labels, reduction="sum")
        return {"loss": losses, "correct": (logits.argmax(-1) == labels).sum(), "count": torch.tensor(len(labels))}


class Convolve(torch.autograd.Function):
    """`F.conv2d` whose gradients of the filters are matrix products with the patches of the images.

    Example by example, under vmap, these are batched matrix products. PyTorch's own are a convolution with as many
    groups as examples, which takes longer by a fifth on a CPU.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, filters: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(images, filters, bias)

    @staticmethod
    def setup_context(context, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        context.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        images, filters = context.saved_tensors
        products = gradient.flatten(-2) @ image_patches(images, filters.shape[-1]).mT
        return (
            F.conv_transpose2d(gradient, filters) if context.needs_input_grad[0] else None,
            products.reshape(-1, *filters.shape).sum(0),
            gradient.sum((-2, -1)).reshape(-1, len(filters)).sum(0),
        )


class Convolution(nn.Conv2d):
    """An ordinary layer otherwise: same parameters, same initialisation."""

    def forward(self, images: Tensor) -> Tensor:
        return Convolve.apply(images, self.weight, self.bias)


def image_patches(images: Tensor, size: int) -> Tensor:
    """[..., channels, height, width] -> [..., channels · size², patches], row by row."""
    patches = images.unfold(-2, size, 1).unfold(-2, size, 1)  # [..., channels, rows, columns, size, size]
    return patches.movedim((-4, -3), (-2, -1)).flatten(-5, -3).flatten(-2)


def lenet() -> nn.Module:
    """Images [..., 3, 32, 32] with at most one leading dimension -> logits [..., 10]; 62,006 parameters.

    Pooling comes before ReLU, which gives the same numbers from a quarter of the values. The third convolution, 5 x 5
    on what is 5 x 5 by then, is written as the linear layer that it is.
    """
    return nn.Sequential(
        *(Convolution(3, 6, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(Convolution(6, 16, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(-3), nn.Linear(16 * 5 * 5, 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU()),
        nn.Linear(84, cifar10.CLASSES),
    )


def linear() -> nn.Module:
    """Multinomial logistic regression on the pixels; 30,730 parameters."""
    return nn.Sequential(nn.Flatten(-3), nn.Linear(3 * cifar10.SIDE**2, cifar10.CLASSES))


MODELS = {"lenet": lenet, "linear": linear, "resnet18": lambda: ResNet18(cifar10.CLASSES)}
