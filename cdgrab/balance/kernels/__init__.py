"""Fast versions of the loops in `balance.py`, chosen by device; each is tested equal to the plain one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

from torch import Tensor

from cdgrab.balance import rules as plain
from cdgrab.balance.kernels import gram

try:
    from cdgrab.balance.kernels import cpu, divided
except ImportError:  # numba is optional
    cpu = divided = None
try:
    from cdgrab.balance.kernels import gpu
except ImportError:  # so is Triton
    gpu = None


def _module(tensor: Tensor):
    if tensor.device.type != "cpu":
        if gpu is None:
            _warn_once("Triton is not installed: signs on a GPU take some operations per block of rows, and a wait")
        return gram if gpu is None else gpu
    if cpu is None:
        _warn_once("numba is not installed: signs are decided by plain loops, some hundred times slower")
    return plain if cpu is None else cpu


@cache
def _warn_once(sentence: str) -> None:
    warnings.warn(sentence, RuntimeWarning, stacklevel=4)


def balance(rows: Tensor, running: Tensor, limits: Tensor) -> Tensor:
    """See `cdgrab.balance.rules.balance`."""
    return _module(rows).balance(rows, running, limits)


def balance_divided(rows: Tensor, running: Tensor, limits: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """Like `balance` with one running sum, for rows [positions, workers, width] and running [1, width] of which other
    processes hold the other coordinates; `total` adds up a tensor over them."""
    if divided is None and not rows.is_cuda:
        _warn_once("numba is not installed: signs are decided by operations on blocks of rows, which is slower")
    if divided is None or rows.is_cuda:
        return gram.balance(rows, running, limits, total)
    return divided.balance_divided(rows, running, limits, total)


def balance_centred(
    gradients: Tensor, running: Tensor, stale_mean: Tensor, fresh_sum: Tensor, limits: Tensor
) -> Tensor:
    """See `cdgrab.balance.rules.balance_centred`."""
    return _module(gradients).balance_centred(gradients, running, stale_mean, fresh_sum, limits)


def balance_kh(rows: Tensor, running: Tensor, q: Tensor, penalties: Tensor, uniforms: Tensor) -> Tensor:
    """See `cdgrab.balance.rules.balance_kh`."""
    return _module(rows).balance_kh(rows, running, q, penalties, uniforms)
