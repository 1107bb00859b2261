"""The drop-in sampler in a plain training script: time per step next to an ordinary sampler, memory, and what the
orders gain.

Both scripts run in the same processes, epoch by epoch in turn, each with its own model and loader; for the memory, each
runs by itself. On a CPU there are two models of about a million parameters in 4 processes with DDP: a convolutional
network, and one of linear layers only, which computes as little per parameter as any model does, so that communication
and ordering are most of its step; once more with links of 1 Gbit/s between the processes, each in a network namespace
of its own (needs root). A larger one of linear layers runs in one process. On a GPU there are models of all sizes, in
one process, and one in 4 processes that share the GPU. The losses are those of `examples/resumable.py` (dropout,
BatchNorm, loader processes, accumulation, a gradient scaler) after equal epochs; random reshuffling visits the same
fixed batches in random order.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import operator
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from cdgrab import CdgrabError, OrderedBatchSampler
from cdgrab.runtime.connection import launched_rank
from experiments.report.statistics import paired_p
from experiments.studies.timing import finish_on, under_torchrun
from experiments.training.memory import return_freed_memory
from scripts.bench import hosts
from scripts.bench.measure import report, summary
from scripts.bench.memory import load_code, own_and_shared
from scripts.bench.models import MODELS, TINY, Trained


@dataclass(frozen=True)
class Case:
    """gigabits: per second, of each process's link to the others; 0: no limit; congestion: how TCP avoids it there."""

    model: str
    processes: int = 1
    sketch: str = "none"
    gigabits: float = 0.0
    congestion: str = ""


CASES = {
    "cpu": [
        *(Case("linear", 4), Case("convolutional", 4), Case("mlp", 4), Case("mlp"), Case("mlp", sketch="countsketch")),
        *(
            Case(model, 4, gigabits=1.0, congestion=congestion)
            for congestion in ("cubic", "bbr")  # what Linux does, and what it is often told to do
            for model in ("linear", "convolutional", "mlp")
        ),
    ],
    "cuda": [
        *(Case("gpt2"), Case("resnet50"), Case("resnet18, batch 128"), Case("resnet18, batch 32"), Case("mlp")),
        *(Case("mlp", sketch="countsketch"), Case("mlp", 4)),
    ],
}
EPOCHS = {"smoke": 2, "quick": 20, "full": 30}  # at most, and
SECONDS = {"smoke": 2, "quick": 12, "full": 60}  # for both scripts together, but at least
FEWEST = {"smoke": 2, "quick": 8, "full": 12}
# Processes, one after the other, where the host decides how long a step on a GPU takes: each may be some percent slower
# for one of the two scripts as long as it lives.
RUNS = {"smoke": 1, "quick": 1, "full": 3}
STEPS = {"smoke": 4, "quick": 20, "full": 40}  # divided by
SLOWER = {"convolutional": 4, "gpt2": 2, "resnet50": 2}
LOOKS = {"smoke": 1, "quick": 1, "full": 3}  # at the memory of each script, of which the median counts
SEEDS = {"smoke": 2, "quick": 5, "full": 10}
TRAINED = {"smoke": 1, "quick": 20, "full": 20}  # epochs of the example
SCRIPTS = ("plain", "ours")
STEP = (
    "a step of {model}, {processes} processes{how}: ordinary sampler {plain_us} µs, ours {ours_us} µs, ratio {ratio}, "
    "{floats_per_parameter} floats per parameter more"
)


def measure(device: str, size: str) -> Iterator[dict]:
    torch.set_num_threads(1)
    yield from (_steps(case, device, size) for case in CASES[device])
    if device == "cpu":
        losses = {f"{s}_losses": [_trained(s, size, seed) for seed in range(SEEDS[size])] for s in ("d_rr", "cd_grab")}
        yield {"device": "cpu", "what": "loss", "epochs": TRAINED[size], **losses}


