"""ResNet-18 for small pictures. Normalised over groups of channels: gradients of single examples need a model in which
examples do not mix, as they would in batch normalisation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS, BLOCKS, GROUPS = (64, 128, 256, 512), 2, 32


class Block(nn.Module):
    """Two convolutions beside a short cut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = _convolution(before, width, stride), _convolution(width, width)
        self.norms = nn.ModuleList(nn.GroupNorm(GROUPS, width) for _ in range(2))
        changes = stride > 1 or before != width
        self.shortcut = nn.Conv2d(before, width, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.first(images)))
        return F.relu(self.norms[1](self.second(inner)) + self.shortcut(images))


class ResNet18(nn.Module):
    """Images [..., 3, height, width] with at most one leading dimension -> logits [..., classes]."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        stages = zip((WIDTHS[0], *WIDTHS[:-1]), WIDTHS, (1, 2, 2, 2), strict=True)
        self.layers = nn.Sequential(
            *(_convolution(3, WIDTHS[0]), nn.GroupNorm(GROUPS, WIDTHS[0]), nn.ReLU()),
            *(
                Block(before if block == 0 else width, width, stride if block == 0 else 1)
                for before, width, stride in stages
                for block in range(BLOCKS)
            ),
        )
        self.classify = nn.Linear(WIDTHS[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        together = images if images.dim() == 4 else images[None]  # norms count dimensions from the left
        logits = self.classify(self.layers(together).mean((-2, -1)))
        return logits if images.dim() == 4 else logits[0]


def _convolution(before: int, width: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
