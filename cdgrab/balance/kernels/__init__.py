"""Fast versions of the loops in `rules`, chosen by device and by what is installed; each is tested equal to them.

numba (`cpu`, `divided`) and Triton (`gpu`, `divided_gpu`) are optional, and are imported when they are first needed:
importing numba alone takes as long as importing the rest of the library.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from cdgrab.balance import optional, rules
from cdgrab.balance.kernels import gram


@cache
def for_device(device: torch.device) -> ModuleType:
    """The module whose `balance`, `balance_centred` and `balance_kh` are the fastest on this device."""
    if device.type == "cpu":
        if found := optional("cpu"):
            return found
        _warn("numba is not installed: signs are decided by plain loops, which take longer; pip install numba")
        return rules
    if found := optional("gpu"):
        return found
    _warn("Triton is not installed: signs on a GPU are decided by slower block operations, which wait for the host")
    return gram


@cache
def _for_shards(on_gpu: bool) -> Callable[..., Tensor]:
    if found := optional("divided_gpu" if on_gpu else "divided"):
        return found.balance_divided
    if not on_gpu:
        _warn("numba is not installed: signs are decided by slower operations on blocks of rows; pip install numba")
    return lambda rows, running, limits, total, settle, dim: gram.balance(rows, running, limits, total)


def _warn(sentence: str) -> None:
    warnings.warn_explicit(sentence, RuntimeWarning, "cdgrab", 0)  # no line of code: which one asked says nothing


def balance(rows: Tensor, running: Tensor, limits: Tensor) -> Tensor:
    """See `rules.balance`."""
    return for_device(rows.device).balance(rows, running, limits)


def _whole(products: Tensor) -> Tensor:
    return products


def _settle_whole(rows: Tensor, running: Tensor, limits: Tensor) -> Tensor:
    return balance(rows[None], running.clone(), limits[None])[0]


def balance_divided(
    rows: Tensor,
    running: Tensor,
    limits: Tensor,
    total: Callable[[Tensor], Tensor] = _whole,
    settle: Callable[[Tensor, Tensor, Tensor], Tensor] = _settle_whole,
    dim: int | None = None,
) -> Tensor:
    """Like `balance` with one running sum, where each process holds only some of `dim` coordinates: rows [positions,
    workers, width], running [1, width]. By default there is one process, and it holds all.

    total   sums a tensor over all processes
    settle  the signs [n] of rows [n, width] whose inner products with the running sum are within rounding error of
            their limits [n]: those of `balance`, from whole rows, the same on every process

    With numba signs are those of `balance`, to the last one. Without it, and on a GPU, nothing is settled: inner
    products within rounding error of their limits count as ties. With Triton the host does not wait for the GPU, unless
    `total` does.
    """
    return _for_shards(rows.is_cuda)(rows, running, limits, total, settle, dim or rows.shape[2])


def balance_centred(
    gradients: Tensor, running: Tensor, stale_mean: Tensor, fresh_sum: Tensor, limits: Tensor
) -> Tensor:
    """See `rules.balance_centred`."""
    return for_device(gradients.device).balance_centred(gradients, running, stale_mean, fresh_sum, limits)
