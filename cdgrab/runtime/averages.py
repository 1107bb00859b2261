"""The mean of everybody's buckets, in place of each, and what an observer keeps on the way: through pipes, in shared
memory, or by collectives. What does it is a generator, which stops where there is something to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cdgrab.runtime.exchange import Exchange, gathered, traffic_of
from cdgrab.runtime.flows import Flow
from cdgrab.runtime.group import WorkerGroup, named
from cdgrab.runtime.observer import Observer
from cdgrab.runtime.pieces import Part, Piece, by_owner, clipped, joined, put_back
from cdgrab.runtime.pipes import Pipes

CHUNK = 2**16  # coordinates that are averaged at a time in shared memory: what is read stays in a cache

# To average these rows and, if something is given, to write them there or subtract them from it; returns whether all
# numbers were finite.
Compiled = Callable[[Tensor | None, bool], bool]
# For rows whose memory stays: of which coordinates, where they start, how many there are, and where they are kept. The
# mean is written to the one that is named, or to all. Returns None if there is no compiled loop; see `kernels.shared`.
Averaging = Callable[[list[Tensor], list[tuple[int, int, int]], int | None], Compiled | None]
Mean = Callable[[Tensor, Tensor], Tensor]


class Averages:
    """group: of the thread or stream that averages; the others as in `OverlappingHook`. wanted: what the observer wants
    of this step; error: the first one of this step. What fails in keeping shares is set aside, and exchanges go on:
    other processes may have begun the next one."""

    def __init__(
        self, group: WorkerGroup, observer: Observer | None, wire: torch.dtype | None, mean: Mean, averaging: Averaging
    ) -> None:
        self._group, self._observer, self._wire, self._mean, self._averaging = group, observer, wire, mean, averaging
        self.pipes: Pipes | None = None
        # where each piece was, what of it is kept, and its flow, if it was there twice
        self._flows: WeakKeyDictionary[Piece, tuple[int, list[Part], Flow | None]] = WeakKeyDictionary()
        self.begin_step("nothing")

    def begin_step(self, wanted: str) -> None:
        self.wanted, self.error = wanted, None

    def average(self, buffer: Tensor, piece: Piece) -> Iterator[bool]:
        return self._through_pipes(buffer, piece) if self.pipes else self._by_collectives(buffer, piece)

    def here(self, every: list[Tensor], pieces: list[Piece]) -> None:
        """In shared memory: this process's coordinates of these pieces of everybody's bucket."""
        self._make_room()
        group, rank = self._group, self._group.rank
        compiled = self._averaging(every, [piece.own(rank) for piece in pieces], None)
        if not (compiled and self._kept_by(compiled, every[rank].dtype)):
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

    def free(self) -> None:
        """Between two steps: keep no memory for what goes through pipes, and forget where buckets were."""
        self._flows.clear()
        if self.pipes:
            self.pipes.free()

    def failed(self, error: Exception) -> None:
        self.error = self.error or error

    # -- the ways -----------------------------------------------------------------------------------------------------

    def _through_pipes(self, buffer: Tensor, piece: Piece) -> Iterator[bool]:
        group, owned = self._group, self.owned(piece)
        flow, sent, widths = self._flow(buffer, piece, owned)
        with group.traffic.collective("exchange"):
            self.pipes.begin(flow)
        number = group.traffic.calls
        yield True
        self._make_room()
        with named("exchange", number):
            while flow.left:  # what another job waits for may be what this one needs
                self.pipes.turn()
                yield True
        if group.divides(len(buffer)):
            self._put_back(buffer, owned, sent)
        group.traffic.sent += traffic_of(group, widths, sent.element_size())

    def _flow(self, buffer: Tensor, piece: Piece, owned: list[list[Part]] | None) -> tuple[Flow, Tensor, list[int]]:
        """Of a bucket, what is sent, how it is divided, and its flow: that of an earlier step, if all is where it was
        then. DDP moves its buckets after the first step, and a flow holds on to their memory."""
        group, whole, widths = self._group, buffer, piece.widths
        if not group.divides(len(buffer)):
            sent = buffer if self._wire is None else buffer.to(self._wire)
            out = None if sent is buffer else buffer
            prepare = partial(self._prepared, self._mine(piece, owned), buffer.dtype, out)
            return self.pipes.whole(sent, prepare), sent, widths
        if owned is None:
            mine = self._mine(piece, owned)
        else:
            mine, (whole, widths) = joined(owned[group.rank]), by_owner(buffer, owned)
        sent = whole if self._wire is None else whole.to(self._wire)
        *before, flow = self._flows.get(piece, (None,))
        here = [sent.data_ptr(), mine]
        if flow is None or before != here:
            flow = self.pipes.divided(sent, widths, partial(self._prepared, mine, buffer.dtype, None))
        if sent is buffer:
            self._flows[piece] = *here, flow if before == here else None
        return flow, sent, widths

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
        self._take(self._mine(piece, owned) if owned is None else joined(owned[group.rank]), share, mean)
        exchange.spread()
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

    def _prepared(
        self, mine: list[Part], dtype: torch.dtype, out: Tensor | None, rows: list[Tensor], start: int
    ) -> Callable[[], None]:
        """Writes the mean of rows, from `start` on in what is received, in this type. out: where it goes; None: it
        takes the place of this process's own row. mine: what of the rows is kept, and where."""
        own = rows[self._group.rank]
        parts = clipped(mine, start, start + own.shape[0])
        table = [_of_row(part) for part in parts]
        complete = out is None and sum([width for _, width, _ in table]) == own.shape[0]
        compiled = self._averaging(rows, table, self._group.rank) if complete else None

        def average() -> None:
            if compiled and self._kept_by(compiled, own.dtype):
                return
            share = torch.stack(rows).to(dtype)
            mean = self._mean(share, share.new_empty(len(own)))
            (own if out is None else out).copy_(mean)
            self._take(parts, share, mean)

        return average

    def _kept_by(self, compiled: Compiled, dtype: torch.dtype) -> bool:
        """Whether this compiled loop has averaged rows of this type: that takes no memory, and a fraction of the
        time."""
        kept, subtract = None, False
        if self.wanted == "shares":
            try:
                found = self._observer.kept_shares()
            except Exception as error:
                self.failed(error)
            else:
                if found is None or found[0].dtype != dtype:
                    return False
                kept, subtract = found
        finite = compiled(kept, subtract)
        if kept is not None:
            self._observer.took_shares(finite)
        return True

    def _take(self, parts: list[Part], rows: Tensor, mean: Tensor) -> None:
        if self.wanted != "shares":
            return
        try:
            for lies, place in parts:
                self._observer.take_share(place, rows[:, lies], mean=mean[lies])
        except Exception as error:
            self.failed(error)


def _of_row(part: Part) -> tuple[int, int, int]:
    lies, kept = part
    return lies.start, lies.stop - lies.start, kept.start if kept else 0
