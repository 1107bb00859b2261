"""The drop-in sampler in a plain DDP script: time per step next to a DistributedSampler, and what the orders gain.

Both scripts run in the same processes, epoch by epoch in turn, each with its own model and loader. The losses are those
of `examples/resumable.py` (dropout, BatchNorm, loader processes, accumulation, a gradient scaler) after equal epochs.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cdgrab import OrderedBatchSampler
from cdgrab.significance import paired_p

from .measure import summary, under_torchrun

PROCESSES, BATCH, WIDTH = 4, 32, 940  # about a million parameters
EPOCHS = {"smoke": 2, "quick": 8, "full": 30}
STEPS = {"smoke": 4, "quick": 40, "full": 40}
SEEDS = {"smoke": 2, "quick": 5, "full": 10}
TRAINED = {"smoke": 1, "quick": 10, "full": 10}  # epochs of the example


def measure(device: str, size: str) -> list[dict]:
    torch.set_num_threads(1)
    found = under_torchrun("scripts.bench.dropin", PROCESSES, (EPOCHS[size], STEPS[size]))[0]
    ratios = [ours / plain for plain, ours in zip(found["plain"], found["ours"], strict=True)]
    row = {"device": "cpu", "what": "step", "processes": PROCESSES, "dim": found["dim"]}
    row |= summary("plain_us", found["plain"]) | summary("ours_us", found["ours"]) | summary("ratio", ratios)
    print("  a step: DistributedSampler {plain_us} µs, ours {ours_us} µs, ratio {ratio}".format(**row), flush=True)
    losses = {sorter: [_trained(sorter, size, seed) for seed in range(SEEDS[size])] for sorter in ("d_rr", "cd_grab")}
    gains = [ours - random for ours, random in zip(losses["cd_grab"], losses["d_rr"], strict=True)]
    wins = sum(gain < 0 for gain in gains)
    print(f"  train loss, CD-GraB − random: {statistics.mean(gains):.4g} ± {statistics.stdev(gains):.2g}, "
          f"lower on {wins} of {len(gains)} seeds, p = {paired_p(gains):.2g}", flush=True)  # fmt: skip
    return [
        row,
        {"device": "cpu", "what": "loss", "epochs": TRAINED[size], **{f"{s}_losses": v for s, v in losses.items()}},
    ]


def _trained(sorter: str, size: str, seed: int) -> float:
    from examples import resumable

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        return resumable.main(folder, sorter, str(TRAINED[size]), str(seed))


# -- in every process --------------------------------------------------------------------------------------------------


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def epoch_of(model: nn.Module, loader: DataLoader, optimiser: torch.optim.Optimizer) -> float:
    """Microseconds per step."""
    dist.barrier()
    start = time.perf_counter()
    for inputs, labels in loader:
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimiser.step()
    dist.barrier()
    return (time.perf_counter() - start) / len(loader) * 1e6


def main(target: str, epochs: str, steps: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    examples = int(steps) * BATCH * dist.get_world_size()
    data = TensorDataset(torch.randn(examples, 64), torch.randint(10, (examples,)))
    models = [DistributedDataParallel(network()) for _ in range(2)]
    optimisers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    plain = DataLoader(data, BATCH, sampler=DistributedSampler(data), drop_last=True)
    ordered = OrderedBatchSampler(data, BATCH, drop_last=True)
    ordered.attach(models[1])
    loaders = [plain, DataLoader(data, batch_sampler=ordered)]
    found = {"plain": [], "ours": []}
    for epoch in range(int(epochs) + 1):
        for name, *parts in zip(found, models, loaders, optimisers, strict=True):
            seconds = epoch_of(*parts)
            if epoch:  # the first one warms up
                found[name].append(seconds)
    found["dim"] = sum(parameter.numel() for parameter in models[0].parameters())
    if dist.get_rank() == 0:
        Path(f"{target}0").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
