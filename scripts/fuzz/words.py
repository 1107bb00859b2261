"""Everything in a state, in words."""

from __future__ import annotations

from torch import Tensor


def words(value: object) -> str:
    """Everything in a state, to the last digit."""
    if isinstance(value, dict):
        return str({repr(key): words(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return str([words(item) for item in value])
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.tolist()}"
    return repr(float(value)) if isinstance(value, int) and value < 2**53 else repr(value)  # True equals 1.0
