"""MLP-M4: an autoregressive MLP forecasts weekly series (paper: Figure 3c)."""

from __future__ import annotations

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from cdgrab import streams
from cdgrab.errors import CdgrabError
from experiments.data import m4
from experiments.data.sources import Source
from experiments.tasks.base import DTYPES, Task, initialised
from experiments.tasks.settings import limit, share, whole


class MlpM4(Task):
    """Units are windows: 20 values in, 6 out, every third position; each series standardised by its own past."""

    name, dataset = "mlp_m4", m4
    settings = dict.fromkeys(("window_in", "window_out", "stride", "hidden"), whole(1))
    settings |= {"limit": limit, "train_share": share}

    def __init__(self, config: DictConfig, source: Source, workers: int, seed: int, device: torch.device) -> None:
        super().__init__(config, source, workers)
        series = self.load()
        means = np.array([past.mean() for past in series.past])
        stds = np.array([past.std() for past in series.past])
        scaled = [(past - mean) / std for past, mean, std in zip(series.past, means, stds, strict=True)]
        length = config.window_in + config.window_out
        windows = cut_windows(scaled, length, config.stride)
        if len(windows) < 2:
            raise CdgrabError(f"{source.description} gives {len(windows)} windows of {length}")

        def tensor(array: np.ndarray) -> Tensor:
            return torch.as_tensor(array, dtype=DTYPES[config.dtype], device=device)

        shuffled, cut = streams.stream(seed, "split").permutation(len(windows)), int(config.train_share * len(windows))
        train = tensor(windows[shuffled[:cut][: config.limit]])
        last = np.stack([past[-config.window_in :] for past in scaled])
        self.data = {"train": (train,), "test": (tensor(last), tensor(series.future))}
        self._means, self._stds = tensor(means), tensor(stds)
        self.rows = {"all": len(windows), "train": len(train), "series": len(scaled)}
        self.model = initialised(lambda: mlp(config.window_in, config.hidden), seed, config.dtype, device)

    def fetch(self, split: str, indices: Tensor) -> tuple[Tensor, ...]:
        """Inputs and targets."""
        found, cut = super().fetch(split, indices), self.config.window_in
        return found if split == "test" else (found[0][..., :cut], found[0][..., cut:])

    def loss(self, parameters: dict[str, Tensor], carry: tuple, *batch: Tensor) -> tuple[Tensor, tuple]:
        past, future = batch
        return (self._forecast(parameters, past, future.shape[-1]) - future).square().mean(), carry

    def factors(self, parameters: dict[str, Tensor], past: Tensor, future: Tensor) -> tuple[Tensor, list]:
        tensors = list(parameters.values())
        layers = list(zip(tensors[::2], tensors[1::2], strict=True))  # weights and biases
        inputs, slopes = ([[] for _ in layers] for _ in range(2))  # of each layer, by forecast
        values, (length, steps) = past, (past.shape[-1], future.shape[-1])
        for step in range(steps):
            value = values[..., step:]
            for number, (weight, bias) in enumerate(layers):
                value = value.relu() if number else value
                inputs[number].append(value)
                value = torch.baddbmm(bias[:, None], value, weight.mT)
            values = torch.cat([values, value], dim=-1)
        errors = values[..., length:] - future
        by_value = torch.cat([torch.zeros_like(past), errors * (2 / steps)], dim=-1)  # the loss's derivatives
        for step in reversed(range(steps)):
            slope = by_value[..., length + step, None]
            for number in reversed(range(len(layers))):
                slopes[number].insert(0, slope)
                slope = torch.bmm(slope, layers[number][0])
                if number:  # through the ReLU
                    slope = torch.ops.aten.threshold_backward(slope, inputs[number][step], 0)
            by_value[..., step : step + length].add_(slope)
        pairs = zip(slopes, inputs, strict=True)
        return errors.square().mean(-1), [(torch.stack(slope, 2), torch.stack(value, 2)) for slope, value in pairs]

    def measure(self, split: str, parameters: dict[str, Tensor], units: Tensor) -> dict[str, Tensor]:
        past, future = self.fetch(split, units)
        forecast = self._forecast(parameters, past, future.shape[-1])
        count = torch.tensor(future.numel())
        if split == "train":
            return {"squares": (forecast - future).square().sum(), "count": count}
        forecast = forecast * self._stds[units, None] + self._means[units, None]
        smape = 200.0 * (forecast - future).abs() / (forecast.abs() + future.abs())
        return {"smape": smape.sum(), "count": count}

    def metrics(self, train: dict[str, float], test: dict[str, float]) -> dict[str, float]:
        return {"train_loss": train["squares"] / train["count"], "test_smape": test["smape"] / test["count"]}

    def _forecast(self, parameters: dict[str, Tensor], past: Tensor, steps: int) -> Tensor:
        """One value at a time; each forecast becomes an input of the next."""
        forecasts = []
        for _ in range(steps):
            forecasts.append(self.apply(parameters, past))
            past = torch.cat([past[..., 1:], forecasts[-1]], dim=-1)
        return torch.cat(forecasts, dim=-1)


def mlp(inputs: int, hidden: int) -> nn.Module:
    layers = (nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(hidden, 1))


def cut_windows(series: list[np.ndarray], length: int, stride: int) -> np.ndarray:
    """All windows [windows, length] that start at every `stride`-th value and end before the series' last value."""
    cuts = [
        np.lib.stride_tricks.sliding_window_view(s, length)[: len(s) - length : stride]
        for s in series
        if len(s) > length
    ]
    return np.concatenate(cuts) if cuts else np.empty((0, length))
