"""Our `grab` and `grab_pair` on one process against the package grab-sampler: same model, data and first order.

Both run in the same plain loop (per-example gradients by vmap, SGD with momentum), with the sorter as the only
difference, epoch by epoch in turn. Nothing of grab-sampler's data loading is charged to it. A second row has our own
training loop instead, which is what a user of this library runs.
"""

from __future__ import annotations

import importlib.util
import sys
import time
import types
from collections.abc import Iterator
from itertools import product
from statistics import mean

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

import cdgrab
from cdgrab.runtime.group import WorkerGroup
from experiments.data import cifar10
from experiments.studies.timing import finish_on, train_epoch
from experiments.tasks import make_task
from experiments.tasks.base import Classification, Task, initialised
from experiments.training.config import Run, compose
from experiments.training.gradients import FlatParameters
from experiments.training.loop import alone
from scripts.bench.measure import summary

BATCH, MOMENTUM = 16, 0.9
PEERS = {"grab": "MeanBalance", "grab_pair": "PairBalance"}
EPOCHS = {"smoke": 2, "quick": 6, "full": 30}
SEEDS = {"smoke": 1, "quick": 3, "full": 10}
LEARNING_RATES = {"lr_hmda": 0.01, "digits_mlp": 0.01}
INSTALL = "pip install --no-deps grab-sampler==0.1.3 absl-py overrides scipy joblib cloudpickle threadpoolctl"
describe = (
    "{what}: ours {ours_us} µs, loss {ours_loss:.6f}; grab-sampler {peer_us} µs, loss {peer_loss:.6f}"
).format_map


def measure(device: str, size: str) -> Iterator[dict]:
    if importlib.util.find_spec("grabsampler") is None:
        print(f"  skipped: grab-sampler is not installed; `{INSTALL}` gets it")
        return
    torch.set_num_threads(1)
    for task, sorter in product(LEARNING_RATES, PEERS):
        found = [_both(_task(task, sorter, seed, device), EPOCHS[size], device) for seed in range(SEEDS[size])]
        for what, ours in (("same loop", "ours"), ("own loop", "library")):
            row, losses = {"device": device, "what": f"{task} {sorter}, {what}"}, {}
            for who, key in (("ours", ours), ("peer", "peer")):
                row |= summary(f"{who}_us", [us for run in found for us in run[f"{key}_us"]])
                losses[who] = [run[f"{key}_loss"] for run in found]
            row |= {f"{who}_loss": mean(values) for who, values in losses.items()}
            row |= {f"{who}_losses": values for who, values in losses.items()}
            yield row | {"seeds": SEEDS[size], "epochs": EPOCHS[size]}


# -- models and data ---------------------------------------------------------------------------------------------------


class DigitsMlp(Classification):
    """1,797 handwritten digits of 8 × 8 pixels, one hidden layer."""

    name = "digits_mlp"

    def __init__(self, run: Run, device: torch.device) -> None:
        super().__init__(run.config.task, cifar10.locate("embedded"), run.config.workers)
        table = np.loadtxt(self.source.files[0], delimiter=",", dtype=np.float32)
        arrays = (table[:, :-1] / 16, table[:, -1].astype(int))
        self.data = {"train": tuple(torch.as_tensor(array, device=device) for array in arrays)}
        build = lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))  # noqa: E731
        self.model = initialised(build, run.config.seed, "float32", device)


def _task(name: str, sorter: str, seed: int, device: str) -> tuple[Run, Task]:
    """The run, on one worker, and its task. Both in float32, which is what grab-sampler balances in."""
    settings = ["workers=1", f"sorter={sorter}", f"seed={seed}", f"task.batch={BATCH}", "data=embedded"]
    settings += ["task.dtype=float32", f"task.momentum={MOMENTUM}", f"device={device}", "task.truncate=true"]
    run = compose([*settings, f"task.lr={LEARNING_RATES[name]}"])
    where = torch.device(device)
    return run, DigitsMlp(run, where) if name == "digits_mlp" else make_task(run.config, run.source, where)


# -- the two, and the loop they share ----------------------------------------------------------------------------------


