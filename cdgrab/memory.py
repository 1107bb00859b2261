"""Memory that a process frees stays with it."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def keep_freed_memory() -> None:
    """Let the allocator reuse large blocks instead of handing them back to the system after every operation.

    A step of the LSTM allocates the same tens of megabytes again and again; zeroed pages cost it more time than the
    arithmetic. Only where the C library has the setting (glibc); elsewhere nothing happens.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
