"""Sockets between the processes of one host, for notices of a few bytes and for memory that they share.

What passes here tells when memory may be read or written; what is in it never does. A socket, unlike a flag in that
memory, also tells when a process has ended. Names of sockets are random and none is a file, so that nothing is left
behind; everybody can see them, but only processes of the same user are let in.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import select
import socket
import struct
import sys
import time
import weakref
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from cdgrab.runtime import sockets
from cdgrab.runtime.group import WorkerGroup

SWITCH = "CDGRAB_SHARED_MEMORY"  # 0: processes of one host exchange messages, too
READY, DONE = 1, 2  # kinds of notices: my memory may be read; I have written what is mine to everybody's
NOTICE = struct.Struct("<B?xxiq")


class Notice(NamedTuple):
    kind: int
    bucket: int
    step: int


class Links:
    """connections: to each other process, by rank. Errors are RuntimeErrors, like those of torch's own exchanges. Forks
    of this process have no part in it."""

    def __init__(self, connections: dict[int, socket.socket], patience: float) -> None:
        self._sockets, self._patience = connections, patience
        self._arrived: dict[Notice, dict[int, bool]] = defaultdict(dict)
        self._ended: set[int] = set()
        self._poll = select.poll()
        self._ranks = {one.fileno(): rank for rank, one in connections.items()}
        for one in connections.values():
            one.settimeout(min(patience, sockets.LONGEST))
            self._poll.register(one, select.POLLIN)
        self.close = weakref.finalize(self, sockets.close, list(connections.values()))
        sockets.leave_to_parent(self, connections.values())

    def tell(self, notice: Notice, mark: bool = False) -> None:
        """Tell all others, without waiting. mark: see `wait`."""
        kind, bucket, step = notice
        for rank, one in self._sockets.items():
            try:
                one.send(NOTICE.pack(kind, mark, bucket, step))
            except OSError as error:
                raise sockets.gone(rank) from error

    def wait(self, notice: Notice) -> bool:
        """Until all others have told the same. Returns whether any of them marked it. Notices may come in any order,
        and whoever has told all that is expected of him may end."""
        deadline = time.monotonic() + self._patience
        while missing := self._sockets.keys() - self._arrived[notice].keys():
            if missing & self._ended or not self.close.alive:
                raise sockets.gone(*missing & self._ended)
            left = deadline - time.monotonic()
            ready = self._poll.poll(min(max(0.0, left), sockets.LONGEST) * 1000)
            if not ready and left <= sockets.LONGEST:
                raise sockets.silent(self._patience, missing)
            for number, _ in ready:
                self._receive(number)
        return any(self._arrived.pop(notice).values())

    def _receive(self, number: int) -> None:
        rank = self._ranks[number]
        for _ in range(2):  # a reset is told before what was sent before it
            with suppress(OSError):
                if data := self._sockets[rank].recv(NOTICE.size):
                    kind, mark, bucket, step = NOTICE.unpack(data)
                    self._arrived[Notice(kind, bucket, step)][rank] = mark
                    return
        self._ended.add(rank)
        self._poll.unregister(number)

    def swap(self, number: int | None) -> dict[int, int | None]:
        """Give all others a file descriptor, or None; those that they give, by rank, which are the caller's to close.
        None also if there was no room for one more. Only while no notices are under way."""
        found: dict[int, int | None] = {}
        try:
            for one in self._sockets.values():
                _give(one, number)
            for rank, one in self._sockets.items():
                data, numbers, flags, _ = socket.recv_fds(one, 1, 1, socket.MSG_CMSG_CLOEXEC)
                found[rank] = numbers[0] if numbers else None
                whole = not flags & socket.MSG_CTRUNC  # else this process has too many open files
                if whole and data != (b"+" if numbers else b"."):
                    raise ConnectionResetError
        except OSError as error:
            for received in found.values():
                if received is not None:
                    os.close(received)
            raise RuntimeError(f"a connection is closed ({error})") from error
        return found


def _give(one: socket.socket, number: int | None) -> None:
    if number is not None:
        try:
            socket.send_fds(one, [b"+"], [number])
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # too many descriptors are in flight
                raise
    one.send(b".")


def connect(group: WorkerGroup, wanted: bool = True) -> Links | None:
    """All processes call this together, and get links if all of them are on one host and want them; otherwise all get
    None."""
    mine, listening = secrets.randbits(62), None
    with suppress(OSError, AttributeError):  # another system, or too many open files
        if wanted and sys.platform == "linux" and os.environ.get(SWITCH, "1") != "0":
            listening = _listen(mine, group.world_size)
    told = group.gather(torch.tensor([[mine, _host() if listening else 0]])).tolist()
    tokens, hosts = zip(*told, strict=True)
    links = None
    if listening:
        with listening, suppress(OSError):
            if len(set(hosts)) == 1:
                links = _link(group, listening, tokens)
    if agreed(group, links is not None):
        return links
    if links:
        links.close()
    return None


def agreed(group: WorkerGroup, mine: bool) -> bool:
    """Whether all processes say yes."""
    return bool(group.gather(torch.tensor([int(mine)])).all())


def _host() -> int:
    """The same number on all processes of a host, unless they are in different networks: they count as hosts then."""
    try:
        network = os.stat("/proc/self/ns/net")
        what = Path("/proc/sys/kernel/random/boot_id").read_text(), network.st_dev, network.st_ino
        return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:7])
    except OSError:
        return secrets.randbits(62)


def _address(token: int) -> str:
    return f"\0cdgrab-{token:x}"  # no file


def _listen(token: int, backlog: int) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(_address(token))
    listening.listen(backlog)
    return listening


def _link(group: WorkerGroup, listening: socket.socket, tokens: tuple[int, ...]) -> Links:
    def call(rank: int, seconds: float) -> socket.socket:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one.settimeout(seconds)
        one.connect(_address(tokens[rank]))
        return one

    found = sockets.meet(group, listening, tokens, call, _same_user)
    return Links({rank: one for rank, (one,) in found.items()}, sockets.limit_of(group))


def _same_user(one: socket.socket) -> bool:
    _, user, _ = struct.unpack("iII", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user == os.geteuid()
