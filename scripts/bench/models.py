"""Models that people train, with examples made up for them, for the benchmark of the drop-in sampler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


@dataclass(frozen=True)
class Trained:
    """batch: examples per step; shape: of an example's input; classes: labels, or words if inputs are tokens."""

    make: Callable[[], nn.Module]
    batch: int
    shape: tuple[int, ...]
    classes: int = 10
    half: bool = False  # bf16, by autocast
    tokens: bool = False

    def examples(self, number: int, device: str) -> Examples:
        shape = (number, *self.shape)
        inputs = torch.randint(self.classes, shape) if self.tokens else torch.randn(shape)
        return Examples(inputs.to(device), torch.randint(self.classes, (number,)).to(device))

    def loss(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        with self._precision(inputs.device.type):
            if self.tokens:
                return model(inputs, labels=inputs).loss
            scores = model(inputs)
            return nn.functional.cross_entropy(getattr(scores, "logits", scores), labels)

    def _precision(self, device: str) -> AbstractContextManager:
        return torch.autocast(device, torch.bfloat16) if self.half else nullcontext()


class Examples(Dataset):
    """On the device already, and handed out a batch at a time: loading should take no time here."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        return tuple(tensor[indices] for tensor in self._tensors)


def _perceptron(*widths: int) -> nn.Module:
    layers = [layer for sizes in zip(widths, widths[1:], strict=False) for layer in (nn.Linear(*sizes), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def _convolutional() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 256, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)),
    )


def _resnet18() -> nn.Module:
    """For small pictures: its first layer keeps their size."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "num_labels": 10}
    model = ResNetForImageClassification(ResNetConfig(layer_type="basic", **sizes))
    model.resnet.embedder = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    return model


def _resnet50() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=1000))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config())


TINY = Trained(partial(_perceptron, 64, 8, 10), 32, (1, 8, 8))  # to load code with
MODELS = {
    "linear": Trained(partial(_perceptron, 64, 940, 940, 10), 32, (1, 8, 8)),
    "convolutional": Trained(_convolutional, 32, (1, 8, 8)),
    "mlp": Trained(partial(_perceptron, 784, 2048, 2048, 10), 64, (784,)),
    "resnet18, batch 128": Trained(_resnet18, 128, (3, 32, 32)),
    "resnet18, batch 32": Trained(_resnet18, 32, (3, 32, 32)),
    "resnet50": Trained(_resnet50, 64, (3, 224, 224), 1000, half=True),
    "gpt2": Trained(_gpt2, 8, (512,), 50257, half=True, tokens=True),
}
