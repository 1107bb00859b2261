"""Called by the fixture `spawned`: what several processes find, left in a folder for the tests to compare."""

import json
import os
import signal
import socket

import dropin_checks
import exchange_checks
import process_runs
import sparsify_checks
import torch.distributed as dist
from forked import forked
from sockets import listening

from cdgrab.runtime import group as workers
from cdgrab.runtime.connection import connect, disconnect, launched_rank, launched_world_size
from experiments.training.config import compose
from experiments.training.session import carry_out
from experiments.training.signals import Agreement
from scripts.bench import traffic


def main(folder):
    for processes in sorted(process_runs.PROCESSES, reverse=True):
        found, runs = folder / str(processes), process_runs.wanted(folder, processes)
        found.mkdir()
        forked(processes, check, found, [compose(overrides) for overrides in runs])


def check(folder, runs):
    """The processes stay connected throughout: to connect anew they would meet at addresses that others have left."""
    usual = workers.WHOLE  # the checks change it
    os.environ["GLOO_SOCKET_IFNAME"] = socket.if_nameindex()[-1][1]  # of the outside, where there is one
    for run in runs:
        carry_out(run)
    rank, processes = launched_rank(), launched_world_size()
    told = Agreement(lambda: signal.SIGTERM * (rank == 1), connect(processes)).after_steps()
    found = [None] * processes
    dist.all_gather_object(found, (sorted(listening(os.getpid())), told))
    (folder / "processes").write_text(json.dumps(found))
    exchange_checks.main(folder / "exchange")
    sparsify_checks.main(folder / "sparsify")
    dropin_checks.main(folder / "dropin")
    workers.WHOLE = usual
    if launched_world_size() == 2:
        traffic.main(str(folder / "traffic"), *process_runs.TRAFFIC)
    disconnect()
