"""Peak memory of a process with CD-GraB less that with D-RR, otherwise equal runs of the LSTM, one after the other.

On a CPU: the largest resident set (VmHWM) of processes with one worker each. On a GPU: the most memory that tensors
had, in one process that hosts all workers.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import torch

from cdgrab import workers
from cdgrab.config import compose
from cdgrab.memory import keep_freed_memory

from .epoch import make_trainer, train_epoch
from .measure import summary, under_torchrun

WORKERS = {"smoke": (2,), "quick": (2, 4, 8), "full": (2, 4, 8)}
RUNS = {"smoke": 1, "quick": 2, "full": 5}
STEPS = {"smoke": 4, "quick": 16, "full": 40}
EPOCHS = 2
SORTERS = ("d_rr", "cd_grab")


def measure(device: str, size: str) -> list[dict]:
    rows = []
    for count in WORKERS[size]:
        processes = count if device == "cpu" else 1
        settings = ["experiment=fig3b_lstm_wiki2", "size=paper", f"workers={count}", f"device={device}"]
        settings.append(f"task.limit={STEPS[size]}")
        found: dict[str, list[dict]] = {sorter: [] for sorter in SORTERS}
        for repeat in range(RUNS[size] + (size != "smoke" and not rows)):
            for sorter in SORTERS:
                peaks = under_torchrun("scripts.bench.memory", processes, [*settings, f"sorter={sorter}"])
                if repeat or rows or size == "smoke":  # the very first runs may still compile kernels for the disk
                    found[sorter] += peaks
        rows.append({"device": device, "workers": count, "processes": processes} | _row(found))
        print("  {workers} workers on {processes} processes: {extra_bytes:,} bytes extra, {extra_per_parameter} floats "
              "per parameter".format(**rows[-1]), flush=True)  # fmt: skip
    return rows


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
        "runs": len(peaks["d_rr"]),
    }


def _whole(value: float | list[float]) -> int | list[int]:
    return [round(one) for one in value] if isinstance(value, list) else round(value)


# -- in every process --------------------------------------------------------------------------------------------------


def peak() -> int:
    """Bytes, of this process so far."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main(target: str, *settings: str) -> None:
    """Trains, without evaluation: what that needs is the same for all sorters and might hide the difference."""
    keep_freed_memory()
    trainer = make_trainer(compose(list(settings)))
    order = trainer.sorter.order(0)
    with torch.no_grad():
        for epoch in range(EPOCHS):
            order, _ = train_epoch(trainer, order, epoch)
    found = {"peak": peak(), "dim": trainer.flat.dim}
    Path(f"{target}{trainer.group.rank}").write_text(json.dumps(found))
    workers.disconnect()


if __name__ == "__main__":
    main(*sys.argv[1:])
