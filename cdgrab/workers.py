"""Logical workers on processes, and every collective of the project. Nothing else imports torch.distributed.

`workers` belongs to the experiment; how many processes host them is a deployment detail. A process hosts
workers / world_size consecutive workers. Collectives return tensors in worker order, so that whatever is summed over
workers afterwards is summed in the same order, to the last bit, for every process count.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import CdgrabError

DEVICES = ("auto", "cpu", "cuda")

# The first name is new in torch 2.13, where the second is deprecated.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class WorkerGroup:
    """Which of the logical workers this process hosts, and how to reach the others."""

    workers: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise CdgrabError(f"workers must be at least 1, got {self.workers}")
        if self.workers % self.world_size:
            fits = [n for n in range(1, self.workers + 1) if self.workers % n == 0]
            raise CdgrabError(
                f"workers={self.workers} cannot be split evenly over {self.world_size} processes; "
                f"start {', '.join(map(str, fits[:-1]))}{' or ' if fits[:-1] else ''}{fits[-1]} instead"
            )

    @property
    def local_workers(self) -> int:
        return self.workers // self.world_size

    @property
    def local(self) -> slice:
        """The workers hosted here."""
        return slice(self.rank * self.local_workers, (self.rank + 1) * self.local_workers)

    def gather(self, tensor: Tensor) -> Tensor:
        """[local_workers, ...] of every process -> [workers, ...] in worker order, on every process."""
        if self.world_size == 1:
            return tensor
        out = tensor.new_empty((self.workers, *tensor.shape[1:]))
        if out.numel():
            _all_gather(out, tensor.contiguous())
        return out

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


def launched_rank() -> int:
    """This process's rank as torchrun tells it; 0 outside torchrun."""
    return int(os.environ.get("RANK", 0))


def launched_world_size() -> int:
    """Number of processes as torchrun tells it; 1 outside torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


def pick_device(wanted: str = "auto") -> torch.device:
    """auto: a GPU when there is one. Ranks share GPUs in turn when there are fewer GPUs than ranks."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise CdgrabError("device=cuda was asked for, but no GPU is available here; use device=cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def connect(workers: int) -> WorkerGroup:
    """Join the processes that torchrun started (or none) and divide the workers among them.

    gloo throughout: it takes CPU and GPU tensors, and several ranks on one GPU, which NCCL refuses.
    """
    group = WorkerGroup(workers, launched_rank(), launched_world_size())  # refuses a bad split before any connection
    if group.world_size > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    return group


def disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
