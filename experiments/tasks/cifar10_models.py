"""Models for CIFAR-10's pictures: LeNet, multinomial logistic regression and ResNet-18."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.data.cifar10 import CLASSES, SIDE

WIDTHS, BLOCKS, GROUPS = (64, 128, 256, 512), 2, 32  # of the ResNet
Norm = Callable[[int], nn.Module]  # of so many channels


class Convolve(torch.autograd.Function):
    """`F.conv2d` with the filters' gradients computed as matrix products with the patches of the images.

    Under vmap, example by example, these are batched matrix products. PyTorch itself uses a convolution with as many
    groups as examples, which takes a fifth longer on a CPU.
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


def lenet(convolution: type[nn.Conv2d] = Convolution) -> nn.Module:
    """Images [..., 3, 32, 32] with at most one leading dimension -> logits [..., 10]; 62,006 parameters.

    Pooling comes before ReLU: the same numbers, computed from a quarter of the values. The third convolution, 5 x 5 on
    an input of 5 x 5, is written as the linear layer that it is.
    """
    return nn.Sequential(
        *(convolution(3, 6, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(convolution(6, 16, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(-3), nn.Linear(16 * 5 * 5, 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU()),
        nn.Linear(84, CLASSES),
    )


def linear() -> nn.Module:
    """Multinomial logistic regression on the pixels; 30,730 parameters."""
    return nn.Sequential(nn.Flatten(-3), nn.Linear(3 * SIDE**2, CLASSES))


class Block(nn.Module):
    """A block of a ResNet: two convolutions and a shortcut."""

    def __init__(self, before: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.first, self.second = _convolution(before, width, stride), _convolution(width, width)
        self.norms = nn.ModuleList(norm(width) for _ in range(2))
        changes = stride > 1 or before != width
        self.shortcut = nn.Conv2d(before, width, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.first(images)))
        return F.relu(self.norms[1](self.second(inner)) + self.shortcut(images))


class ResNet18(nn.Module):
    """Images [..., 3, height, width] with at most one leading dimension -> logits [..., 10].

    Normalised over groups of channels, unless another `norm` is given: gradients of single examples need a model that
    does not mix examples, as batch normalisation would.
    """

    def __init__(self, norm: Norm | None = None) -> None:
        super().__init__()
        norm = norm or partial(nn.GroupNorm, GROUPS)
        stages = zip((WIDTHS[0], *WIDTHS[:-1]), WIDTHS, (1, 2, 2, 2), strict=True)
        self.layers = nn.Sequential(
            *(_convolution(3, WIDTHS[0]), norm(WIDTHS[0]), nn.ReLU()),
            *(
                Block(before if block == 0 else width, width, stride if block == 0 else 1, norm)
                for before, width, stride in stages
                for block in range(BLOCKS)
            ),
        )
        self.classify = nn.Linear(WIDTHS[-1], CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        together = images if images.dim() == 4 else images[None]  # norms count dimensions from the left
        logits = self.classify(self.layers(together).mean((-2, -1)))
        return logits if images.dim() == 4 else logits[0]


def _convolution(before: int, width: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
