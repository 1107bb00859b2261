"""The drop-in sampler in a plain training script: time per step next to an ordinary sampler, memory, and what the
orders gain.

Both scripts run in the same processes, epoch by epoch in turn, each with its own model and loader; for the memory, each
runs by itself. On a CPU there are two models of about a million parameters in 4 processes with DDP: a convolutional
network, and one of linear layers only, which computes as little per parameter as any model does, so that communication
and ordering are most of its step; a larger one of linear layers runs in one process. On a GPU there are models of all
sizes, in one process. The losses are those of `examples/resumable.py` (dropout, BatchNorm, loader processes,
accumulation, a gradient scaler) after equal epochs; random reshuffling visits the same fixed batches in random order.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from cdgrab import OrderedBatchSampler
from experiments.report.statistics import paired_p
from experiments.studies.timing import finish_on, under_torchrun
from experiments.training.memory import return_freed_memory
from scripts.bench.measure import report, summary
from scripts.bench.memory import load_code, peak
from scripts.bench.models import MODELS, Trained

CASES = {  # model and number of processes
    "cpu": [("linear", 4), ("convolutional", 4), ("mlp", 1)],
    "cuda": [(name, 1) for name in ("gpt2", "resnet50", "resnet18, batch 128", "resnet18, batch 32", "mlp")],
}
EPOCHS = {"smoke": 2, "quick": 20, "full": 30}
STEPS = {"smoke": 4, "quick": 20, "full": 40}  # a quarter of them for a convolutional network on a CPU
SEEDS = {"smoke": 2, "quick": 5, "full": 10}
TRAINED = {"smoke": 1, "quick": 20, "full": 20}  # epochs of the example
STEP = (
    "a step of {model}, {processes} processes: ordinary sampler {plain_us} µs, ours {ours_us} µs, ratio {ratio}, "
    "{floats_per_parameter} floats per parameter more"
)


def measure(device: str, size: str) -> Iterator[dict]:
    torch.set_num_threads(1)
    yield from (_steps(model, processes, device, size) for model, processes in CASES[device])
    if device == "cpu":
        losses = {f"{s}_losses": [_trained(s, size, seed) for seed in range(SEEDS[size])] for s in ("d_rr", "cd_grab")}
        yield {"device": "cpu", "what": "loss", "epochs": TRAINED[size], **losses}


def describe(row: dict) -> str:
    if row["what"] == "step":
        return STEP.format_map(row)
    gains = [ours - random for ours, random in zip(row["cd_grab_losses"], row["d_rr_losses"], strict=True)]
    gain = f"train loss, CD-GraB − random: {statistics.mean(gains):.4g} ± {statistics.stdev(gains):.2g}"
    wins = sum(gain < 0 for gain in gains)
    return f"{gain}, lower on {wins} of {len(gains)} seeds, p = {paired_p(gains):.2g}"


def _steps(model: str, processes: int, device: str, size: str) -> dict:
    steps = STEPS[size] // 4 if model == "convolutional" and size != "smoke" else STEPS[size]

    def run(scripts: str, epochs: int) -> list[dict]:
        return under_torchrun("scripts.bench.dropin", processes, (scripts, model, device, epochs, steps))

    found = run("plain,ours", EPOCHS[size])[0]
    peaks = {script: statistics.mean(one["peak"] for one in run(script, 1)) for script in ("plain", "ours")}
    ratios = [ours / plain for plain, ours in zip(found["plain"], found["ours"], strict=True)]
    row = {"device": device, "what": "step", "model": model, "processes": processes, "dim": found["dim"]}
    row |= summary("plain_us", found["plain"]) | summary("ours_us", found["ours"]) | summary("ratio", ratios)
    return row | {"floats_per_parameter": round((peaks["ours"] - peaks["plain"]) / 4 / found["dim"], 2)}


def _trained(sorter: str, size: str, seed: int) -> float:
    from examples import resumable

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        return resumable.main(folder, sorter, str(TRAINED[size]), str(seed))


# -- in every process --------------------------------------------------------------------------------------------------


def script(trained: Trained, device: str, steps: int, ordered: bool) -> tuple[Callable[[], None], int]:
    """A function that trains for one epoch, and the number of parameters."""
    torch.manual_seed(0)
    parallel = dist.get_world_size() > 1
    data = trained.examples(steps * trained.batch * dist.get_world_size(), device)
    model = trained.make().to(device)
    model = DistributedDataParallel(model) if parallel else model
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    if ordered:
        sampler = OrderedBatchSampler(data, trained.batch, drop_last=True)
        loading = {"batch_sampler": sampler}
        sampler.attach(model)
    else:
        order = {"sampler": DistributedSampler(data)} if parallel else {"shuffle": True}
        loading = {"batch_size": trained.batch, "drop_last": True, **order}
    loader = DataLoader(data, collate_fn=lambda batch: batch, **loading)

    def epoch() -> None:
        for inputs, labels in loader:
            optimiser.zero_grad()
            trained.loss(model, inputs, labels).backward()
            optimiser.step()

    return epoch, sum(parameter.numel() for parameter in model.parameters())


def main(target: str, scripts: str, name: str, device: str, epochs: str, steps: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    wait, alone = finish_on(device), "," not in scripts
    if alone:
        return_freed_memory()
        load_code(device)
    made = {each: script(MODELS[name], device, int(steps), each == "ours") for each in scripts.split(",")}
    found: dict = {each: [] for each in made}
    for epoch in range(int(epochs) + 1):
        for each, (train, _) in made.items():
            dist.barrier()
            start = time.perf_counter()
            train()
            wait()
            dist.barrier()
            if epoch:  # the first one warms up
                found[each].append((time.perf_counter() - start) / int(steps) * 1e6)
    report(target, found | {"dim": next(iter(made.values()))[1], "peak": peak()})


if __name__ == "__main__":
    main(*sys.argv[1:])
