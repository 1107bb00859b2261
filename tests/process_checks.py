"""Run by the fixture `spawned`: what several processes find, left in a folder for the tests to compare.

All checks of all process counts share one start of Python: the processes are forked when everything is imported, and
meet as if torchrun had started them.
"""

import multiprocessing
import os
import socket
import sys
from multiprocessing.connection import wait
from pathlib import Path

import dropin_checks
import exchange_checks
import process_runs
import sparsify_checks
import torch
import torch._dynamo  # this and the next are imported by DistributedDataParallel, in every process
import torch.distributed as dist
import torch.distributed.tensor

from cdgrab.balance import kernels
from cdgrab.runtime import group as workers
from experiments.training.config import compose
from experiments.training.session import carry_out


def main(folder):
    load_kernels()
    for processes in sorted(process_runs.PROCESSES, reverse=True):
        found, runs = folder / str(processes), process_runs.wanted(folder, processes)
        found.mkdir()
        forked(processes, found, runs)


def load_kernels():
    rows, limits = torch.zeros(1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    kernels.balance(rows, rows[0].clone(), limits)
    kernels.balance_divided(rows, rows[0].clone(), limits, lambda products: products)


def forked(processes, *arguments):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = [
        multiprocessing.get_context("fork").Process(target=check, args=(rank, processes, port, *arguments))
        for rank in range(processes)
    ]
    for rank in ranks:
        rank.start()
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)  # in torchrun's place
    running = {rank.sentinel: rank for rank in ranks}
    while running:
        for ended in wait(running):
            rank = running.pop(ended)
            rank.join()
            if rank.exitcode:  # the others would wait for it
                for other in running.values():
                    other.kill()
                sys.exit(f"a process ended with status {rank.exitcode}")
    del store


def check(rank, processes, port, folder, runs):
    """The processes stay connected throughout: to connect anew they would meet at addresses that others have left."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes}
    agent = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in (ranks | agent).items()})
    for overrides in runs:
        carry_out(compose(overrides))
    exchange_checks.main(folder / "exchange")
    sparsify_checks.main(folder / "sparsify")
    dropin_checks.main(folder / "dropin")
    workers.disconnect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
