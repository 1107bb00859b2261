"""What happens to a run on its way. Each takes the numbers of its processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cdgrab.errors import CdgrabError
from scripts.soak.processes import send

PIDFD_GETFD = 438  # a system call of Linux


@dataclass(frozen=True)
class Disturbance:
    happen: Callable[[list[int], random.Random], None]
    share: float  # of all disturbances
    several: bool = False  # needs several processes
    status: int | None = None  # one more exit status that is right then


def everything_is_killed(pids: list[int], generator: random.Random) -> None:
    send(pids, signal.SIGKILL)


def one_is_killed(pids: list[int], generator: random.Random) -> None:
    send([generator.choice(pids)], signal.SIGKILL)


def one_stands_still(pids: list[int], generator: random.Random) -> None:
    send([generator.choice(pids)], signal.SIGSTOP)


def told_to_end(pids: list[int], generator: random.Random) -> None:
    send(pids, signal.SIGTERM)


def interrupted(pids: list[int], generator: random.Random) -> None:
    send(pids, signal.SIGINT)


def disk_is_full(pids: list[int], generator: random.Random) -> None:
    """No file may become longer than this from now on."""
    room = generator.choice((0, 100, 2000, 10**4))
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, room))


def link_is_cut(pids: list[int], generator: random.Random) -> None:
    """All connections of one process end at once."""
    pid = generator.choice(pids)
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError, ValueError):  # not connected, gone
                if os.readlink(fd).startswith("socket:"):
                    copy = ctypes.CDLL(None).syscall(PIDFD_GETFD, handle, int(fd.name), 0)
                    with socket.socket(fileno=copy) as connection:
                        connection.getpeername()  # nothing that listens
                        connection.shutdown(socket.SHUT_RDWR)
        os.close(handle)


DISTURBANCES = {
    "everything killed": Disturbance(everything_is_killed, 0.40),
    "one process killed": Disturbance(one_is_killed, 0.15, several=True),
    "told to end": Disturbance(told_to_end, 0.15),
    "interrupted": Disturbance(interrupted, 0.08),
    "disk full": Disturbance(disk_is_full, 0.10, status=CdgrabError.status),
    "link cut": Disturbance(link_is_cut, 0.09, several=True),
    "one stands still": Disturbance(one_stands_still, 0.03, several=True),
}


def draw(generator: random.Random, processes: int) -> str:
    possible = {name: each.share for name, each in DISTURBANCES.items() if processes > 1 or not each.several}
    return generator.choices(list(possible), list(possible.values()))[0]
