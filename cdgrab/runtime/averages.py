"""The mean of everybody's buckets, in place of each, and what an observer keeps on the way: through pipes, in shared
memory, or by collectives. What does it is a generator, which stops where there is something to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from cdgrab.runtime.exchange import Exchange, gathered, traffic_of
from cdgrab.runtime.group import WorkerGroup, named
from cdgrab.runtime.observer import Observer
from cdgrab.runtime.pieces import Part, Piece, by_owner, clipped, joined, put_back
from cdgrab.runtime.pipes import Pipes

CHUNK = 2**16  # coordinates that are averaged at a time in shared memory: what is read stays in a cache

Rows = list[tuple[int, int, int]]  # where coordinates start, how many there are, and where they are kept
AtOnce = Callable[[list[Tensor], Rows, Tensor | None, bool], bool | None]
Mean = Callable[[Tensor, Tensor], Tensor]


class Averages:
    """group: of the thread or stream that averages; the others as in `OverlappingHook`. wanted: what the observer wants
    of this step; error: the first one of this step. What fails in keeping shares is set aside, and exchanges go on:
    other processes may have begun the next one."""

    def __init__(
        self, group: WorkerGroup, observer: Observer | None, wire: torch.dtype | None, mean: Mean, at_once: AtOnce
    ) -> None:
        self._group, self._observer, self._wire, self._mean, self._at_once = group, observer, wire, mean, at_once
        self.pipes: Pipes | None = None
        self.begin_step("nothing")

    def begin_step(self, wanted: str) -> None:
        self.wanted, self.error = wanted, None

    def average(self, buffer: Tensor, piece: Piece) -> Iterator[bool]:
        return self._through_pipes(buffer, piece) if self.pipes else self._by_collectives(buffer, piece)

    def here(self, every: list[Tensor], pieces: list[Piece]) -> None:
        """In shared memory: this process's coordinates of these pieces of everybody's bucket."""
        self._make_room()
        group, rank = self._group, self._group.rank
        if not self._compiled(every, [piece.own(rank) for piece in pieces]):
            for some, place in (part for piece in pieces for part in piece.chunks(rank, CHUNK)):
                parts = [row[some] for row in every]
                rows = torch.stack(parts)
                mean = self._mean(rows, parts[rank])
                torch._foreach_copy_(parts, [mean] * len(parts))
                self._take([(slice(0, len(mean)), place)], rows, mean)
        size = every[rank].element_size()
        group.traffic.sent += sum(traffic_of(group, piece.widths, size) for piece in pieces)

    def owned(self, piece: Piece) -> list[list[Part]] | None:
        """What belongs to each process, if coordinates are not divided as this piece wants it; None: they are. It does
        not matter whether shares are wanted in this step: about that, processes need not agree."""
        division = self._observer.division if self._observer and piece.place is None else None
        return None if division is None else division.owned(piece.slices)

    def failed(self, error: Exception) -> None:
        self.error = self.error or error

    # -- the ways -----------------------------------------------------------------------------------------------------

    def _through_pipes(self, buffer: Tensor, piece: Piece) -> Iterator[bool]:
        group, owned = self._group, self.owned(piece)
        divides = group.divides(len(buffer))
        widths = piece.widths
        if not divides:
            sent = buffer if self._wire is None else buffer.to(self._wire)
            out = None if sent is buffer else buffer
            write = partial(self._write, self._mine(piece, owned), buffer.dtype, out)
            begin = partial(self.pipes.begin_whole, sent, write)
        else:
            whole, widths = (buffer, widths) if owned is None else by_owner(buffer, owned)
            sent = whole if self._wire is None else whole.to(self._wire)
            mine = self._mine(piece, owned) if owned is None else joined(owned[group.rank])
            begin = partial(self.pipes.begin, sent, widths, partial(self._write, mine, buffer.dtype, None))
        with group.traffic.collective("exchange"):
            flow = begin()
        number = group.traffic.calls
        yield True
        self._make_room()
        while flow.left:  # what another job waits for may be what this one needs
            with named("exchange", number):
                self.pipes.turn()
            yield True
        if divides:
            self._put_back(buffer, owned, sent)
        group.traffic.sent += traffic_of(group, widths, sent.element_size())

    def _by_collectives(self, buffer: Tensor, piece: Piece) -> Iterator[bool]:
        group, owned = self._group, self.owned(piece)
        if not group.divides(len(buffer)):
            sent = buffer if self._wire is None else buffer.to(self._wire)
            rows = gathered(group, sent).to(buffer.dtype)
            return self._take(self._mine(piece, owned), rows, self._mean(rows, buffer))
        whole, widths = (buffer, piece.widths) if owned is None else by_owner(buffer, owned)
        sent = whole if self._wire is None else whole.to(self._wire)
        exchange = Exchange(group, sent, widths)
        yield True
        share = exchange.rows().to(buffer.dtype)
        mean = self._mean(share, whole.split(widths)[group.rank])
        if self._wire is not None:
            sent.split(widths)[group.rank].copy_(mean)
        exchange.spread()
        self._take(self._mine(piece, owned) if owned is None else joined(owned[group.rank]), share, mean)
        self._put_back(buffer, owned, sent)

    def _mine(self, piece: Piece, owned: list[list[Part]] | None) -> list[Part]:
        rank = self._group.rank
        return [(slice(0, piece.widths[rank]), piece.place)] if owned is None else owned[rank]

    def _put_back(self, buffer: Tensor, owned: list[list[Part]] | None, sent: Tensor) -> None:
        if owned is not None:
            put_back(buffer, owned, sent)
        elif sent is not buffer:
            buffer.copy_(sent)

    # -- what is kept -------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """While gradients are on their way. If signs cannot be decided, the exchange breaks off: other processes wait
        for that instead of the next gradients."""
        if self.wanted == "shares":
            self._observer.decide_due()
            try:
                self._observer.make_room()
            except Exception as error:
                self.failed(error)

    def _write(self, mine: list[Part], dtype: torch.dtype, out: Tensor | None, rows: list[Tensor], start: int) -> None:
        """The mean of rows, from `start` on in what is received, in this type. out: where it goes; None: it takes the
        place of this process's own row. mine: what of the rows is kept, and where."""
        own = rows[self._group.rank]
        parts = clipped(mine, start, start + own.shape[0])
        table = [(lies.start, lies.stop - lies.start, kept.start if kept else 0) for lies, kept in parts]
        complete = sum([width for _, width, _ in table]) == own.shape[0]
        if out is None and complete and self._compiled(rows, table):
            return
        share = torch.stack(rows).to(dtype)
        mean = self._mean(share, share.new_empty(len(own)))
        (own if out is None else out).copy_(mean)
        self._take(parts, share, mean)

    def _compiled(self, every: list[Tensor], parts: Rows) -> bool:
        """By a compiled loop, if there is one: that takes no memory, and a fraction of the time."""
        wanted = self.wanted == "shares"
        try:
            kept, subtract = (self._observer.kept_shares() if wanted else None) or (None, False)
        except Exception as error:
            self.failed(error)
            wanted, kept, subtract = False, None, False
        if wanted and kept is None:
            return False
        finite = self._at_once(every, parts, kept, subtract)
        if finite is not None and kept is not None:
            self._observer.took_shares(finite)
        return finite is not None

    def _take(self, parts: list[Part], rows: Tensor, mean: Tensor) -> None:
        if self.wanted != "shares":
            return
        try:
            for lies, place in parts:
                self._observer.take_share(place, rows[:, lies], mean=mean[lies])
        except Exception as error:
            self.failed(error)
