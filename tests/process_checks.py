"""Run by the fixture `spawned`: what several processes find, left in a folder for the tests to compare."""

import sys
from pathlib import Path

import dropin_checks
import exchange_checks
import process_runs
import sparsify_checks
import torch
from forked import forked

from cdgrab.balance import kernels
from cdgrab.runtime import group as workers
from experiments.training.config import compose
from experiments.training.session import carry_out


def main(folder):
    load_kernels()
    for processes in sorted(process_runs.PROCESSES, reverse=True):
        found, runs = folder / str(processes), process_runs.wanted(folder, processes)
        found.mkdir()
        forked(processes, check, found, [compose(overrides) for overrides in runs])


def load_kernels():
    """Once, compiled if need be, instead of in every process."""
    sums, limits = torch.zeros(3, 1, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        for dim in (1, kernels.cpu.LONG):
            rows, running = torch.zeros(1, 3, dim, dtype=dtype), torch.zeros(1, dim, dtype=torch.float64)
            kernels.balance(rows, running, limits)
            kernels.balance_divided(rows, running, limits, lambda products: products)
    kernels.balance_centred(sums[None], sums, sums, sums, limits)
    kernels.balance_kh(sums[None], sums, sums[:, 0], limits[0, :1], limits)


def check(folder, runs):
    """The processes stay connected throughout: to connect anew they would meet at addresses that others have left."""
    for run in runs:
        carry_out(run)
    exchange_checks.main(folder / "exchange")
    sparsify_checks.main(folder / "sparsify")
    dropin_checks.main(folder / "dropin")
    workers.disconnect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
