"""Connections between all processes, on whatever hosts, through which gradients on CPUs flow while they are averaged.

To each other process there are two. Through one each gets its coordinates of the other's vector, its shares; through
the other one the results, which their owners have computed. A share is averaged chunk by chunk, as soon as a chunk has
come from everybody, and the result of a chunk is sent on at once: links are never idle, and hardly any memory is needed
for what is received. Nothing here blocks but `turn`, and that ends when a thread calls `wake`.

Gloo would do the same with a message for every piece, each of which takes the time of two threads, and memory for a
whole piece.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from cdgrab.runtime import sockets
from cdgrab.runtime.flows import MUCH, SOME, Divided, End, Flow, Prepare, Whole, room_for
from cdgrab.runtime.group import WorkerGroup
from cdgrab.runtime.links import agreed
from cdgrab.runtime.sockets import address_of

SWITCH = "CDGRAB_PIPES"  # 0: gloo exchanges gradients
MOMENT = 0.1  # seconds in which others find the same connections closed, before this process closes its own


class Pipes:
    """connections: two to each other process, by rank. Errors are RuntimeErrors, like those of torch's own exchanges.
    All processes begin the same flows in the same order, each in a single thread. Forks of this process have no part in
    it."""

    def __init__(self, rank: int, connections: dict[int, Sequence[socket.socket]], patience: float) -> None:
        self._rank, self._patience, self._begun = rank, patience, 0
        self._poll = select.poll()
        self._woken, self._waker = socket.socketpair()
        every = [self._woken, self._waker]
        self._ends: dict[int, End] = {}  # by file number
        self.shares: dict[int, End] = {}
        self.results: dict[int, End] = {}
        size = len(connections) + 1
        lines = (self.shares, room_for(size), SOME), (self.results, 0, MUCH)
        for other in ((rank + i) % size for i in range(1, size)):  # so that not all write to the same one first
            for (ends, *sizes), one in zip(lines, connections[other], strict=True):
                ends[other] = self._ends[one.fileno()] = End(other, one, self._poll, *sizes)
                every.append(one)
        for one in every:
            one.setblocking(False)
        self._poll.register(self._woken, select.POLLIN)
        self.close = weakref.finalize(self, sockets.close, every)
        sockets.leave_to_parent(self, every)

    def divided(self, vector: Tensor, widths: Sequence[int], prepare: Prepare) -> Flow:
        """vector [dim] is to be overwritten with the mean: `widths` tells how many of its coordinates belong to each
        process, one behind the other."""
        return Divided(self._rank, vector, widths, self.shares, self.results, prepare)

    def whole(self, vector: Tensor, prepare: Prepare) -> Flow:
        """The same for a short vector: everybody gets all of it, and computes the mean."""
        return Whole(self._rank, vector, self.shares, prepare)

    def free(self) -> None:
        """Keep no memory for flows to come. Those of before are not to begin again."""
        for end in self.shares.values():
            end.free()

    def begin(self, flow: Flow) -> None:
        """Call `turn` until nothing is `left` of it. After that the same flow may begin again."""
        if not self.close.alive:
            raise sockets.gone()
        self._begun += 1
        try:
            flow.start(self._begun)
        except OSError as error:
            raise self._gone() from error

    def turn(self) -> None:
        """Wait until something can go on, or somebody calls `wake`, and let it go on."""
        if not self.close.alive:
            raise sockets.gone()
        ready = self._poll.poll(min(self._patience, sockets.LONGEST) * 1000)
        if not ready and self._patience <= sockets.LONGEST:
            raise sockets.silent(self._patience, {end.rank for end in self._ends.values() if end.waits})
        try:
            for number, events in ready:
                if end := self._ends.get(number):
                    end.go_on(events)
                else:
                    self._woken.recv(2**10)
        except OSError as error:
            raise self._gone() from error

    def _gone(self) -> RuntimeError:
        """Names whoever is, if a connection is closed: one may have been closed because another was."""
        time.sleep(MOMENT)
        poll = select.poll()
        for number in self._ends:
            poll.register(number, getattr(select, "POLLRDHUP", 0))
        return sockets.gone(*{self._ends[number].rank for number, _ in poll.poll(0)})

    def wake(self) -> None:
        """From another thread: whoever waits in `turn` has something else to do."""
        with suppress(OSError):  # so many calls already that there is no room for another, or closed
            self._waker.send(b".")


# -- how they are made -------------------------------------------------------------------------------------------------


class Address(NamedTuple):
    """As numbers that can be gathered. token: 0 if there is none."""

    token: int = 0
    version: int = 0
    port: int = 0
    high: int = 0
    low: int = 0

    def host(self) -> str:
        return str(ipaddress.ip_address(struct.pack("<qq", self.high, self.low)[: 4 if self.version == 4 else 16]))


def connect(group: WorkerGroup) -> Pipes | None:
    """All processes call this together, and get pipes if all of them can be reached; otherwise all get None."""
    listening = None
    with suppress(OSError, UnicodeError):
        if _wanted():
            listening = _listen(2 * group.world_size)
    mine = _address_of(listening) if listening else Address()
    every = [Address(*one) for one in group.gather(torch.tensor([mine])).tolist()]
    pipes = None
    if listening:
        with listening, suppress(OSError):
            if all(address.token for address in every):
                pipes = _joined(group, listening, every)
    if agreed(group, pipes is not None):
        return pipes
    if pipes:
        pipes.close()
    return None


def _wanted() -> bool:
    encrypted = os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP") != "TCP"
    return os.environ.get(SWITCH, "1") != "0" and not encrypted and hasattr(select, "poll")  # not on every system


def _joined(group: WorkerGroup, listening: socket.socket, every: list[Address]) -> Pipes:
    def call(rank: int, seconds: float) -> socket.socket:
        return socket.create_connection((every[rank].host(), every[rank].port), seconds)

    tokens = tuple(address.token for address in every)
    found = sockets.meet(group, listening, tokens, call, lines=2)
    for one in (one for both in found.values() for one in both):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Pipes(group.rank, found, sockets.limit_of(group))


def _listen(backlog: int) -> socket.socket:
    """Where gloo does, too: at the address of the network card that is named, else of the host's name, else of this
    host alone."""
    card = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    try:
        wanted = address_of(card) if card else socket.gethostname()
        found = socket.getaddrinfo(wanted, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        found = []
    for family, _, _, _, where in (*found, (socket.AF_INET, 0, 0, "", ("127.0.0.1", 0))):
        with suppress(OSError):
            return socket.create_server(where, family=family, backlog=backlog)
    raise OSError("nowhere to listen")


def _address_of(listening: socket.socket) -> Address:
    where, port, *_ = listening.getsockname()
    address = ipaddress.ip_address(where.split("%")[0])
    return Address(
        1 + secrets.randbits(61), address.version, port, *struct.unpack("<qq", address.packed.ljust(16, b"\0"))
    )
