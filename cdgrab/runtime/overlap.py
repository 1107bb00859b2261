"""The gradients of a DistributedDataParallel model, averaged bucket by bucket while the backward pass goes on.

Every bucket is divided by coordinates and exchanged as soon as DDP hands it over: on a CPU by a thread with its own
channel, on a GPU on a stream. What a process receives on the way, its coordinates of everybody's gradients, is what
coordinated ordering needs.

DDP regroups its buckets after the first step. Buckets that are new are exchanged as coordinates were divided before:
this takes a copy of every piece, but moving what is kept of an earlier step would take as much memory as a gradient.
Where nothing is kept, coordinates are divided as the buckets want it.

On a CPU a long bucket is exchanged in pieces, of which the next is on its way while one is summed up: less memory is
needed for what is received, and slow links are never idle.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, cycle
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.futures import Future

from cdgrab.runtime.ddp import after_backward, before_the_end, common_dtype, places, register
from cdgrab.runtime.division import Division
from cdgrab.runtime.exchange import begin_copies, begin_exchange
from cdgrab.runtime.group import WorkerGroup
from cdgrab.runtime.mean import mean_of_rows
from cdgrab.runtime.pieces import Part, Piece, by_owner, deal, joined, put_back

PIECE = 2**20  # coordinates, on a CPU: where processes share cores, more messages take more time than they save,
ON_SLOW_LINKS = 4  # but four times as many save a sixth of a step with links of 1 Gbit/s
SLOW = 2e8  # bytes per second
ROUNDS, ATTEMPTS = 6, 5  # at most so many rounds, of so many attempts, to find out how fast links are
LANES = 2  # pieces that are on their way at a time


class Observer(Protocol):
    """What becomes of the gradients besides their mean. All methods but those for single shares are called in the
    thread of the backward pass, by all processes together. `division` may be asked for in another thread."""

    def begin(self, like: Tensor) -> str:
        """A step begins. Returns what is wanted of its gradients: shares, whole (of this process), a look at them in
        .grad, or nothing."""

    def room_for_share(self, place: slice, like: Tensor) -> Tensor | None:
        """Where such a share is best received, if it matters; see `Sorter.room_for_share`."""

    def take_share(self, place: slice, share: Tensor, *, mean: Tensor | None = None) -> None:
        """This process's coordinates of everybody's gradients, [processes, width], and their mean, if it is there; see
        `Sorter.take_share`."""

    def look(self) -> None:
        """This process's gradients are in .grad. Then DDP puts the mean there."""

    @property
    def division(self) -> Division | None:
        """How shares are divided; None: nobody wants any."""

    @property
    def amid_pair(self) -> bool:
        """Whether shares are kept, which would have to move if they were divided in another way."""

    def divide(self, division: Division) -> None:
        """Shares are divided in this way from now on; see `Sorter.divide`."""

    def end(self, whole: Tensor | None) -> None:
        """The step is complete; whole [dim]: this process's gradient, if it was wanted."""


