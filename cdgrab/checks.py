"""Values that people type, refused in one sentence when they make no sense."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable

import torch
from torch import Tensor

from cdgrab.errors import CdgrabError

MOST = 2**31 - 1  # of anything that is counted


def is_whole(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def count(name: str, value: int, least: int, most: int = MOST) -> int:
    if not is_whole(value) or operator.index(value) < least:
        raise CdgrabError(f"{name} must be a whole number of at least {least}, got {value!r}")
    if operator.index(value) > most:
        raise CdgrabError(f"{name} must be a whole number of at most {most}, got {value!r}")
    return operator.index(value)


def number(name: str, value: float, above: float, below: float = math.inf) -> float:
    """`value` as a float, refused in one sentence unless it lies between the two."""
    sound = isinstance(value, int | float) and not isinstance(value, bool)
    if not sound or not above < value < below:
        raise CdgrabError(f"{name} must be a number between {above:g} and {below:g}, got {value!r}")
    return float(value)


def random_seed(name: str, value: int) -> int:
    return count(name, value, 0, 2**63 - 1)


def refuse_unknown_options(kind: str, name: str, options: Iterable[str], known: tuple[str, ...]) -> None:
    """One sentence that names the options there are."""
    unknown = sorted(set(options) - set(known))
    if unknown:
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise CdgrabError(f"{kind} {name} has no option {', '.join(unknown)}; {takes}")


def all_finite(tensor: Tensor) -> bool:
    """A finite sum has finite terms, and is much cheaper to look at; a sum that overflows needs the closer look."""
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())
