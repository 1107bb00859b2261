"""Vectors on their way between processes: averaged chunk by chunk or, if short, at once. Nothing here waits."""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

CHUNK = 2**19  # bytes of all processes together that are averaged at once
ENOUGH = CHUNK // 4  # bytes from one process that are worth reading, if as many are expected
ALIGNED = 16  # bytes that hold a whole number of numbers of any type
HEADER = struct.Struct("<qq")  # the flow's number, and how many bytes come

Target = Iterator[memoryview | None]  # where what arrives goes, one place after the other; None: there is no room yet
Compute = Callable[[list[Tensor], int], None]


class End:
    """This process's end of a connection: what waits to be sent, and where what arrives goes. room: bytes, for what is
    to be averaged, of whatever flow: nothing overtakes anything here. full: it has not been averaged yet."""

    def __init__(self, rank: int, one: socket.socket, poll: select.poll, room: int) -> None:
        self.rank, self.number = rank, one.fileno()
        self.room, self.full = torch.empty(room, dtype=torch.uint8), False
        self._socket, self._poll, self._watched = one, poll, 0
        self._outgoing: deque[tuple[memoryview, Flow]] = deque()
        self._incoming: deque[tuple[Target, Flow]] = deque()
        self._place: memoryview | None = None  # what arrives next goes there
        self._enough = 1  # bytes that have to arrive until the system tells of them

    @property
    def waits(self) -> bool:
        return bool(self._watched)

    def send(self, some: memoryview, flow: Flow) -> None:
        flow.left += 1
        self._outgoing.append((some, flow))
        if len(self._outgoing) == 1:
            self._write()
            self._watch()

    def expect(self, target: Target, flow: Flow) -> None:
        flow.left += 1
        self._incoming.append((target, flow))
        if len(self._incoming) == 1:
            self.look_for_room()

    def look_for_room(self) -> None:
        """Where there was none, there may be some now."""
        while self._place is None and self._incoming:
            target, flow = self._incoming[0]
            try:
                if (place := next(target)) is None:
                    break
                self._place = place
                self._wait_for_enough()
            except StopIteration:
                self._incoming.popleft()
                flow.left -= 1
        self._watch()

    def go_on(self) -> None:
        """The connection can be written to or read from."""
        self._read()
        self._write()
        self._watch()

    def _write(self) -> None:
        while self._outgoing:
            some, flow = self._outgoing[0]
            if (sent := self._tried(self._socket.send, some)) is None:
                break
            if sent < len(some):
                self._outgoing[0] = some[sent:], flow
            else:
                self._outgoing.popleft()
                flow.left -= 1

    def _read(self) -> None:
        while self._place is not None:
            if (count := self._tried(self._socket.recv_into, self._place)) is None:
                break
            if not count:
                raise ConnectionResetError
            if count < len(self._place):
                self._place = self._place[count:]
                self._wait_for_enough()
                break
            self._place = None
            self.look_for_room()

    def _tried(self, transfer: Callable[[memoryview], int], some: memoryview) -> int | None:
        """How many bytes of these were sent or received; None: the system cannot take or give any now."""
        try:
            return transfer(some)
        except BlockingIOError:
            return None

    def _wait_for_enough(self) -> None:
        """A few bytes are not worth a turn: nothing is averaged before all of a chunk is there."""
        enough = min(ENOUGH, len(self._place))
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

    def __init__(self, rank: int, vector: Tensor, compute: Compute) -> None:
        self._rank, self._vector, self._compute, self.left = rank, vector, compute, 0

    def start(self, shares: dict[int, End], results: dict[int, End], number: int) -> None:
        """By rank, this process's ends of its connections."""
        raise NotImplementedError

    def _greet(self, end: End, number: int, size: int) -> None:
        end.send(memoryview(HEADER.pack(number, size)), self)

    def _greeted(self, end: End, number: int, size: int) -> Iterator[memoryview]:
        """Whoever sends something else is in another step, or has another model."""
        header = bytearray(HEADER.size)
        yield memoryview(header)
        if HEADER.unpack(header) != (number, size):
            raise RuntimeError(f"rank {end.rank} exchanges other gradients than rank {self._rank}")


