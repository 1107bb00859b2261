"""The gradients of a DistributedDataParallel model, averaged bucket by bucket while the backward pass goes on.

Every bucket is divided by coordinates and exchanged as soon as DDP hands it over: on a CPU by a thread with its own
channel, on a GPU on a stream. What a process receives on the way, its coordinates of everybody's gradients, is what
coordinated ordering needs.

DDP regroups its buckets after the first step. Buckets that are new are exchanged as coordinates were divided before:
this takes a copy of every piece, but moving what is kept of an earlier step would take as much memory as a gradient.
Where nothing is kept, coordinates are divided as the buckets want it.

A long bucket is exchanged in pieces, of which the next is on its way while one is summed up: less memory is needed for
what is received, and slow links are never idle. (On a GPU only a bucket that has much of all parameters is long.) Where
all processes are on one host, no gradients are sent once the buckets have settled: see `shared`.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, cycle

import torch
from torch import Tensor, nn

from cdgrab.runtime.beside import LANES, SLOW, Handed, InThread, OnStream, speed
from cdgrab.runtime.ddp import after_backward, common_dtype, places, queue_callback, register
from cdgrab.runtime.division import Division
from cdgrab.runtime.exchange import begin_copies, begin_exchange, traffic_of
from cdgrab.runtime.group import WorkerGroup
from cdgrab.runtime.links import connect
from cdgrab.runtime.mean import mean_of_rows
from cdgrab.runtime.observer import Observer
from cdgrab.runtime.pieces import Part, Piece, by_owner, deal, joined, put_back
from cdgrab.runtime.shared import SharedBucket, Sharing

PIECE = 2**20  # coordinates, on a CPU: where processes share cores, more messages take more time than they save,
ON_SLOW_LINKS = 4  # but four times as many save a sixth of a step with links of 1 Gbit/s
UNTIL_SHARED = 16  # and before buckets are shared, for a few steps, less memory counts more than time
ON_GPU, PARTS = 2**18, 16  # on a GPU so many, or a sixteenth of all parameters: each collective takes time to begin
CHUNK = 2**16  # coordinates that are averaged at a time in shared memory: what is read stays in a cache

AtOnce = Callable[[list[Tensor], Tensor, Tensor | None, bool], bool | None]


class OverlappingHook:
    """A communication hook. observer: None if nobody but DDP wants the gradients; wire: the type in which numbers are
    sent, if not their own; mean: `mean_of_rows`, or the same by faster means; at_once: averages rows that lie in shared
    memory and keeps them, see `kernels.shared`, and returns whether all were finite, or None if it cannot."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: WorkerGroup,
        observer: Observer | None,
        wire: torch.dtype | None = None,
        mean: Callable[[Tensor, Tensor], Tensor] = mean_of_rows,
        at_once: AtOnce = lambda *_: None,
    ) -> None:
        self._places, self._dtype = places(parameters), common_dtype([*parameters, torch.empty(0)])
        self._dim = sum(parameter.numel() for parameter in parameters)
        self._group, self._observer, self._wire, self._mean, self._at_once = group, observer, wire, mean, at_once
        self._device = parameters[0].device
        self._buckets: list[tuple[tuple[int, ...], list[Piece]]] = []  # parameters, by id, and pieces
        self._regrouped = False  # coordinates are not divided as these buckets want it
        self._complete = False  # these are all buckets of a step
        self._wanted = "nothing"
        self._whole: Tensor | None = None  # reused, like the next: allocating memory takes longer than writing to it
        self._received: dict[int, Tensor] = {}  # by lane
        self._error: Exception | None = None  # the first one of this step
        self._broken = False  # an exchange of this step was not completed
        self._sharing: Sharing | None = None  # if all processes are on one host

    def register(self, model: nn.Module) -> None:
        """Let DDP call this hook instead of its all-reduce."""
        register(model, self, OverlappingHook.communicate)
        on_gpu, alone = self._device.type == "cuda", self._group.world_size == 1
        self._beside = OnStream(self._group, self._device) if on_gpu else InThread(self._group)
        self._piece, group = max(ON_GPU, -(-self._dim // PARTS)) if on_gpu else PIECE, self._beside.group
        if alone or on_gpu:
            return
        # memory moves only if nobody but DDP knows where it is
        if links := connect(group, wanted=self._wire is None and not model.gradient_as_bucket_view):
            self._sharing = Sharing(group, links)
            self._piece = -(-PIECE // UNTIL_SHARED)
            tiny = torch.zeros(group.world_size, 1, dtype=self._dtype)
            self._at_once(list(tiny), torch.zeros(1, 3, dtype=torch.int64), None, False)  # compiles, if it has to
        elif self._dim > PIECE // ON_SLOW_LINKS and speed(group) < SLOW:
            self._piece = PIECE // ON_SLOW_LINKS

    # DDP inspects the signature: the argument must be called `bucket`, without string annotations.
    def communicate(self, bucket):
        """DDP calls this for each bucket, in the order of their indices. Returns a future."""
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._begin(buffer)
        if bucket.is_last():  # not before: of nested backward passes, that in which DDP ends is known only now
            after_backward(self._end)
        pieces = self._pieces_of(bucket)
        if self._wanted == "whole":
            self._keep(bucket)
        shared = self._shared(bucket, pieces)
        handed = Handed(buffer, 1 if shared else len(pieces))
        if buffer.is_cuda:  # whose stream is done with the bucket before: its room is free
            self._lanes = cycle(range(LANES))
        if shared:
            jobs = [shared.average(buffer, partial(self._average_here, shared.rows, pieces))]
        else:
            jobs = [self._average(buffer[piece.inside], piece) for piece in pieces]
        self._beside.run(self._exchange(job, handed) for job in jobs)
        return handed.promise

    def _begin(self, buffer: Tensor) -> None:
        self._error, self._broken = None, False
        if self._sharing:
            self._sharing.begin()
        if self._may_divide():
            self._divide()
        self._complete = False
        self._lanes = cycle(range(LANES))  # in the same order on every process
        if self._observer:
            self._wanted = self._observer.begin(buffer.new_empty(0, dtype=self._dtype))
        if self._wanted == "look":
            queue_callback(self._look)

    def _pieces_of(self, bucket: object) -> list[Piece]:
        index, parameters = bucket.index(), tuple(map(id, bucket.parameters()))
        if index == len(self._buckets) or self._buckets[index][0] != parameters:
            pieces = self._cut(parameters, bucket.buffer(), index)
            self._buckets, self._regrouped = [*self._buckets[:index], (parameters, pieces)], True
            if self._sharing:
                self._sharing.forget()
        if bucket.is_last() and index + 1 < len(self._buckets):
            self._buckets, self._regrouped = self._buckets[: index + 1], True
        return self._buckets[index][1]

    def _cut(self, parameters: tuple[int, ...], buffer: Tensor, index: int) -> list[Piece]:
        number = -(-len(buffer) // self._piece)
        ends = [len(buffer) * (i + 1) // number for i in range(number)]
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
        return shared if pieces and all(self._owned(piece) is None for piece in pieces) else None

    def _keep(self, bucket: object) -> None:
        gradients, places = bucket.gradients(), (self._places[id(each)][1] for each in bucket.parameters())
        if self._whole is None or self._whole.device != gradients[0].device:
            self._whole = gradients[0].new_zeros(self._dim, dtype=self._dtype)
        kept = [self._whole[place].view_as(one) for place, one in zip(places, gradients, strict=True)]
        torch._foreach_copy_(kept, gradients)

    # -- beside the backward pass -------------------------------------------------------------------------------------

    def _exchange(self, job: Iterator[bool], handed: Handed) -> Iterator[bool]:
        """The mean takes the place of the gradient. If something fails, the backward pass fails once DDP is done: DDP
        would wait for ever for a hook that raised an error. After an exchange that broke off there is no other: its
        messages would meet those of another piece."""
        try:
            if not self._broken:
                yield from job
        except Exception as error:
            self._error, self._broken = self._error or error, True
            if self._sharing:
                self._sharing.close()  # nobody need wait for this process
        handed.finish_one()

    def _average(self, buffer: Tensor, piece: Piece) -> Iterator[bool]:
        """By messages. Stops where there is something to wait for."""
        group, lane = self._beside.group, next(self._lanes)
        owned, width = self._owned(piece), piece.widths[group.rank]
        mine = [(slice(0, width), piece.place)] if owned is None else owned[group.rank]
        if not group.divides(len(buffer)):
            sent = buffer if self._wire is None else buffer.to(self._wire)
            rows = sent.new_empty(group.world_size, len(sent))
            copies = begin_copies(group, sent, rows, lane)
            yield True
            copies.wait_for_rows()
            rows = rows.to(buffer.dtype)
            return self._take(mine, rows, self._mean(rows, buffer))
        whole, widths = (buffer, piece.widths) if owned is None else by_owner(buffer, owned)
        sent = whole if self._wire is None else whole.to(self._wire)
        rows = self._room(piece.place, widths[group.rank], sent, lane)
        exchange = begin_exchange(group, sent, widths, rows, lane)
        yield True
        exchange.wait_for_rows()
        share = rows.to(buffer.dtype)
        mean = self._mean(share, whole.split(widths)[group.rank])
        if self._wire is not None:
            sent.split(widths)[group.rank].copy_(mean)
        exchange.spread()
        self._take(mine if owned is None else joined(mine), share, mean)  # while the mean is on its way
        yield True
        exchange.wait()
        if owned is not None:
            put_back(buffer, owned, sent)
        elif sent is not buffer:
            buffer.copy_(sent)

    def _average_here(self, every: list[Tensor], pieces: list[Piece]) -> None:
        """In shared memory: this process's coordinates of these pieces of everybody's bucket."""
        group, rank = self._beside.group, self._group.rank
        if not self._average_at_once(every, pieces):
            for some, place in (part for piece in pieces for part in piece.chunks(rank, CHUNK)):
                parts = [row[some] for row in every]
                rows = self._room(place, len(parts[rank]), parts[rank])
                torch._foreach_copy_(list(rows), parts)
                mean = self._mean(rows, parts[rank])
                torch._foreach_copy_(parts, [mean] * len(parts))
                self._take([(slice(0, len(mean)), place)], rows, mean)
        size = every[rank].element_size()
        group.traffic.sent += sum(traffic_of(group, piece.widths, size) for piece in pieces)

    def _average_at_once(self, every: list[Tensor], pieces: list[Piece]) -> bool:
        """By a compiled loop, if there is one: that takes no memory, and a fraction of the time."""
        wanted = self._wanted == "shares"
        try:
            kept, subtract = (self._observer.kept_shares() if wanted else None) or (None, False)
        except Exception as error:  # see `_take`
            self._error, wanted, kept, subtract = self._error or error, False, None, False
        if wanted and kept is None:
            return False
        finite = self._at_once(every, torch.tensor([piece.own(self._group.rank) for piece in pieces]), kept, subtract)
        if finite is not None and kept is not None:
            self._observer.took_shares(finite)
        return finite is not None

    def _owned(self, piece: Piece) -> list[list[Part]] | None:
        """What belongs to each process, if coordinates are not divided as this piece wants it; None: they are. It does
        not matter whether shares are wanted in this step: about that, processes need not agree."""
        division = self._observer.division if self._observer and piece.place is None else None
        return None if division is None else division.owned(piece.slices)

    def _room(self, place: slice | None, width: int, sent: Tensor, lane: int = -1) -> Tensor:
        """Memory for what is received: the observer's, or some of the size of the largest piece. On a GPU it is
        new, of the stream in which it is used: that takes no time there, and nothing is kept between steps."""
        if sent.is_cuda:
            return sent.new_empty(self._group.world_size, width)
        if self._wanted == "shares" and place is not None:
            room = self._observer.room_for_share(place, sent)
            if room is not None:
                return room
        needed, room = width * self._group.world_size, self._received.get(lane)
        if room is None or len(room) < needed or room.dtype != sent.dtype:
            self._received[lane] = room = sent.new_empty(needed)
        return room[:needed].view(self._group.world_size, width)

    def _take(self, parts: list[Part], rows: Tensor, mean: Tensor) -> None:
        """If it fails, exchanges go on: other processes may have begun the next one."""
        if self._wanted != "shares":
            return
        try:
            for lies, place in parts:
                self._observer.take_share(place, rows[:, lies], mean=mean[lies])
        except Exception as error:
            self._error = self._error or error

    # -- after it -----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        try:
            self._observer.look()
        except Exception as error:
            self._error = self._error or error

    def _end(self) -> None:
        """Each of several models in one backward pass waits when all have begun: processes may have their own order."""
        divided = not self._regrouped or self._observer is None or self._observer.division is None
        # even if something else has failed here: other processes share
        if self._sharing and not self._broken and self._sharing.after_step(divided):
            queue_callback(partial(self._complete_step, self._beside.call(self._share)))
        else:
            self._complete_step(None)

    def _complete_step(self, shared: concurrent.futures.Future | None) -> None:
        if shared:
            shared.result()
        if self._error is not None:
            raise self._error
        self._complete = True
        if self._wanted in ("shares", "whole"):
            self._observer.end(self._whole if self._wanted == "whole" else None)

    def _share(self) -> None:
        self._received = {}
        if not self._sharing.settle():  # then pieces of their usual size are faster
            self._sharing, self._piece, self._buckets = None, PIECE, []

    def _may_divide(self) -> bool:
        wants = self._regrouped and self._complete and self._observer is not None
        return wants and self._observer.division is not None and not self._observer.amid_pair

    def _divide(self) -> None:
        """As the pieces want it, one behind the other."""
        rank, pieces = self._group.rank, [piece for _, some in self._buckets for piece in some]
        parts = [deal(piece.slices, piece.widths) for piece in pieces]
        of_ranks = (tuple(part for piece in parts for part in piece[rank]) for rank in range(self._group.world_size))
        self._observer.divide(Division(self._group, tuple(of_ranks)))
        for piece, end in zip(pieces, accumulate(piece.widths[rank] for piece in pieces), strict=True):
            piece.place = slice(end - piece.widths[rank], end)
        self._regrouped = False
