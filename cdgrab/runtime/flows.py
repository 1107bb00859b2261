"""Vectors on their way between processes: averaged chunk by chunk or, if short, at once. Nothing here waits."""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

CHUNK = 2**19  # bytes of all processes together that are averaged at once
SOME, MUCH = CHUNK // 4, CHUNK // 2  # bytes from one process that are worth reading, if as many are expected
ALIGNED = 16  # bytes that hold a whole number of numbers of any type
HEADER = struct.Struct("<qq")  # the flow's number, and how many bytes come

Target = Iterator[memoryview | None]  # where what arrives goes, one place after the other; None: there is no room yet
# Of what is averaged at a time: rows of all processes, by rank, and where they begin in this process's share. Returns
# what is called whenever they have arrived, to write the result where this process's row is.
Prepare = Callable[[list[Tensor], int], Callable[[], None]]


class End:
    """This process's end of a connection: what waits to be sent, and where what arrives goes. size: bytes of its room.
    full: what is there has not been averaged yet. worth: bytes that are worth reading, if as many are expected."""

    def __init__(self, rank: int, one: socket.socket, poll: select.poll, size: int, worth: int) -> None:
        self.rank, self.number, self.full = rank, one.fileno(), False
        self._size, self._room = size, None
        self._socket, self._poll, self._worth, self._watched = one, poll, worth, 0
        self._outgoing: deque[tuple[Sequence[memoryview], Flow]] = deque()
        self._incoming: deque[tuple[Target, Flow]] = deque()
        self._place: memoryview | None = None  # what arrives next goes there
        self._enough = 1  # bytes that have to arrive until the system tells of them

    @property
    def room(self) -> Tensor:
        """For what is to be averaged, of whatever flow: nothing overtakes anything here."""
        if self._room is None:
            self._room = torch.empty(self._size, dtype=torch.uint8)
        return self._room

    def free(self) -> None:
        """Flows that are made from now on have another room."""
        self._room = None

    @property
    def waits(self) -> bool:
        return bool(self._watched)

    def send(self, flow: Flow, *some: memoryview) -> None:
        rest = some if self._outgoing else self._unsent(some)
        if rest:
            flow.left += 1
            self._outgoing.append((rest, flow))
            self._watch()

    def expect(self, target: Target, flow: Flow) -> None:
        flow.left += 1
        self._incoming.append((target, flow))
        if len(self._incoming) == 1:
            self.look_for_room()

    def look_for_room(self) -> None:
        """Where there was none, there may be some now."""
        if self._place is None:
            self._find_room()
            self._watch()

    def go_on(self, events: int) -> None:
        """The connection can be written to or read from."""
        if self._place is not None and events != select.POLLOUT:
            self._read()
        if self._outgoing:
            self._write()
        self._watch()

    def _write(self) -> None:
        while self._outgoing:
            some, flow = self._outgoing.popleft()
            if rest := self._unsent(some):
                self._outgoing.appendleft((rest, flow))
                break
            flow.left -= 1

    def _unsent(self, some: Sequence[memoryview]) -> Sequence[memoryview]:
        """What of these the system does not take now."""
        try:
            sent = self._socket.sendmsg(some)
        except BlockingIOError:
            return some
        return () if sent == sum(map(len, some)) else _without(sent, some)

    def _read(self) -> None:
        """What has arrived of the next chunk; more would not be worth a turn yet. What follows something short, such as
        a header, has come with it."""
        count = 0
        while self._place is not None and count < len(self._place):
            try:
                count = self._socket.recv_into(self._place)
            except BlockingIOError:
                break
            if not count:
                raise ConnectionResetError
            if count < len(self._place):
                self._wait_for(self._place[count:])
                break
            self._place = None
            self._find_room()

    def _find_room(self) -> None:
        while self._place is None and self._incoming:
            target, flow = self._incoming[0]
            try:
                if (place := next(target)) is None:
                    break
                self._wait_for(place)
            except StopIteration:
                self._incoming.popleft()
                flow.left -= 1

    def _wait_for(self, place: memoryview) -> None:
        """A few bytes are not worth a turn."""
        self._place, enough = place, min(self._worth, len(place))
        if enough != self._enough:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)
            self._enough = enough

    def _watch(self) -> None:
        wanted = select.POLLIN * (self._place is not None) | select.POLLOUT * bool(self._outgoing)
        if wanted != self._watched:
            if not wanted:
                self._poll.unregister(self.number)
            else:
                self._poll.register(self.number, wanted)
            self._watched = wanted


