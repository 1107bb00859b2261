"""Processes that share one start of Python: forked when everything is imported, they meet as if started by torchrun."""

import os
import socket

import torch._dynamo  # this and the next are imported by DistributedDataParallel, in every process
import torch.distributed as dist
import torch.distributed.tensor  # noqa: F401
from torch.multiprocessing import start_processes


def forked(processes, work, *arguments):
    """Call work(*arguments) in every process; if one fails, the others are ended and its traceback is raised."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    every = (processes, port, work, arguments)
    running = start_processes(_rank, every, processes, join=False, start_method="fork")
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)  # that of torchrun's agent
    while not running.join():
        pass
    del store


def _rank(rank, processes, port, work, arguments):
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    agent = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in (ranks | agent | {"TORCHELASTIC_RUN_ID": port}).items()})
    work(*arguments)
