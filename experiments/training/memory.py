"""How much memory is free, and whether the allocator keeps freed memory."""

from __future__ import annotations

import ctypes
import gc
import os
import sys

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_sharing = 1  # processes


def keep_freed_memory() -> None:
    """Let the allocator reuse large blocks instead of returning them to the system after every operation.

    A step of the LSTM allocates the same tens of megabytes again and again; zeroing new pages would take longer than
    the arithmetic. This needs glibc; elsewhere nothing happens.
    """
    _set_thresholds(2**30, 2**31 - 1)


def return_freed_memory() -> None:
    """Return every large block to the system as soon as it is freed, so that a measured peak was really needed.

    glibc begins with these thresholds, but raises them while a program runs. With higher ones some freed blocks
    would be kept, and leave holes that come and go by chance.
    """
    _set_thresholds(2**17, 2**17)


def _set_thresholds(mapped: int, trimmed: int) -> None:
    """mapped: blocks of at least this size are mapped separately; trimmed: free memory kept at the end of the heap."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, mapped)
        mallopt(M_TRIM_THRESHOLD, trimmed)


def share_memory(processes: int) -> None:
    """This is one of so many processes that train at the same time."""
    global _sharing
    _sharing = processes


def free_memory(device: torch.device) -> int:
    """This process's share of the free bytes."""
    return _free_memory(device) // _sharing


def _free_memory(device: torch.device) -> int:
    """On a CPU, what is available without swapping."""
    if device.type == "cuda":
        gc.collect()  # what trained before has cycles, and torch keeps its memory
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    pages = "SC_AVPHYS_PAGES"
    if sys.platform == "linux":
        with open("/proc/meminfo") as file:
            return 1024 * next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") if pages in os.sysconf_names else 2**30