class Ours:
    def __init__(self, run: Run, units: int, flat: FlatParameters) -> None:
        options = {"workers": 1, "units": units, "dim": flat.dim, "seed": run.config.seed}
        self._sorter, self._flat = cdgrab.make_sorter(**run.config.sorter, **options), flat
        self._epoch, self._seen = 0, 0

    def order(self) -> Tensor:
        order = self._sorter.order(self._epoch)[0]
        self._epoch, self._seen = self._epoch + 1, 0
        return order

    def step(self, gradients: dict[str, Tensor]) -> None:
        rows = self._flat.flatten(gradients, batch_dims=1)
        self._sorter.observe(range(self._seen, self._seen + len(rows)), rows[None])
        self._seen += len(rows)


class Peer:
    """What grab-sampler's GraBSampler does, by its own sorters. The sampler itself cannot be made with PyTorch 2.13: it
    hands its data to torch.utils.data.Sampler, which takes no argument any more."""

    def __init__(self, run: Run, units: int, dim: int, device: torch.device, first: Tensor) -> None:
        _stand_in_for_torch_sparse()
        sorters = importlib.import_module("grabsampler.sorter")
        self._sorter = getattr(sorters, PEERS[run.config.sorter.name])(units, dim, device=device)
        self._sorter.next_orders.copy_(first)

    def order(self) -> Tensor:
        self._sorter.reset_epoch()
        return torch.tensor(self._sorter.orders.tolist())

    def step(self, gradients: dict[str, Tensor]) -> None:
        self._sorter.step(gradients)


def _stand_in_for_torch_sparse() -> None:
    """grab-sampler imports it for a sparse projection that is not used here; it would have to be compiled."""
    if "torch_sparse" not in sys.modules and importlib.util.find_spec("torch_sparse") is None:
        sys.modules["torch_sparse"] = types.ModuleType("torch_sparse")
        sys.modules["torch_sparse"].SparseTensor = None


class PlainLoop:
    """Training with per-example gradients as grab-sampler's documentation shows it."""

    def __init__(self, run: Run, task: Task, owned: Tensor) -> None:
        self._task, self._owned, self._lr = task, owned, run.config.task.lr
        self.parameters = {name: p.detach().clone() for name, p in task.model.named_parameters()}
        self._momenta = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self._gradients = vmap(grad_and_value(lambda p, *data: task.loss(p, (), *data)[0]), in_dims=(None, 0, 0))

    def epoch(self, sorter: Ours | Peer) -> None:
        for some in sorter.order().split(BATCH):
            units = self._owned[some.to(self._owned.device)]
            gradients, _ = self._gradients(self.parameters, *self._task.fetch("train", units))
            sorter.step(gradients)
            for name, gradient in gradients.items():
                self._momenta[name].mul_(MOMENTUM).add_(gradient.mean(0))
                self.parameters[name] = self.parameters[name] - self._lr * self._momenta[name]

    def loss(self) -> float:
        return float(self._task.loss(self.parameters, (), *self._task.fetch("train", self._owned))[0])


def _both(made: tuple[Run, Task], epochs: int, device: str) -> dict:
    """Microseconds per step of every epoch but the first, and the loss after the last: our sorter in the plain loop,
    the peer in the same, and our own loop."""
    run, task = made
    trainer = alone(run, task, WorkerGroup(1), torch.device(device))
    owned, steps, wait = trainer.owned[0], trainer.steps, finish_on(device)
    loops = {name: PlainLoop(run, task, owned) for name in ("ours", "peer")}
    order = trainer.members[0].sorter.order(0)
    sorters = {
        "ours": Ours(run, len(owned), trainer.flat),
        "peer": Peer(run, len(owned), trainer.flat.dim, trainer.device, order[0]),
    }
    found = {"ours_us": [], "peer_us": [], "library_us": []}
    with torch.no_grad():
        for epoch in range(epochs):
            for name, loop in loops.items():
                wait()
                start = time.perf_counter()
                loop.epoch(sorters[name])
                wait()
                found[f"{name}_us"].append((time.perf_counter() - start) / steps * 1e6)
            order, times = train_epoch(trainer, order, epoch, wait)
            found["library_us"].append(times["seconds"] / steps * 1e6)
        losses = {f"{name}_loss": loop.loss() for name, loop in loops.items()}
        loops["ours"].parameters = trainer.flat.unflatten(trainer.loop.parameters)
        losses["library_loss"] = loops["ours"].loss()
    return {key: values[1:] for key, values in found.items()} | losses
