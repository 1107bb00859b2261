"""The drop-in sampler in a plain DDP script: time per step next to a DistributedSampler, and what the orders gain.

Both scripts run in the same processes, epoch by epoch in turn, each with its own model and loader. There are two models
of about a million parameters: a convolutional network, and one of linear layers only, which computes as little per
parameter as any model does, so that communication and ordering are most of its step. The losses are those of
`examples/resumable.py` (dropout, BatchNorm, loader processes, accumulation, a gradient scaler) after equal epochs;
random reshuffling visits the same fixed batches in random order.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cdgrab import OrderedBatchSampler
from experiments.report.statistics import paired_p
from experiments.studies.timing import under_torchrun
from scripts.bench.measure import report, summary

PROCESSES, BATCH = 4, 32
EPOCHS = {"smoke": 2, "quick": 20, "full": 30}
STEPS = {"linear": {"smoke": 4, "quick": 40, "full": 40}, "convolutional": {"smoke": 2, "quick": 10, "full": 20}}
SEEDS = {"smoke": 2, "quick": 5, "full": 10}
TRAINED = {"smoke": 1, "quick": 20, "full": 20}  # epochs of the example
STEP = "a step, {network} network: DistributedSampler {plain_us} µs, ours {ours_us} µs, ratio {ratio}"


def measure(device: str, size: str) -> Iterator[dict]:
    torch.set_num_threads(1)
    yield from (_steps(network, size) for network in STEPS)
    losses = {f"{s}_losses": [_trained(s, size, seed) for seed in range(SEEDS[size])] for s in ("d_rr", "cd_grab")}
    yield {"device": "cpu", "what": "loss", "epochs": TRAINED[size], **losses}


def describe(row: dict) -> str:
    if row["what"] == "step":
        return STEP.format_map(row)
    gains = [ours - random for ours, random in zip(row["cd_grab_losses"], row["d_rr_losses"], strict=True)]
    gain = f"train loss, CD-GraB − random: {statistics.mean(gains):.4g} ± {statistics.stdev(gains):.2g}"
    wins = sum(gain < 0 for gain in gains)
    return f"{gain}, lower on {wins} of {len(gains)} seeds, p = {paired_p(gains):.2g}"


def _steps(network: str, size: str) -> dict:
    found = under_torchrun("scripts.bench.dropin", PROCESSES, (network, EPOCHS[size], STEPS[network][size]))[0]
    ratios = [ours / plain for plain, ours in zip(found["plain"], found["ours"], strict=True)]
    row = {"device": "cpu", "what": "step", "network": network, "processes": PROCESSES, "dim": found["dim"]}
    return row | summary("plain_us", found["plain"]) | summary("ours_us", found["ours"]) | summary("ratio", ratios)


def _trained(sorter: str, size: str, seed: int) -> float:
    from examples import resumable

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        return resumable.main(folder, sorter, str(TRAINED[size]), str(seed))


# -- in every process --------------------------------------------------------------------------------------------------


def make_network(name: str) -> nn.Module:
    """For images [1, 8, 8]; a little below a million parameters."""
    if name == "linear":
        layers = (nn.Linear(64, 940), nn.ReLU(), nn.Linear(940, 940), nn.ReLU(), nn.Linear(940, 10))
        return nn.Sequential(nn.Flatten(), *layers)
    return nn.Sequential(
        *(nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 256, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)),
    )


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


def main(target: str, network: str, epochs: str, steps: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    examples = int(steps) * BATCH * dist.get_world_size()
    data = TensorDataset(torch.randn(examples, 1, 8, 8), torch.randint(10, (examples,)))
    models = [DistributedDataParallel(make_network(network)) for _ in range(2)]
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
    report(target, found | {"dim": sum(parameter.numel() for parameter in models[0].parameters())})


if __name__ == "__main__":
    main(*sys.argv[1:])
