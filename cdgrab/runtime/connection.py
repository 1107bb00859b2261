"""Which processes there are: those that torchrun started, or those that a script has connected already."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from cdgrab.errors import CdgrabError
from cdgrab.runtime.group import WorkerGroup, cpu_backend
from cdgrab.runtime.rendezvous import meet

DEVICES = ("auto", "cpu", "cuda")


def launched_rank() -> int:
    """This process's rank, from torchrun; 0 outside torchrun."""
    return int(os.environ.get("RANK", 0))


def launched_world_size() -> int:
    """The number of processes, from torchrun; 1 outside torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


def pick_device(wanted: str = "auto") -> torch.device:
    """auto: a GPU if there is one. If there are fewer GPUs than ranks, ranks share them in turn."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise CdgrabError("device=cuda was asked for, but no GPU is available here; use device=cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def connect(workers: int, timeout: float | None = None) -> WorkerGroup:
    """Join the processes that torchrun started, if any, and divide the workers among them. A collective that takes
    longer than `timeout` seconds fails.

    Always gloo: it handles CPU and GPU tensors, and several ranks on one GPU, which NCCL refuses.
    """
    # made first, so that a bad split is refused before anything connects
    group = WorkerGroup(workers, launched_rank(), launched_world_size(), timeout=timeout)
    if group.world_size > 1 and not dist.is_initialized():
        meet(group.rank, group.world_size, timeout)
    return group


def one_worker_per_process(channel: object = None) -> WorkerGroup:
    """The processes that are already connected, each hosting one worker. channel: a process group of some of them."""
    if not (dist.is_available() and dist.is_initialized()):
        if (processes := launched_world_size()) > 1:
            first = "call init_process_group of torch.distributed first (Accelerator() and Fabric's launch() do)"
            raise CdgrabError(f"{processes} processes are not connected: {first}")
        return WorkerGroup(1)
    processes = dist.get_world_size(channel)
    return WorkerGroup(processes, dist.get_rank(channel), processes, channel=channel, timeout=_patience(channel))


def _patience(channel: object) -> float | None:
    """The seconds that the processes gave their collectives; None if torch does not tell. A new channel has torch's own
    limit otherwise, whatever they chose."""
    try:
        return cpu_backend(channel).options._timeout.total_seconds()
    except AttributeError:
        return None


def disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