class Divided(Flow):
    """Every process averages its own coordinates of everybody's vector."""

    def __init__(self, rank: int, vector: Tensor, widths: Sequence[int], compute: Compute) -> None:
        super().__init__(rank, vector, compute)
        self._parts, self._width = vector.split(list(widths)), widths[rank]
        self._places = dict(enumerate(zip(accumulate(widths, initial=0), accumulate(widths), strict=False)))
        self._missing = len(widths) - 1  # processes whose next chunk has not come yet

    def start(self, shares: dict[int, End], results: dict[int, End], number: int) -> None:
        self._shares, self._results = shares, results
        whole, size = _bytes_of(self._vector), self._vector.element_size()
        self._own = _bytes_of(self._parts[self._rank])
        self._rows = {rank: end.room.view(self._vector.dtype) for rank, end in shares.items()}
        self._chunk = max([len(row) for row in self._rows.values()], default=1)
        for rank, end in self._shares.items():
            start, stop = (size * place for place in self._places[rank])
            self._greet(end, number, stop - start)
            end.send(whole[start:stop], self)
        for rank, end in self._results.items():
            start, stop = (size * place for place in self._places[rank])
            end.expect(iter([whole[start:stop]] if stop > start else []), self)
        for end in self._shares.values():
            end.expect(self._share_of(end, number), self)

    def _share_of(self, end: End, number: int) -> Target:
        size, row = self._vector.element_size(), _bytes_of(self._rows[end.rank])
        yield from self._greeted(end, number, self._width * size)
        for start in range(0, self._width, self._chunk):
            while end.full:
                yield None
            yield row[: (self._width - start) * size]
            end.full = True
            self._missing -= 1
            if not self._missing:
                self._average(start, last=end)

    def _average(self, start: int, last: End) -> None:
        """A chunk has come from everybody, and from one of them just now: that one goes on by itself."""
        own = self._parts[self._rank][start : start + self._chunk]
        size = own.element_size()
        every = self._rows | {self._rank: own}
        self._compute([every[rank][: len(own)] for rank in range(len(every))], start)
        for end in self._results.values():
            end.send(self._own[start * size : (start + len(own)) * size], self)
        self._missing = len(self._shares)
        for end in self._shares.values():
            end.full = False
        for end in self._shares.values():
            if end is not last:
                end.look_for_room()


class Whole(Flow):
    """Everybody gets all of everybody's vector, and averages it."""

    def __init__(self, rank: int, vector: Tensor, processes: int, compute: Compute) -> None:
        super().__init__(rank, vector, compute)
        self._rows, self._missing = vector.new_empty(processes, len(vector)), processes - 1

    def start(self, shares: dict[int, End], results: dict[int, End], number: int) -> None:
        self._rows[self._rank] = self._vector
        mine = _bytes_of(self._rows[self._rank])
        for end in shares.values():
            self._greet(end, number, len(mine))
            end.send(mine, self)
        for end in shares.values():
            end.expect(self._copy_of(end, number, len(mine)), self)

    def _copy_of(self, end: End, number: int, size: int) -> Target:
        yield from self._greeted(end, number, size)
        yield _bytes_of(self._rows[end.rank])
        self._missing -= 1
        if not self._missing:
            rows = list(self._rows)
            rows[self._rank] = self._vector  # its copy may not be sent yet
            self._compute(rows, 0)


def room_for(processes: int) -> int:
    """Bytes of each, a whole number of whatever numbers."""
    return max(ALIGNED, CHUNK // processes // ALIGNED * ALIGNED)


def _bytes_of(vector: Tensor) -> memoryview:
    return memoryview(vector.view(torch.uint8).numpy())