def describe(row: dict) -> str:
    if row["what"] == "step":
        how = f", sketch={row['sketch']}" if "sketch" in row else ""
        how += f", links of {row['gigabits']:g} Gbit/s, {row['congestion']}" if "gigabits" in row else ""
        if "skipped" in row:
            return f"a step of {row['model']}, {row['processes']} processes{how}: skipped, {row['skipped']}"
        return STEP.format(**row, how=how)
    gains = [ours - random for ours, random in zip(row["cd_grab_losses"], row["d_rr_losses"], strict=True)]
    gain = f"train loss, CD-GraB − random: {statistics.mean(gains):.4g} ± {statistics.stdev(gains):.2g}"
    wins = sum(gain < 0 for gain in gains)
    return f"{gain}, lower on {wins} of {len(gains)} seeds, p = {paired_p(gains):.2g}"


def _steps(case: Case, device: str, size: str) -> dict:
    row = {"device": device, "what": "step", "model": case.model, "processes": case.processes}
    row |= {"sketch": case.sketch} if case.sketch != "none" else {}
    row |= {"gigabits": case.gigabits, "congestion": case.congestion} if case.gigabits else {}
    if case.gigabits and (reason := hosts.why_not(0.0, case.congestion)):
        return row | {"skipped": reason}
    steps = max(STEPS["smoke"], STEPS[size] // SLOWER.get(case.model, 1))
    limits = (steps, FEWEST[size], EPOCHS[size], SECONDS[size])
    runs = RUNS[size] if device == "cuda" and case.processes == 1 else 1
    try:
        every = [_in_processes(case, device, limits, LOOKS[size]) for _ in range(runs)]
    except CdgrabError as error:
        if device == "cpu" or case.processes == 1:
            raise
        return row | {"skipped": str(error)}  # not every backend exchanges what is on a GPU
    times = {script: [microseconds for run in every for microseconds in run[0][script]] for script in SCRIPTS}
    looks = [one["peaks"] for run in every for one in run if one["peaks"]]
    peaks = {script: statistics.mean(look[script] for look in looks) for script in SCRIPTS}
    ratios = [ours / plain for plain, ours in zip(times["plain"], times["ours"], strict=True)]
    dim = every[0][0]["dim"]
    row |= {"dim": dim} | summary("plain_us", times["plain"]) | summary("ours_us", times["ours"])
    extra = round((peaks["ours"] - peaks["plain"]) / 4 / dim, 2)
    return row | summary("ratio", ratios) | {"floats_per_parameter": extra}


def _in_processes(case: Case, device: str, limits: tuple, looks: int) -> list[dict]:
    """What each process finds. On a CPU only new processes tell the memory of each script by itself."""
    linked = hosts.hosts(case.processes, case.gigabits * 1e9, congestion=case.congestion)
    with linked if case.gigabits else contextlib.nullcontext():
        start = hosts.run_on_hosts if case.gigabits else under_torchrun

        def run(scripts: tuple[str, ...], *limits: object) -> list[dict]:
            arguments = (",".join(scripts), case.model, device, case.sketch, *limits)
            return start("scripts.bench.dropin", case.processes, arguments)

        every = run(SCRIPTS, *limits)
        # where torch has this allocator: as `return_freed_memory`, and pages of 4 KB instead of 2 MB
        with mock.patch.dict(os.environ, MIMALLOC_PURGE_DELAY="0", MIMALLOC_ALLOW_THP="0"):
            for script in SCRIPTS if device == "cpu" else ():
                peaks = [run((script,), limits[0], 1, 1, 0)[0]["peaks"][script] for _ in range(looks)]
                every[0]["peaks"][script] = statistics.median(peaks)
        return every


def _trained(sorter: str, size: str, seed: int) -> float:
    from examples import resumable

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        return resumable.main(folder, sorter, str(TRAINED[size]), str(seed))


# -- in every process --------------------------------------------------------------------------------------------------


def _processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def script(trained: Trained, device: str, steps: int, ordered: bool, sketch: str) -> tuple[Callable[[], None], int]:
    """A function that trains for one epoch, and the number of parameters."""
    torch.manual_seed(0)
    parallel = _processes() > 1
    data = trained.examples(steps * trained.batch * _processes(), device)
    model = trained.make().to(device)
    model = DistributedDataParallel(model) if parallel else model
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    if ordered:
        sampler = OrderedBatchSampler(data, trained.batch, drop_last=True, sketch=sketch)
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


def _measured(
    scripts: tuple[str, ...], name: str, device: str, sketch: str, steps: int, fewest: int, most: int, seconds: float
) -> dict:
    """Microseconds per step by script and epoch, and peaks of memory, each script by itself: on a CPU if there is only
    one."""
    wait = finish_on(device)

    def make(each: str) -> tuple[Callable[[], None], int]:
        return script(MODELS[name], device, steps, each == "ours", sketch)

    if device == "cuda":  # libraries keep memory of their own from their first call on
        script(TINY, device, 4, False, sketch)[0]()
    peaks = {each: _peak_alone(make, each) for each in scripts if device == "cuda"}
    memory = _memory() if device == "cpu" and len(scripts) == 1 else None
    made = {each: make(each) for each in scripts}
    times: dict[str, list[float]] = {each: [] for each in scripts}
    epochs = 2  # the first one warms up, the second one tells how many there will be
    for epoch in itertools.count(1):
        for each in scripts[::-1] if epoch % 2 else scripts:  # each comes first in turn
            train, _ = made[each]
            _meet()
            start = time.perf_counter()
            train()
            wait()
            _meet()
            times[each].append((time.perf_counter() - start) / steps * 1e6)
        if epoch == 2:
            together = sum(some[1] for some in times.values()) * steps / 1e6
            epochs = 1 + _of_first_process(max(fewest, min(most, int(seconds / together))))
        if epoch == epochs:
            break
    if memory:
        peaks = {scripts[0]: memory.stop()}
    _meet()  # no process has ended before
    return {each: some[1:] for each, some in times.items()} | {"dim": made[scripts[0]][1], "peaks": peaks}


class Memory(threading.Thread):
    """Looks again and again how much memory each of these processes has, apart from files. Their largest resident sets
    would count pages of libraries, too, which come and go: sometimes more than there are gradients. What they share
    belongs to all of them alike. Each has its own peak: which of them come at the same time is up to the system."""

    def __init__(self, processes: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self._processes = processes
        self._most = [0] * len(processes)
        self._before = self._there()
        self._stopped = threading.Event()
        self.start()

    def _there(self) -> list[int]:
        own, shared = zip(*map(own_and_shared, self._processes), strict=True)
        return [some + sum(shared) // len(shared) for some in own]

    def run(self) -> None:
        stopped = False
        while not stopped:  # and once more then: this thread may not have had a turn
            stopped = self._stopped.wait(1e-3)
            extra = map(operator.sub, self._there(), self._before)
            self._most = list(map(max, self._most, extra))

    def stop(self) -> float:
        """The most bytes of a process, beyond those when this began: the mean over all of them."""
        self._stopped.set()
        self.join()
        return statistics.mean(self._most)


def _memory() -> Memory | None:
    """The first process looks at all."""
    every: list[int] = [os.getpid()] * _processes()
    if dist.is_initialized():
        dist.all_gather_object(every, os.getpid())
    memory = Memory(every) if launched_rank() == 0 else None
    _meet()
    return memory


def _peak_alone(make: Callable[[str], tuple[Callable[[], None], int]], each: str) -> int:
    """Bytes that this script needs on a GPU, as asked for: large pieces of memory are rounded up to 2 MB, or not, as it
    happens."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    train, _ = make(each)
    for _ in range(2):
        train()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def _of_first_process(count: int) -> int:
    agreed = torch.tensor([count])
    if dist.is_initialized():
        dist.broadcast(agreed, 0)
    return int(agreed)


def main(target: str, scripts: str, name: str, device: str, sketch: str, *limits: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if "," not in scripts:
        return_freed_memory()
        load_code(device)
        script(TINY, device, 4, scripts == "ours", sketch)[0]()  # loads the rest, which is larger
    steps, fewest, most = map(int, limits[:3])
    found = _measured(tuple(scripts.split(",")), name, device, sketch, steps, fewest, most, float(limits[3]))
    report(target, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
