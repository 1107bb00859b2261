"""Measure what coordinated ordering costs; `make bench` runs all of it.

    python -m scripts.bench                               # everything, some minutes
    python -m scripts.bench epoch --size full             # one benchmark, measured longer
    python -m scripts.bench balance --device cuda         # rows of other devices are kept

Rows go to results/bench/<name>.json (CDGRAB_BENCH names another folder), the notebooks overhead and fig8_memory draw
them. Leave the machine alone meanwhile: <name>.meta.json tells its load.
"""

from __future__ import annotations

import argparse
import sys

from cdgrab.errors import CdgrabError
from cdgrab.runtime.group import DEVICES, pick_device
from experiments.store import bench as store
from scripts.arguments import Parser
from scripts.bench import balance, dropin, epoch, memory, peers, traffic
from scripts.bench.measure import SIZES, manifest, measured

BENCHMARKS = {
    "balance": balance.measure,
    "epoch": epoch.measure,
    "traffic": traffic.measure,
    "memory": memory.measure,
    "peers": peers.measure,
    "dropin": dropin.measure,
}


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        device = pick_device(options.device).type
        for name in BENCHMARKS if options.name == "all" else [options.name]:
            print(f"{name} on {device}", flush=True)
            began, rows = manifest(device, options.size), BENCHMARKS[name](device, options.size)
            if rows:
                print(f"  -> {store.write(name, device, rows, measured(began))}", flush=True)
    except CdgrabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("name", nargs="?", default="all", choices=(*BENCHMARKS, "all"))
    parser.add_argument("--size", default="quick", choices=SIZES)
    parser.add_argument("--device", default="auto", choices=DEVICES)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
