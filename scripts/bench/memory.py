"""Peak memory of a process with CD-GraB less that with D-RR, otherwise equal runs of the LSTM, in turn.

On a CPU: the largest resident set (VmHWM) of processes with one worker each. On a GPU: the most memory that tensors
had, in such processes, which share the GPU, and in one process that hosts all workers: that one has to keep a gradient
of each of them, since a pair's first one is gone when its second one is computed. Machine code that balancing loads
(`code_bytes`: some tens of MB, whatever the model and the number of workers) is loaded by both and so not part of the
difference; freed memory goes back to the system at once, unlike in ordinary runs, so that peaks are what is needed and
not what happens to be kept.

By use, as in the paper's Figure 8: what model, optimiser and sorter hold and, with a process for each worker, the most
that every phase of a step needs beyond what is there when it begins, in an epoch of its own.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from cdgrab.balance import kernels
from cdgrab.dropin.diagnosis import held_bytes
from experiments.studies.timing import SORTERS, make_trainer, train_epoch, under_torchrun
from experiments.training.clock import PHASES, Clock
from experiments.training.config import compose
from experiments.training.loop import Trainer
from experiments.training.memory import return_freed_memory
from experiments.training.steps import CapturedSteps
from scripts.bench.measure import report, summary

WORKERS = {"smoke": (2,), "quick": (2, 4, 8), "full": (2, 4, 8)}
RUNS = {"smoke": 1, "quick": 1, "full": 5}  # each gives a number per process
STEPS = {"smoke": 4, "quick": 8, "full": 40}
EPOCHS = 2
MARK = "end of "  # of a phase, among the profiler's events
describe = (
    "{workers} workers, {processes} processes: {extra_bytes:,} bytes extra, {extra_per_parameter} floats per parameter"
).format_map


def measure(device: str, size: str) -> Iterator[dict]:
    # else the profiler reports when it starts and stops, and that it knows nothing of tensors from before
    os.environ.update(KINETO_LOG_LEVEL="99", TORCH_CPP_LOG_LEVEL="ERROR")
    load_code(device)  # compiles what is not in numba's cache yet: that needs memory too
    cells = [(count, count) for count in WORKERS[size]]
    cells += [(count, 1) for count in WORKERS[size] if device == "cuda"]
    for count, processes in cells:
        settings = ["experiment=fig3b_lstm_wiki2", "size=paper", f"workers={count}", f"device={device}"]
        settings.append(f"task.limit={STEPS[size]}")
        found: dict[str, list[dict]] = {sorter: [] for sorter in SORTERS}
        for _ in range(RUNS[size]):
            for sorter in SORTERS:
                found[sorter] += under_torchrun("scripts.bench.memory", processes, [*settings, f"sorter={sorter}"])
        yield {"device": device, "workers": count, "processes": processes} | _row(found)


def _row(found: dict[str, list[dict]]) -> dict:
    """Medians over processes and runs."""
    peaks = {sorter: [one["peak"] for one in found[sorter]] for sorter in SORTERS}
    dim = found["d_rr"][0]["dim"]
    without = statistics.median(peaks["d_rr"])
    extra = summary("extra_bytes", [float(peak - without) for peak in peaks["cd_grab"]])
    return {key: _whole(value) for key, value in extra.items()} | {
        "dim": dim,
        "extra_per_parameter": round(extra["extra_bytes"] / 4 / dim, 2),
        "d_rr_bytes": round(without),
        "cd_grab_bytes": round(statistics.median(peaks["cd_grab"])),
        "code_bytes": round(statistics.median(one["code"] for some in found.values() for one in some)),
        "measured": len(peaks["d_rr"]),
        **{f"{sorter}_uses": _medians([one["uses"] for one in found[sorter]]) for sorter in SORTERS},
    }


def _medians(uses: list[dict[str, int]]) -> dict[str, int]:
    return {use: round(statistics.median(some[use] for some in uses)) for use in uses[0]}


def _whole(value: float | list[float]) -> int | list[int]:
    return [round(one) for one in value] if isinstance(value, list) else round(value)


# -- in every process --------------------------------------------------------------------------------------------------


def peak() -> int:
    """Bytes, of this process so far."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    return resident("VmHWM")


