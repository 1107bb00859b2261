"""LR-HMDA: logistic regression that predicts whether a mortgage application is approved (paper: Figure 3a)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from cdgrab import streams
from experiments.data import hmda
from experiments.data.sources import Source
from experiments.tasks.base import DTYPES, Task
from experiments.tasks.settings import limit, share


class LrHmda(Task):
    """Units are applications. Features are standardised on the training split."""

    name, dataset = "lr_hmda", hmda
    settings = {"limit": limit, "train_share": share}

    @staticmethod
    def locate(config: DictConfig, data: str, root: str | None) -> Source:
        return hmda.locate(config.state, data, root)

    def __init__(self, config: DictConfig, source: Source, workers: int, seed: int, device: torch.device) -> None:
        super().__init__(config, source, workers)
        features, labels = self.load()
        shuffled = streams.stream(seed, "split").permutation(len(labels))
        cut = int(config.train_share * len(labels))
        split = {"train": shuffled[:cut][: config.limit], "test": shuffled[cut:]}
        mean, std = features[split["train"]].mean(axis=0), features[split["train"]].std(axis=0)
        features = (features - mean) / (std + (std == 0))
        dtype = DTYPES[config.dtype]
        self.data = {
            name: tuple(torch.as_tensor(array[rows], dtype=dtype, device=device) for array in (features, labels))
            for name, rows in split.items()
        }
        self.train_labels = self.data["train"][1]
        positive = int(labels.sum())
        self.rows = {"all": len(labels), "positive": positive, "train": self.train_units, "test": self.test_units}
        self.model = nn.Linear(features.shape[1], 1, dtype=dtype, device=device)
        nn.init.zeros_(self.model.weight)  # a convex problem: zero is the natural, seed-free start
        nn.init.zeros_(self.model.bias)

    def loss(self, parameters: dict[str, Tensor], carry: tuple, *batch: Tensor) -> tuple[Tensor, tuple]:
        return self._losses(parameters, *batch)[0].mean(), carry

    def measure(self, split: str, parameters: dict[str, Tensor], units: Tensor) -> dict[str, Tensor]:
        features, labels = self.fetch(split, units)
        losses, logits = self._losses(parameters, features, labels)
        correct = (logits > 0) == (labels > 0.5)
        return {"loss": losses.sum(), "correct": correct.sum(), "count": torch.tensor(losses.numel())}

    def metrics(self, train: dict[str, float], test: dict[str, float]) -> dict[str, float]:
        return {
            "train_loss": train["loss"] / train["count"],
            "test_loss": test["loss"] / test["count"],
            "test_accuracy": 100.0 * test["correct"] / test["count"],
        }

    def _losses(self, parameters: dict[str, Tensor], features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.apply(parameters, features).squeeze(-1)
        # Binary cross-entropy in few operations. Softplus is linear above its threshold: at 50 the difference is below
        # rounding.
        losses = F.softplus(logits, threshold=50.0) - labels * logits
        return losses, logits
