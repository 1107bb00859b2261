"""Compiled loops read and write wherever they are told to: sizes are checked once per call, before they start."""

from __future__ import annotations

from torch import Tensor

from cdgrab.checks import shape


def check_sizes(rows: Tensor, limits: Tensor, sums: int, *tensors: Tensor) -> None:
    """rows [positions, workers, dim]; limits [positions, workers]; tensors [sums, dim]."""
    positions, workers, dim = rows.shape
    shape("limits", limits, {"positions": positions, "workers": workers})
    for tensor in tensors:
        shape("what rows are added to", tensor, {"sums": sums, "dim": dim})
