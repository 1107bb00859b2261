"""The data and the network of the examples: 1,797 handwritten digits, dropout and BatchNorm."""

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from experiments.data import cifar10


def digits() -> tuple[Dataset, Dataset]:
    """Images [1, 8, 8] and labels of 1,500 digits to learn from and 297 to be tested on."""
    pictures, _ = cifar10.load(cifar10.locate("embedded"))
    images = torch.from_numpy(pictures.images[:, :1, ::4, ::4]).float() / pictures.white
    labels = torch.from_numpy(pictures.labels).long()
    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = mixed.split([1500, len(labels) - 1500])
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2)),
        *(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


@torch.no_grad()
def accuracy(model: nn.Module, data: Dataset) -> float:
    model.eval()
    device = next(model.parameters()).device
    images, labels = (tensor.to(device) for tensor in data.tensors)
    right = (model(images).argmax(1) == labels).float().mean()
    model.train()
    return float(right)
