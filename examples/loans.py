"""The data and the network of `resumable`: 1,989 mortgage applications (Boston Fed), dropout and BatchNorm."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from experiments.data import hmda


def loans() -> TensorDataset:
    """Standardised features [55] and labels: 0 denied, 1 approved."""
    (features, labels), _ = hmda.load(hmda.locate(data="embedded"))
    features = (features - features.mean(axis=0)) / features.std(axis=0)
    return TensorDataset(torch.from_numpy(features).float(), torch.tensor(labels, dtype=torch.long))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(55, 256),
        nn.BatchNorm1d(256, momentum=0.01),  # of small batches: what evaluation uses is the mean over many
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(256, 2),
    )
