"""A card whose frames come back after a while: a link's delay where the kernel has no `netem`.

    python delay_line.py NAME MILLISECONDS

makes a TAP device NAME in its network namespace, which goes when this process does, and says "ready", or why it
cannot. What the kernel sends to the card comes back from it, in the same order. Nothing of a frame is looked at: TCP's
packets stay as large as between virtual cards. If more than MOST wait here, as many again wait in the kernel, and what
comes then is lost, as in a switch.

It ends with its standard input, and so with whoever started it, even if that is killed. It has priority over all
computing processes, as the kernel would: a frame that waits for a processor comes too late.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from collections import deque
from select import select
from time import monotonic

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
CHECKSUMS, TSO4, TSO6, TSO_ECN = 1, 2, 4, 8  # left to the receiver
LARGEST = 2**16 + 64  # bytes of a frame with its headers
MOST = 1000  # frames that wait: 64 MB at most
AT_ONCE = 64  # frames that are taken before some are sent on
OWN_SECONDS = 40e-6  # that it takes itself, most of it for waking up twice: 30 µs on busy cores, 50 on idle ones
PARENT = 0  # standard input


def tap(name: str) -> int:
    card = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(card, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(card, TUNSETOFFLOAD, CHECKSUMS | TSO4 | TSO6 | TSO_ECN)
    return card


def forward(card: int, seconds: float) -> None:
    """Until the standard input ends. The memory that was used last is used first: it is in the cache."""
    free = [memoryview(bytearray(LARGEST)) for _ in range(MOST)]
    waiting: deque[tuple[float, memoryview, int]] = deque()
    while True:
        left = max(0.0, waiting[0][0] - monotonic()) if waiting else None
        ready, _, _ = select([PARENT, card] if free else [PARENT], (), (), left)
        if PARENT in ready:
            return
        if card in ready:
            try:
                for _ in range(min(AT_ONCE, len(free))):
                    length = os.readv(card, free[-1:])
                    waiting.append((monotonic() + seconds, free.pop(), length))
            except BlockingIOError:
                pass
        while waiting and waiting[0][0] <= monotonic():
            _, frame, length = waiting.popleft()
            os.write(card, frame[:length])
            free.append(frame)


def main(name: str, milliseconds: str) -> None:
    try:
        card = tap(name)
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError as error:
        print(error)
        return
    print("ready", flush=True)
    forward(card, max(0.0, float(milliseconds) / 1e3 - OWN_SECONDS))


if __name__ == "__main__":
    main(*sys.argv[1:])
