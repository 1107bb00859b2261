"""Measure what coordinated ordering costs; `make bench` runs all of it.

    python -m scripts.bench                               # everything, some minutes
    python -m scripts.bench epoch --size full             # one benchmark, measured longer
    python -m scripts.bench balance --device cuda         # rows of other devices are kept

Rows of size full go to results/bench/<name>.json, smaller ones to results/trial/bench (CDGRAB_BENCH names another
folder, where they may replace rows of the same size or a smaller one); the notebooks overhead and fig8_memory draw
them. Leave the machine alone meanwhile: <name>.meta.json tells its load.
"""

from __future__ import annotations

import sys

from cdgrab.runtime.connection import DEVICES, pick_device
from experiments.early import exit_status
from experiments.store import bench as store
from scripts.arguments import Parser
from scripts.bench import balance, delay, dropin, epoch, fleet, link, memory, peers, timeline, traffic
from scripts.bench.measure import manifest, measured

# each has `measure(device, size)`, which yields rows, and `describe(row)`, one line for people
MODULES = (balance, epoch, traffic, memory, peers, dropin, fleet, link, delay, timeline)
BENCHMARKS = {module.__name__.rpartition(".")[2]: module for module in MODULES}


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("name", nargs="?", default="all", choices=(*BENCHMARKS, "all"))
    parser.add_argument("--size", default="quick", choices=store.SIZES)
    parser.add_argument("--device", default="auto", choices=DEVICES)
    options = parser.parse_args(arguments)
    names = list(BENCHMARKS) if options.name == "all" else [options.name]
    return exit_status(lambda: run(names, options.device, options.size))


def run(names: list[str], wanted_device: str, size: str) -> None:
    device = pick_device(wanted_device).type
    for name in names:
        store.refuse_smaller(name, device, size)
    for name in names:
        print(f"{name} on {device}", flush=True)
        began, rows = manifest(device, size), []
        for row in BENCHMARKS[name].measure(device, size):
            rows.append(row)
            print(f"  {BENCHMARKS[name].describe(row)}", flush=True)
        if rows:
            print(f"  -> {store.write(name, device, rows, measured(began))}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
