"""Logical workers on processes, and every collective of the project.

`workers` belongs to the experiment; how many processes host them is a deployment detail. A process hosts
workers / world_size consecutive workers. Collectives return tensors in worker order, so that sums over workers are
computed in the same order, and are equal to the last bit, for every process count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from cdgrab.errors import CdgrabError, CollectiveError, MissingError, first_line

FEW = 2**16  # bytes; below this the time of a sum depends on its rounds, not on its traffic
WHOLE = 2**16  # numbers of all processes together; below this one collective is faster than two with less traffic

# torch 2.13 has the first name and deprecates the second.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Traffic:
    """Bytes that this process sent, counted as if collectives used ring algorithms."""

    sent: int = 0
    calls: int = 0  # collectives started
    last: str = ""  # the name of the last one

    @contextlib.contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Wraps every collective, so that a failure can be traced to a name and a number."""
        self.calls, self.last = self.calls + 1, name
        with named(name, self.calls):  # another thread may start one meanwhile
            yield


@contextlib.contextmanager
def named(name: str, number: int) -> Iterator[None]:
    """Wraps what belongs to the collective with this name and number."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(name, number, first_line(error)) from error


@dataclass(frozen=True)
class WorkerGroup:
    """Which logical workers this process hosts, and how to reach the others."""

    workers: int
    rank: int = 0
    world_size: int = 1
    traffic: Traffic = field(default_factory=lambda: Traffic(), compare=False)
    channel: object = None  # a torch.distributed process group; None: the default one
    timeout: float | None = None  # seconds that a collective may take; None: torch's own limit

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise CdgrabError(f"workers must be at least 1, got {self.workers}")
        if self.workers % self.world_size:
            near = min(self.workers, 2 * self.world_size)  # of a huge number it would take long to find them all
            fits = [n for n in range(1, near + 1) if self.workers % n == 0]
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
        """[n, ...] of every process, the same n -> [n · processes, ...] in rank order, on every process.

        Rows that belong to workers come out in worker order.
        """
        if self.world_size == 1:
            return tensor
        out = tensor.new_empty((len(tensor) * self.world_size, *tensor.shape[1:]))
        if out.numel():
            self._gather_into(out, tensor.contiguous())
        return out

    def gather_in_place(self, rows: Tensor) -> None:
        """rows [processes, n]: each process has written its own row, and gets those of the others."""
        self._gather_into(rows.view(-1), rows[self.rank])

    def _gather_into(self, out: Tensor, own: Tensor) -> None:
        with self.traffic.collective("all-gather"):
            _all_gather(out, own, group=self.channel)
        self.traffic.sent += own.nbytes * (self.world_size - 1)

    def collect(self, tensor: Tensor) -> Tensor | None:
        """Like `gather`, on the first process; None on the others."""
        if self.world_size == 1:
            return tensor
        if self.rank:
            with self.traffic.collective("gather"):
                dist.gather(tensor.contiguous(), group_dst=0, group=self.channel)
            self.traffic.sent += tensor.nbytes
            return None
        out = tensor.new_empty((self.world_size, *tensor.shape))
        with self.traffic.collective("gather"):
            dist.gather(tensor.contiguous(), list(out), group_dst=0, group=self.channel)
        return out.flatten(0, 1)

    def divides(self, dim: int) -> bool:
        """Whether vectors of this length are divided by coordinates among the processes instead of being sent whole."""
        return self.world_size > 1 and dim * self.world_size > WHOLE

    def widths(self, dim: int) -> list[int]:
        """How many of `dim` coordinates each process owns when they are divided."""
        return [dim // self.world_size + (rank < dim % self.world_size) for rank in range(self.world_size)]

    def shard(self, rows: Tensor, widths: list[int] | None = None, out: Tensor | None = None) -> Tensor:
        """rows [..., dim] of every process -> [processes, ..., width]: this process's coordinates of all rows. widths:
        how many each process owns, if they are not divided evenly; out: where the result goes."""
        if self.world_size == 1:
            return rows[None]
        widths = widths or self.widths(rows.shape[-1])
        mine, count = widths[self.rank], rows.shape[:-1].numel()
        if count == 1:
            outgoing = rows.contiguous().flatten()
        else:  # the coordinates for one process must be contiguous
            outgoing = torch.cat([part.flatten() for part in rows.split(widths, dim=-1)])
        out = rows.new_empty((self.world_size, *rows.shape[:-1], mine)) if out is None else out
        sizes = [width * count for width in widths]
        self.exchange(outgoing, sizes, [mine * count] * self.world_size, out.view(-1))
        return out

    def unshard(self, mine: Tensor, dim: int, widths: list[int] | None = None) -> Tensor:
        """[width] of every process -> [dim], on every process."""
        if self.world_size == 1:
            return mine
        widths = widths or self.widths(dim)
        if not mine.is_cuda:
            return self._exchanged(mine, widths)
        longest = max(widths)
        padded = mine if len(mine) == longest else torch.cat([mine, mine.new_zeros(longest - len(mine))])
        everybody = self.gather(padded)
        if min(widths) == longest:
            return everybody
        rows = everybody.view(self.world_size, -1)
        return torch.cat([row[:width] for row, width in zip(rows, widths, strict=True)])

    def _exchanged(self, mine: Tensor, widths: list[int]) -> Tensor:
        """On a CPU in one round, from everybody to everybody. A ring gather takes a round per process, and rounds are
        what takes time if processes share cores."""
        return self.exchange(mine.repeat(self.world_size), [len(mine)] * self.world_size, widths)

    def exchange(self, sent: Tensor, sizes: list[int], coming: list[int], out: Tensor | None = None) -> Tensor:
        """To each process so many of the numbers that are sent, one behind the other -> those that come from each. out:
        where the result goes."""
        if self.world_size == 1:
            return sent
        out = sent.new_empty(sum(coming)) if out is None else out
        with self.traffic.collective("all-to-all"):
            dist.all_to_all_single(out, sent, coming, sizes, group=self.channel)
        self.traffic.sent += (len(sent) - sizes[self.rank]) * sent.element_size()
        return out

    def unshard_rows(self, rows: Tensor, widths: list[int]) -> Tensor:
        """Undo `shard` for one row per worker: [workers, width] -> the local workers' rows, [local, dim]."""
        if self.world_size == 1:
            return rows
        local, mine = self.local_workers, rows.shape[1]
        sizes = [local * width for width in widths]
        out = self.exchange(rows.contiguous().flatten(), [local * mine] * self.world_size, sizes)
        if local == 1:
            return out[None]
        return torch.cat([part.view(local, -1) for part in out.split(sizes)], dim=1)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, on every process. `tensor` is overwritten."""
        if self.world_size > 1:
            with self.traffic.collective("all-reduce"):
                dist.all_reduce(tensor, group=self.channel)
            self.traffic.sent += 2 * tensor.nbytes * (self.world_size - 1) // self.world_size
        return tensor

    def small_all_reduce(self, tensor: Tensor) -> Tensor:
        """Like `all_reduce`, but in one round instead of several: faster for few numbers."""
        if self.world_size > 1 and tensor.nbytes <= FEW:
            sent = tensor.flatten().repeat(self.world_size)
            everybody = torch.empty_like(sent)
            with self.traffic.collective("all-to-all"):
                dist.all_to_all_single(everybody, sent, group=self.channel)
            self.traffic.sent += tensor.nbytes * (self.world_size - 1)
            return tensor.copy_(everybody.view(self.world_size, *tensor.shape).sum(0))
        return self.all_reduce(tensor)

    def gather_uneven(self, rows: list[Tensor]) -> list[Tensor]:
        """One vector for each worker hosted here, of any length -> the vectors of all workers, on every process.

        They are padded to the longest: collectives only take rows of equal length.
        """
        if self.world_size == 1:
            return rows
        counts = self.gather(torch.tensor([len(row) for row in rows], dtype=torch.int32, device=rows[0].device))
        counts = counts.tolist()
        padded = torch.stack([torch.cat([row, row.new_zeros(max(counts) - len(row))]) for row in rows])
        return [row[:count] for row, count in zip(self.gather(padded), counts, strict=True)]

    def from_worker(self, worker: int, tensor: Tensor) -> Tensor:
        """The `tensor` of the process that hosts `worker`, on every process. The others' tensors are overwritten."""
        if self.world_size > 1:
            host = worker // self.local_workers
            with self.traffic.collective("broadcast"):
                dist.broadcast(tensor, group_src=host, group=self.channel)
            self.traffic.sent += tensor.nbytes * (self.rank != (host - 1) % self.world_size)  # passed on in a ring
        return tensor

    def new_channel(self) -> WorkerGroup:
        """The same group with a new channel, for use by another thread. All processes must call this."""
        if self.world_size == 1:
            return self
        limit = timedelta(seconds=self.timeout) if self.timeout else None
        ranks = None if self.channel is None else dist.get_process_group_ranks(self.channel)
        new = dist.new_group(ranks, limit, "gloo", use_local_synchronization=ranks is not None)
        return replace(self, channel=new)

    def backends(self) -> str:
        """The backends by device, such as cpu:gloo,cuda:nccl; empty if there is only one process."""
        return str(dist.get_backend_config(self.channel)) if self.world_size > 1 else ""

    def barrier(self) -> None:
        if self.world_size > 1:
            with self.traffic.collective("barrier"):
                dist.barrier()

    def expect_all(self, what: str, seconds: float) -> None:
        """Every process calls this. The first one waits for the others so many seconds, the others for the first one as
        long as collectives may take. Only gloo can tell: with another backend nothing happens."""
        gloo = cpu_backend(self.channel) if self.world_size > 1 else None
        if not hasattr(gloo, "monitored_barrier"):
            return
        try:
            with self.traffic.collective("monitored barrier"):
                gloo.monitored_barrier(timedelta(seconds=seconds))  # torch's own function wants nothing but gloo
        except CollectiveError as error:
            raise MissingError(f"rank {self.rank} waited in vain: every rank must call {what}") from error


def cpu_backend(channel: object) -> object | None:
    """The backend that handles a CPU's tensors, whatever handles those of GPUs."""
    try:
        return (channel or dist.group.WORLD)._get_backend(torch.device("cpu"))
    except (AttributeError, RuntimeError):  # another version of torch, or no such backend
        return None