def load_code(device: str) -> int:
    """Balance a few numbers in every way that a run may choose. Returns by how many bytes the process has grown."""
    before = resident("VmRSS")
    for count, width in ((1, 8), (4, 600)):
        rows = torch.ones(2, count, width, device=device)
        running, limits = (
            torch.zeros(size, dtype=torch.float64, device=device) for size in ((1, width), rows.shape[:2])
        )
        kernels.balance(rows, running, limits)
        kernels.balance_divided(rows, running, limits)
    if device == "cpu" and (compiled := kernels.optional("cpu")):  # what the drop-in sampler uses besides
        compiled.mean_of_rows(torch.ones(4, 8), torch.empty(8))
        part = [(0, 8, 0)]
        kernels.optional("shared").average_and_take(torch.ones(4, 8).unbind(), part, torch.ones(4, 8))
        compiled.add_to_sketches(torch.zeros(1, 8), torch.zeros(4, dtype=torch.int16), torch.ones(1, 4))
    return resident("VmRSS") - before


def resident(entry: str) -> int:
    """Bytes of this process now (VmRSS), or at most so far (VmHWM)."""
    return _counted("/proc/self/status")[entry]


def own_and_shared(process: int) -> tuple[int, int]:
    """Bytes without those of files: the process's own, and its part of those that several have in common."""
    found = _counted(f"/proc/{process}/smaps_rollup")
    return found["Pss_Anon"], found["Pss_Shmem"]


def _counted(file: str) -> dict[str, int]:
    """Bytes, of entries in kB."""
    lines = map(str.split, Path(file).read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[2:] == ["kB"]}


class GpuUses(Clock):
    """A clock that looks at the GPU's memory, too. `most`: by phase, the most bytes that it needed beyond those that
    were there when it began."""

    def __init__(self) -> None:
        super().__init__()
        self.most = dict.fromkeys(PHASES, 0)
        self._begin()

    def append(self, mark: tuple[str, float]) -> None:
        super().append(mark)
        self.most[mark[0]] = max(self.most[mark[0]], torch.cuda.max_memory_allocated() - self._there)
        self._begin()

    def _begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._there = torch.cuda.memory_allocated()


class CpuUses(Clock):
    """The same on a CPU, from the tensors that PyTorch's profiler sees come and go. Their bytes are counted, whether or
    not they are ever written to."""

    def __init__(self) -> None:
        super().__init__()
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profiler.start()

    def append(self, mark: tuple[str, float]) -> None:
        super().append(mark)
        with record_function(MARK + mark[0]):
            pass

    @property
    def most(self) -> dict[str, int]:
        self._profiler.stop()
        events = sorted(self._profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        found, live, there, highest = dict.fromkeys(PHASES, 0), 0, 0, 0
        for event in events:
            if event.name() == "[memory]":
                live += event.nbytes()
                highest = max(highest, live)
            elif event.name().startswith(MARK):
                phase = event.name().removeprefix(MARK)
                found[phase] = max(found[phase], highest - there)
                there = highest = live
        return found


def uses(trainer: Trainer, order: Tensor) -> dict[str, int]:
    """Bytes by use. Of captured steps no phases are known: they have all their memory from the beginning."""
    loop = trainer.loop
    held = {"model": loop.parameters.nbytes, "optimiser": sum(state.nbytes for state in loop.optimiser.state)}
    if isinstance(loop, CapturedSteps):
        return held
    clock = GpuUses() if trainer.device.type == "cuda" else CpuUses()
    train_epoch(trainer, order, EPOCHS, clock=clock)
    most = clock.most
    held |= {"ordering": held_bytes([member.sorter for member in trainer.members])}
    return {use: held.get(use, 0) + most.get(use, 0) for use in (*held, "gradients", "communication")}


def main(target: str, *settings: str) -> None:
    """Trains, without evaluation: what that needs is the same for all sorters and might hide the difference."""
    return_freed_memory()
    run = compose(list(settings))
    code = load_code(run.config.device)
    trainer = make_trainer(run)
    order = trainer.members[0].sorter.order(0)
    with torch.no_grad():
        for epoch in range(EPOCHS):
            order, _ = train_epoch(trainer, order, epoch)
        found = {"peak": peak(), "dim": trainer.flat.dim, "code": code}
        report(target, found | {"uses": uses(trainer, order)})


if __name__ == "__main__":
    main(*sys.argv[1:])
