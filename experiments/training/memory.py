"""How much memory there is, and that what a process frees stays with it."""

from __future__ import annotations

import ctypes
import os
import sys

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def keep_freed_memory() -> None:
    """Let the allocator reuse large blocks instead of handing them back to the system after every operation.

    A step of the LSTM allocates the same tens of megabytes again and again; zeroed pages cost it more time than the
    arithmetic. Only where the C library has the setting (glibc); elsewhere nothing happens.
    """
    _set_thresholds(2**30, 2**31 - 1)


def return_freed_memory() -> None:
    """Hand every large block back to the system as soon as it is freed, so that a peak is what was needed at once.

    Left alone, glibc raises these thresholds while a program runs.
    """
    _set_thresholds(2**20, 2**20)


def _set_thresholds(mapped: int, trimmed: int) -> None:
    """Block size from which on memory is mapped by itself; free memory at the heap's end that is kept."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, mapped)
        mallopt(M_TRIM_THRESHOLD, trimmed)


def free_memory(device: torch.device) -> int:
    """Bytes; on a CPU those that the system could give without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    pages = "SC_AVPHYS_PAGES"
    if sys.platform == "linux":
        with open("/proc/meminfo") as file:
            return 1024 * next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") if pages in os.sysconf_names else 2**30
