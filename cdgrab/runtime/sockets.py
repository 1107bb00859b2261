"""How the processes of a group connect with each other: who is called where, and who is let in."""

from __future__ import annotations

import os
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress

from torch.distributed.constants import default_pg_timeout

from cdgrab.runtime.group import WorkerGroup

PATIENCE = 10.0  # seconds in which processes that have told their addresses connect
LONGEST = 10**6  # seconds that the system can be asked to wait
GREETING = 1.0  # seconds that a caller has to say who he is
SIOCGIFADDR = 0x8915  # of Linux: the address of a network card
HELLO = struct.Struct("<qqq")  # the caller's rank, the token that he has told all others, and which connection this is


def limit_of(group: WorkerGroup) -> float:
    """Seconds that processes wait for each other."""
    return group.timeout or default_pg_timeout.total_seconds()


def meet(
    group: WorkerGroup,
    listening: socket.socket,
    tokens: tuple[int, ...],
    call: Callable[[int, float], socket.socket],
    trusted: Callable[[socket.socket], bool] = lambda one: True,
    lines: int = 1,
) -> dict[int, list[socket.socket]]:
    """So many connections to each other process, by rank. Lower ranks are called, who need not answer for that; then
    higher ones are let in. call(rank, seconds) connects; strangers are told by their tokens, or not `trusted`."""
    patience = min(PATIENCE, limit_of(group) / 2)
    deadline, found = time.monotonic() + patience, {}
    try:
        for rank in range(group.rank):
            for line in range(lines):
                found[rank, line] = one = call(rank, patience)
                if not trusted(one):
                    raise PermissionError("another user has taken this address")
                one.sendall(HELLO.pack(group.rank, tokens[group.rank], line))
        while len(found) < lines * (group.world_size - 1):
            left = deadline - time.monotonic()
            if left <= 0:  # though others may still come: anybody may try to connect
                raise TimeoutError
            listening.settimeout(left)
            one, _ = listening.accept()
            place = _greeted_by(one, tokens, min(GREETING, max(0.01, left))) if trusted(one) else None
            if place and place[0] > group.rank and place[1] in range(lines) and place not in found:
                found[place] = one
            else:
                one.close()
    except OSError as error:
        close(found.values())
        raise OSError("not connected") from error
    others = {rank for rank, _ in found}
    return {rank: [found[rank, line] for line in range(lines)] for rank in sorted(others)}


def _greeted_by(one: socket.socket, tokens: tuple[int, ...], seconds: float) -> tuple[int, int] | None:
    """The rank at the other end and which connection this is; None: a stranger's."""
    deadline, said = time.monotonic() + seconds, b""
    try:
        while len(said) < HELLO.size:
            one.settimeout(max(0.01, deadline - time.monotonic()))
            if not (more := one.recv(HELLO.size - len(said))) or time.monotonic() > deadline:
                return None
            said += more
        rank, token, line = HELLO.unpack(said)
    except OSError:
        return None
    return (rank, line) if 0 <= rank < len(tokens) and token == tokens[rank] else None


def address_of(card: str) -> str | None:
    """Of a network card; only Linux tells."""
    import fcntl

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        return socket.inet_ntoa(fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", card.encode()))[20:24])
    return None


def gone(*ranks: int) -> RuntimeError:
    """These have closed their connections; none: this process has."""
    how = "connection to {} is closed" if len(ranks) == 1 else "connections to {} are closed"
    return RuntimeError(f"the {how}".format(_listed(ranks)) if ranks else "closed before")


def silent(seconds: float, ranks: Iterable[int]) -> RuntimeError:
    return RuntimeError(f"waited {seconds:g} seconds for {_listed(ranks)}")


def _listed(ranks: Iterable[int]) -> str:
    every = sorted(ranks)
    return f"rank{'s' * (len(every) > 1)} {', '.join(map(str, every))}"


def close(sockets: Iterable[socket.socket]) -> None:
    for one in sockets:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)  # even if another process has it, too
        one.close()


# Forks have no part in a connection: while they lived, nobody would notice the end of the process that has it.
opened: weakref.WeakKeyDictionary[object, list[socket.socket]] = weakref.WeakKeyDictionary()  # by who uses them


def leave_to_parent(owner: object, sockets: Iterable[socket.socket]) -> None:
    """Forks of this process close these, as long as the owner lives."""
    opened[owner] = list(sockets)


def _forked() -> None:
    for sockets in opened.values():
        for one in sockets:
            one.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
