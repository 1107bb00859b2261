"""A training script as people write them, with the drop-in sampler: alone, with DDP or with FSDP2. Started again after
a kill, it goes on from its last checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # optimisers import it when they are made: once is enough
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from cdgrab import OrderedBatchSampler

WRAPPERS = {"alone": lambda model: model, "DDP": DistributedDataParallel, "FSDP2": fully_shard}
CHECKPOINT, DONE = "checkpoint.pt", "done.pt"
EXAMPLES, BATCH, EPOCHS = 96, 3, 10
WHOLE = StateDictOptions(full_state_dict=True)
TIMEOUT = timedelta(seconds=20)


def train(folder: Path, wrapper: str, sorter: str, seed: int, every: int, ahead: bool, **sparsifier: object) -> int:
    """every: steps between two checkpoints; ahead: whether the next batch is fetched before one is used; sparsifier:
    options of `attach`."""
    if wrapper != "alone":
        dist.init_process_group("gloo", timeout=TIMEOUT)
    torch.manual_seed(seed)
    data = TensorDataset(torch.randn(EXAMPLES, 8), torch.randn(EXAMPLES, 1))
    model = WRAPPERS[wrapper](nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 1)))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sampler, done = OrderedBatchSampler(data, BATCH, sorter=sorter, seed=seed).attach(model, **sparsifier), 0
    folder.mkdir(exist_ok=True)
    if (folder / CHECKPOINT).exists():
        saved = torch.load(folder / CHECKPOINT, weights_only=True)
        weights, momenta = saved["model"], saved["optimiser"]
        set_state_dict(model, optimiser, model_state_dict=weights, optim_state_dict=momenta, options=WHOLE)
        sampler.load_state_dict(saved["sampler"])
        done = saved["done"]

    def save(name: str) -> None:
        weights, momenta = get_state_dict(model, optimiser, options=WHOLE)
        state = {"model": weights, "optimiser": momenta, "sampler": sampler.state_dict(), "done": done}
        if os.environ.get("RANK", "0") == "0":
            torch.save(state, folder / "new")
            os.replace(folder / "new", folder / name)

    loader = DataLoader(data, batch_sampler=sampler)
    while done < EPOCHS * len(sampler):
        for features, targets in one_ahead(loader) if ahead else loader:
            optimiser.zero_grad()
            nn.functional.mse_loss(model(features), targets).backward()
            optimiser.step()
            done += 1
            if done % every == 0:
                save(CHECKPOINT)
    save(DONE)
    if wrapper != "alone":
        dist.destroy_process_group()
    return 0


def one_ahead(loader: Iterable) -> Iterator:
    ready = None
    for batch in loader:
        if ready:
            yield ready
        ready = batch
    if ready:
        yield ready