class OverlappingHook:
    """A communication hook. observer: None if nobody but DDP wants the gradients; wire: the type in which numbers are
    sent, if not their own; mean: `mean_of_rows`, or the same by faster means."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: WorkerGroup,
        observer: Observer | None,
        wire: torch.dtype | None = None,
        mean: Callable[[Tensor, Tensor], Tensor] = mean_of_rows,
    ) -> None:
        self._places, self._dtype = places(parameters), common_dtype([*parameters, torch.empty(0)])
        self._dim = sum(parameter.numel() for parameter in parameters)
        self._group, self._observer, self._wire, self._mean = group, observer, wire, mean
        self._device = parameters[0].device
        self._buckets: list[tuple[tuple[int, ...], list[Piece]]] = []  # parameters, by id, and pieces
        self._regrouped = False  # coordinates are not divided as these buckets want it
        self._complete = False  # these are all buckets of a step
        self._wanted = "nothing"
        self._whole: Tensor | None = None  # reused, like the next: allocating memory takes longer than writing to it
        self._received: dict[int, Tensor] = {}  # by lane
        self._error: Exception | None = None  # the first one of this step
        self._broken = False  # an exchange of this step was not completed

    def register(self, model: nn.Module) -> None:
        """Let DDP call this hook instead of its all-reduce."""
        register(model, self, OverlappingHook.communicate)
        self._beside = _Stream(self._group, self._device) if self._device.type == "cuda" else _Thread(self._group)
        long = self._group.world_size > 1 and self._dim > PIECE // ON_SLOW_LINKS and self._device.type == "cpu"
        self._piece = PIECE // ON_SLOW_LINKS if long and _speed(self._beside.group) < SLOW else PIECE

    # DDP inspects the signature: the argument must be called `bucket`, without string annotations.
    def communicate(self, bucket):
        """DDP calls this for each bucket, in the order of their indices. Returns a future."""
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._begin(buffer)
        pieces = self._pieces_of(bucket)
        if self._wanted == "whole":
            self._keep(bucket)
        handed = _Handed(buffer, pieces)
        if buffer.is_cuda:  # whose stream is done with the bucket before: its room is free
            self._lanes = cycle(range(LANES))
        self._beside.run(self._exchange(piece, handed) for piece in pieces)
        return handed.promise

    def _begin(self, buffer: Tensor) -> None:
        self._error, self._broken = None, False
        if self._may_divide():
            self._divide()
        self._complete = False
        self._lanes = cycle(range(LANES))  # in the same order on every process
        if self._observer:
            self._wanted = self._observer.begin(buffer.new_empty(0, dtype=self._dtype))
        if self._wanted == "look":
            before_the_end(self._look)
        after_backward(self._end)

    def _pieces_of(self, bucket: object) -> list[Piece]:
        index, parameters = bucket.index(), tuple(map(id, bucket.parameters()))
        if index == len(self._buckets) or self._buckets[index][0] != parameters:
            pieces = self._cut(parameters, bucket.buffer(), index)
            self._buckets, self._regrouped = [*self._buckets[:index], (parameters, pieces)], True
        if bucket.is_last() and index + 1 < len(self._buckets):
            self._buckets, self._regrouped = self._buckets[: index + 1], True
        return self._buckets[index][1]

    def _cut(self, parameters: tuple[int, ...], buffer: Tensor, index: int) -> list[Piece]:
        number = 1 if buffer.is_cuda else -(-len(buffer) // self._piece)
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

    def _keep(self, bucket: object) -> None:
        gradients, places = bucket.gradients(), (self._places[id(each)][1] for each in bucket.parameters())
        if self._whole is None or self._whole.device != gradients[0].device:
            self._whole = gradients[0].new_zeros(self._dim, dtype=self._dtype)
        kept = [self._whole[place].view_as(one) for place, one in zip(places, gradients, strict=True)]
        torch._foreach_copy_(kept, gradients)

    # -- beside the backward pass -------------------------------------------------------------------------------------

    def _exchange(self, piece: Piece, handed: _Handed) -> Iterator[bool]:
        """The mean takes the place of the gradient. If something fails, the backward pass fails once DDP is done: DDP
        would wait for ever for a hook that raised an error. After an exchange that broke off there is no other: its
        messages would meet those of another piece."""
        try:
            if not self._broken:
                yield from self._average(piece, handed)
        except Exception as error:
            self._error, self._broken = self._error or error, True
        handed.finish_one()

    def _average(self, piece: Piece, handed: _Handed) -> Iterator[bool]:
        """Stops where there is something to wait for."""
        group, buffer, lane = self._beside.group, handed.buffer[piece.inside], next(self._lanes)
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
        rows = self._room(piece, widths[group.rank], sent, lane)
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

    def _owned(self, piece: Piece) -> list[list[Part]] | None:
        """What belongs to each process, if coordinates are not divided as this piece wants it; None: they are. It does
        not matter whether shares are wanted in this step: about that, processes need not agree."""
        division = self._observer.division if self._observer and piece.place is None else None
        return None if division is None else division.owned(piece.slices)

    def _room(self, piece: Piece, width: int, sent: Tensor, lane: int) -> Tensor:
        """Memory for what is received: the observer's, or some of the size of the largest piece."""
        if self._wanted == "shares" and piece.place is not None:
            room = self._observer.room_for_share(piece.place, sent)
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
        if self._error is not None:
            raise self._error
        self._complete = True
        if self._wanted in ("shares", "whole"):
            self._observer.end(self._whole if self._wanted == "whole" else None)

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


def _speed(group: WorkerGroup) -> float:
    """Bytes per second that a process sends at its best; those of the slowest, on all of them. Where processes share
    cores, an attempt may wait for a core instead of the link: a link is slow only if all attempts are, or if the first
    few are very slow."""
    sent, seconds, speed = torch.zeros(PIECE // ON_SLOW_LINKS), [], 0.0
    for _ in range(ROUNDS):
        for _ in range(ATTEMPTS):
            start = time.perf_counter()
            group.shard(sent)
            seconds.append(time.perf_counter() - start)
        slowest = float(group.gather(torch.tensor([min(seconds)], dtype=torch.float64)).max())
        speed = sent.nbytes * (1 - 1 / group.world_size) / slowest
        if not SLOW / 4 < speed < SLOW:
            break
    return speed


def _in_turn(jobs: deque[Iterator[bool]]) -> None:
    """Go on with one job where another has to wait. More jobs may come meanwhile."""
    running: deque[Iterator[bool]] = deque()
    while jobs or running:
        _go_on((jobs if jobs and len(running) < LANES else running).popleft(), running)


def _go_on(job: Iterator[bool], running: deque[Iterator[bool]]) -> None:
    if next(job, False):
        running.append(job)


class _Handed:
    """A bucket that DDP has handed over, and what is promised to it: the mean."""

    def __init__(self, buffer: Tensor, pieces: list[Piece]) -> None:
        self.buffer, self._left = buffer, len(pieces)
        self.promise = Future(devices=[buffer.device] if buffer.is_cuda else None)
        if not pieces:  # of parameters without coordinates
            self.promise.set_result(buffer)

    def finish_one(self) -> None:
        self._left -= 1
        if not self._left:
            self.promise.set_result(self.buffer)


class _Thread:
    """Does jobs in a thread with a channel of its own, those of the next bucket already while others have to wait."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group, self._pool = group.new_channel(), ThreadPoolExecutor(1, "exchange")
        self._jobs: deque[Iterator[bool]] = deque()

    def run(self, jobs: Iterable[Iterator[bool]]) -> None:
        self._jobs.extend(jobs)
        self._pool.submit(_in_turn, self._jobs)


class _Stream:
    """Does jobs at once, on a stream of a GPU: collectives only queue there."""

    def __init__(self, group: WorkerGroup, device: torch.device) -> None:
        self.group, self._stream = group, torch.cuda.Stream(device)

    def run(self, jobs: Iterable[Iterator[bool]]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            _in_turn(deque(jobs))
