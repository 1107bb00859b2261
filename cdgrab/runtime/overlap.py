"""The gradients of a DistributedDataParallel model, averaged bucket by bucket while the backward pass goes on.

Every bucket is divided by coordinates and exchanged as soon as DDP hands it over: on a CPU by a thread with its own
channel, on a GPU on a stream. What a process receives on the way, its coordinates of everybody's gradients, is what
coordinated ordering needs.

DDP regroups its buckets after the first step. Buckets that are new are exchanged as coordinates were divided before:
this takes a copy of every piece, but moving what is kept of an earlier step would take as much memory as a gradient.
Where nothing is kept, coordinates are divided as the buckets want it.

On a CPU buckets flow through connections of their own (see `pipes`) or, where all processes are on one host, are
averaged where they are once they have settled (see `shared`). What has to be copied goes in pieces, which takes less
memory. On a GPU, and where neither is possible, there are collectives, and a bucket that has much of all parameters is
cut, too.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from cdgrab.runtime import pipes
from cdgrab.runtime.averages import Averages, Averaging
from cdgrab.runtime.beside import Handed, InThread, OnStream
from cdgrab.runtime.ddp import after_backward, common_dtype, places, queue_callback, register
from cdgrab.runtime.division import Division
from cdgrab.runtime.group import WorkerGroup
from cdgrab.runtime.links import connect
from cdgrab.runtime.mean import mean_of_rows
from cdgrab.runtime.observer import Observer
from cdgrab.runtime.pieces import Piece, deal
from cdgrab.runtime.shared import SharedBucket, Sharing

# Coordinates at a time, or a part of all parameters if that is more. Each piece takes time to begin.
PIECE, OF_ALL = 2**16, 64  # of what is copied on a CPU until buckets have settled
LONG_PIECE, OF_THESE = 2**20, 16  # of what is copied there to be sent in another type, or goes by collectives
GPU_PIECE, OF_THOSE = 2**19, 32  # of what goes by collectives on a GPU


class OverlappingHook:
    """A communication hook. observer: None if nobody but DDP wants the gradients; wire: the type in which numbers are
    sent, if not their own; mean: `mean_of_rows`, or the same by faster means; averaging: see `Averaging`."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: WorkerGroup,
        observer: Observer | None,
        wire: torch.dtype | None = None,
        mean: Callable[[Tensor, Tensor], Tensor] = mean_of_rows,
        averaging: Averaging = lambda *_: None,
    ) -> None:
        self._places, self._dtype = places(parameters), common_dtype([*parameters, torch.empty(0)])
        self._dim = sum(parameter.numel() for parameter in parameters)
        self._group, self._observer, self._wire, self._mean, self._averaging = group, observer, wire, mean, averaging
        self._device = parameters[0].device
        self._buckets: list[tuple[tuple[int, ...], list[Piece]]] = []  # parameters, by id, and pieces
        self._regrouped = False  # coordinates are not divided as these buckets want it
        self._complete = False  # these are all buckets of a step
        self._whole: Tensor | None = None  # reused: allocating memory takes longer than writing to it
        self._broken = False  # an exchange of this step was not completed
        self._sharing: Sharing | None = None  # if all processes are on one host
        self._pipes: pipes.Pipes | None = None  # on CPUs, if all can be connected

    def register(self, model: nn.Module) -> None:
        """Let DDP call this hook instead of its all-reduce."""
        register(model, self, OverlappingHook.communicate)
        on_gpu = self._device.type == "cuda"
        self._beside = OnStream(self._group, self._device) if on_gpu else InThread(self._group)
        group = self._beside.group
        self._averages = Averages(group, self._observer, self._wire, self._mean, self._averaging)
        least, most = (GPU_PIECE, OF_THOSE) if on_gpu else (LONG_PIECE, OF_THESE)
        self._piece = max(least, -(-self._dim // most))
        if on_gpu or group.world_size == 1:
            return
        self._pipes = self._averages.pipes = pipes.connect(group)
        if self._pipes:
            self._beside.flows(self._pipes.wake)
            self._piece = max(PIECE, -(-self._dim // OF_ALL)) if self._observer else LONG_PIECE
        if self._pipes and self._observer:
            self._observer.decide_late(group)
        # memory moves only if nobody but DDP knows where it is
        if links := connect(group, wanted=self._wire is None and not model.gradient_as_bucket_view):
            self._sharing = Sharing(group, links)
            rows = list(torch.zeros(group.world_size, 1, dtype=self._dtype))
            if compiled := self._averaging(rows, [(0, 0, 0)], None):
                compiled(None, False)  # compiles, if it has to

    # DDP inspects the signature: the argument must be called `bucket`, without string annotations.
    def communicate(self, bucket):
        """DDP calls this for each bucket, in the order of their indices. Returns a future."""
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._begin(buffer)
        if bucket.is_last():  # not before: of nested backward passes, that in which DDP ends is known only now
            after_backward(self._end)
        pieces = self._pieces_of(bucket)
        if self._averages.wanted == "whole":
            self._keep(bucket)
        shared = self._shared(bucket, pieces)
        handed = Handed(buffer, 1 if shared else len(pieces))
        if shared:
            jobs = [shared.average(buffer, partial(self._averages.here, shared.rows, pieces))]
        else:
            jobs = [self._averages.average(buffer[piece.inside], piece) for piece in pieces]
        self._beside.run(self._completed(job, handed) for job in jobs)
        return handed.promise

    def _completed(self, job: Iterator[bool], handed: Handed) -> Iterator[bool]:
        """The mean takes the place of the gradient. If something fails, the backward pass fails once DDP is done: DDP
        would wait for ever for a hook that raised an error. After an exchange that broke off there is no other: it
        would meet that of another piece."""
        try:
            if not self._broken:
                yield from job
        except Exception as error:
            self._broken = True
            self._averages.failed(error)
            for connection in filter(None, (self._sharing, self._pipes)):
                connection.close()  # nobody need wait for this process
        handed.finish_one()

    def _begin(self, buffer: Tensor) -> None:
        self._broken = False
        if self._sharing:
            self._sharing.begin()
        if self._may_divide():
            self._divide()
        self._complete = False
        like = buffer.new_empty(0, dtype=self._dtype)
        wanted = self._observer.begin(like) if self._observer else "nothing"
        self._averages.begin_step(wanted)
        if wanted == "look":
            queue_callback(self._look)

    def _pieces_of(self, bucket: object) -> list[Piece]:
        index, parameters = bucket.index(), tuple(map(id, bucket.parameters()))
        if index == len(self._buckets) or self._buckets[index][0] != parameters:
            pieces = self._cut(parameters, len(bucket.buffer()), index)
            self._buckets, self._regrouped = [*self._buckets[:index], (parameters, pieces)], True
            if self._sharing:
                self._sharing.forget()
        if bucket.is_last() and index + 1 < len(self._buckets):
            self._buckets, self._regrouped = self._buckets[: index + 1], True
        return self._buckets[index][1]

    def _cut(self, parameters: tuple[int, ...], length: int, index: int) -> list[Piece]:
        """All pieces but the last one can be divided evenly, so that results are gathered in place."""
        number, even = -(-length // self._piece), self._group.world_size
        ends = [length * i // number // even * even for i in range(1, number)] + [length] * (number > 0)
        inside = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        lengths = [piece.stop - piece.start for piece in inside]
        slices = deal([self._places[name][1] for name in parameters], lengths)
        widths = [self._widths(length, index + i) for i, length in enumerate(lengths)]
        return [Piece(*each) for each in zip(inside, slices, widths, strict=True)]

    def _widths(self, length: int, index: int) -> list[int]:
        """Even ones; a short piece is sent whole, in one round instead of two, and one process in turn keeps it."""
        group = self._group
        if group.divides(length):
            return group.widths(length)
        return [length * (rank == index % group.world_size) for rank in range(group.world_size)]

    def _shared(self, bucket: object, pieces: list[Piece]) -> SharedBucket | None:
        """Where this bucket lies, if it is shared and coordinates are divided as it wants it."""
        if self._sharing is None:
            return None
        shared = self._sharing.bucket(bucket.index(), bucket.buffer())
        return shared if pieces and all(self._averages.owned(piece) is None for piece in pieces) else None

    def _keep(self, bucket: object) -> None:
        gradients, places = bucket.gradients(), (self._places[id(each)][1] for each in bucket.parameters())
        if self._whole is None or self._whole.device != gradients[0].device:
            self._whole = gradients[0].new_zeros(self._dim, dtype=self._dtype)
        kept = [self._whole[place].view_as(one) for place, one in zip(places, gradients, strict=True)]
        torch._foreach_copy_(kept, gradients)

    # -- after it -----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        try:
            self._observer.look()
        except Exception as error:
            self._averages.failed(error)

    def _end(self) -> None:
        """Each of several models in one backward pass waits when all have begun. Processes may have their own order,
        but not in steps in which signs are decided."""
        divided = not self._regrouped or self._observer is None or self._observer.division is None
        # even if something else has failed here: other processes share
        if self._sharing and not self._broken and self._sharing.after_step(divided):
            queue_callback(partial(self._complete_step, self._beside.call(self._share)))
        else:
            self._complete_step(None)

    def _complete_step(self, shared: concurrent.futures.Future | None) -> None:
        if shared:
            shared.result()
        if self._averages.error is not None:
            raise self._averages.error
        self._complete = True
        if self._averages.wanted in ("shares", "whole"):
            self._observer.end(self._whole if self._averages.wanted == "whole" else None)

    def _share(self) -> None:
        shared = self._sharing.settle()
        self._averages.free()  # buckets may have moved, even if not all could be shared
        if not shared:
            self._sharing, self._regrouped = None, True

    def _may_divide(self) -> bool:
        wants = self._regrouped and self._complete and self._observer is not None
        return wants and self._observer.division is not None and not self._observer.amid_pair

    def _divide(self) -> None:
        """As the pieces want it, one behind the other."""
        if self._pipes and not self._sharing:
            self._piece = LONG_PIECE if self._wire else self._dim  # nothing else is copied from now on
            sizes = [sum(self._places[name][0].numel() for name in names) for names, _ in self._buckets]
            every = enumerate(zip(self._buckets, sizes, strict=True))
            self._buckets = [(names, self._cut(names, size, i)) for i, ((names, _), size) in every]
        rank, pieces = self._group.rank, [piece for _, some in self._buckets for piece in some]
        parts = [deal(piece.slices, piece.widths) for piece in pieces]
        of_ranks = (tuple(part for piece in parts for part in piece[rank]) for rank in range(self._group.world_size))
        self._observer.divide(Division(self._group, tuple(of_ranks)))
        for piece, end in zip(pieces, accumulate(piece.widths[rank] for piece in pieces), strict=True):
            piece.place = slice(end - piece.widths[rank], end)
        self._regrouped = False