class Flow:
    """A vector on its way. left: how many things have not arrived yet, or are not sent."""

    def __init__(self, rank: int, vector: Tensor) -> None:
        self._rank, self._vector, self.left = rank, vector, 0

    def start(self, number: int) -> None:
        """Send this process's part, and expect the others'; again, once nothing is left."""
        raise NotImplementedError

    def _greet(self, end: End, number: int, some: memoryview) -> None:
        end.send(self, memoryview(HEADER.pack(number, len(some))), some)

    def _greeted(self, end: End, number: int, size: int) -> Iterator[memoryview]:
        """Whoever sends something else is in another step, or has another model."""
        header = bytearray(HEADER.size)
        yield memoryview(header)
        if HEADER.unpack(header) != (number, size):
            raise RuntimeError(f"rank {end.rank} exchanges other gradients than rank {self._rank}")


class Divided(Flow):
    """Every process averages its own coordinates of everybody's vector. shares, results: by rank, this process's ends
    of its connections; widths: how many coordinates each process averages, one behind the other."""

    def __init__(
        self,
        rank: int,
        vector: Tensor,
        widths: Sequence[int],
        shares: dict[int, End],
        results: dict[int, End],
        prepare: Prepare,
    ) -> None:
        super().__init__(rank, vector)
        self._shares, self._results = shares, results
        parts = vector.split(list(widths))
        self._parts = list(map(_bytes_of, parts))
        rows = {other: end.room.view(vector.dtype) for other, end in shares.items()}
        self._rows = {other: _bytes_of(row) for other, row in rows.items()}
        self._chunk = max(map(len, self._rows.values()), default=1)  # bytes
        # how each chunk is averaged, and the result
        self._chunks: list[tuple[Callable[[], None], memoryview]] = []
        length = self._chunk // vector.element_size()
        for start in range(0, widths[rank] if shares else 0, length):
            own = parts[rank][start : start + length]
            if len(own) < length:  # the last chunk: all others share their rows, each of which takes memory
                rows = {other: row[: len(own)] for other, row in rows.items()}
            every = [own if other == rank else rows[other] for other in range(len(widths))]
            self._chunks.append((prepare(every, start), _bytes_of(own)))

    def start(self, number: int) -> None:
        self._next, self._missing = iter(self._chunks), len(self._shares)  # processes whose next chunk has not come yet
        for rank, end in self._shares.items():
            self._greet(end, number, self._parts[rank])
        for rank, end in self._results.items():
            end.expect(iter([self._parts[rank]] if len(self._parts[rank]) else []), self)
        for end in self._shares.values():
            end.expect(self._share_of(end, number), self)

    def _share_of(self, end: End, number: int) -> Target:
        size, row = len(self._parts[self._rank]), self._rows[end.rank]
        yield from self._greeted(end, number, size)
        for start in range(0, size, self._chunk):
            while end.full:
                yield None
            yield row[: size - start]
            end.full = True
            self._missing -= 1
            if not self._missing:
                self._average(last=end)

    def _average(self, last: End) -> None:
        """A chunk has come from everybody, and from one of them just now: that one goes on by itself."""
        average, result = next(self._next)
        average()
        for end in self._results.values():
            end.send(self, result)
        self._missing = len(self._shares)
        for end in self._shares.values():
            end.full = False
        for end in self._shares.values():
            if end is not last:
                end.look_for_room()


class Whole(Flow):
    """Everybody gets all of everybody's vector, and averages it."""

    def __init__(self, rank: int, vector: Tensor, ends: dict[int, End], prepare: Prepare) -> None:
        super().__init__(rank, vector)
        self._ends, self._rows = ends, vector.new_empty(len(ends) + 1, len(vector))
        self._parts, rows = list(map(_bytes_of, self._rows)), list(self._rows)
        rows[rank] = vector  # its copy may not be sent yet
        self._average = prepare(rows, 0)

    def start(self, number: int) -> None:
        self._missing = len(self._ends)
        self._rows[self._rank] = self._vector
        for end in self._ends.values():
            self._greet(end, number, self._parts[self._rank])
        for end in self._ends.values():
            end.expect(self._copy_of(end, number), self)

    def _copy_of(self, end: End, number: int) -> Target:
        part = self._parts[end.rank]
        yield from self._greeted(end, number, len(part))
        yield part
        self._missing -= 1
        if not self._missing:
            self._average()


def _without(count: int, some: Sequence[memoryview]) -> list[memoryview]:
    """What is left of these without so many bytes at their beginning."""
    rest = []
    for part in some:
        if count < len(part):
            rest.append(part[count:])
        count = max(0, count - len(part))
    return rest


def room_for(processes: int) -> int:
    """Bytes of each, a whole number of whatever numbers."""
    return max(ALIGNED, CHUNK // processes // ALIGNED * ALIGNED)


def _bytes_of(vector: Tensor) -> memoryview:
    return memoryview(vector.view(torch.uint8).numpy())
