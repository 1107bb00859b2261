"""Checks of values that people type. A bad value is refused in one sentence."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from cdgrab.errors import CdgrabError

MOST = 2**31 - 1  # the largest count accepted anywhere
LONGEST = 200  # characters of a value in a message
Entry = TypeVar("Entry")


def shown(value: object) -> str:
    """For a message: in one line, and short."""
    try:
        words = " ".join(repr(value).split())
    except ValueError:  # an integer of thousands of digits
        words = f"a huge {type(value).__name__}"
    return words if len(words) <= LONGEST else f"{words[:LONGEST]}…"


def is_whole(value: object) -> bool:
    try:
        operator.index(value)
    except (TypeError, RuntimeError):  # tensors and arrays of several numbers
        return False
    return not isinstance(value, bool)


def count(name: str, value: int, least: int, most: int = MOST) -> int:
    if not is_whole(value) or operator.index(value) < least:
        raise CdgrabError(f"{name} must be a whole number of at least {least}, got {shown(value)}")
    if operator.index(value) > most:
        raise CdgrabError(f"{name} must be a whole number of at most {most}, got {shown(value)}")
    return operator.index(value)


def auto_or_count(name: str, value: int | str) -> None:
    if value != "auto" and not (is_whole(value) and value >= 1):
        raise CdgrabError(f"{name} must be auto or a whole number of at least 1, got {shown(value)}")


def number(
    name: str,
    value: float,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
    or_else: str = "",
) -> float:
    """`value` as a float, if it is finite and within the limits; `or_else`: what else is allowed, for the message."""
    sound = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not sound or not (at_least <= value <= at_most and above < value < below):
        limits = {"at least": at_least, "above": above, "below": below, "at most": at_most}
        words = " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if math.isfinite(limit))
        raise CdgrabError(f"{name} must be {or_else}a number {words}, got {shown(value)}")
    return float(value)


def one_of(name: str, value: object, allowed: Collection[object]) -> None:
    if not any(type(value) is type(each) and value == each for each in allowed):  # 1 is not true
        *first, last = (str(each).lower() if isinstance(each, bool) else str(each) for each in allowed)
        raise CdgrabError(f"{name} must be {', '.join(first)} or {last}, got {shown(value)}")


def look_up(kind: str, name: str, table: Mapping[str, Entry]) -> Entry:
    """The entry of `table` with this name."""
    if not isinstance(name, str) or name not in table:
        raise CdgrabError(f"unknown {kind} {shown(name)}; the {kind}s are {', '.join(table)}")
    return table[name]


def shape(name: str, tensor: Tensor, wanted: Mapping[str, int]) -> None:
    """Refuse a tensor of another shape. wanted: the names of the dimensions and their sizes."""
    sizes = list(wanted.values())
    if list(tensor.shape) != sizes:
        raise CdgrabError(f"{name} must have shape [{', '.join(wanted)}] = {sizes}, got {list(tensor.shape)}")


def differences(there: Mapping[str, object], here: Mapping[str, object]) -> str:
    """dim 4 there, 3 here, …: what two sets of values do not agree in."""
    differing = sorted(key for key in {**there, **here} if there.get(key) != here.get(key))
    return ", ".join(f"{key} {shown(there.get(key))} there, {shown(here.get(key))} here" for key in differing)


def random_seed(name: str, value: int) -> int:
    return count(name, value, 0, 2**63 - 1)


def refuse_unknown_options(kind: str, name: str, options: Iterable[str], known: tuple[str, ...]) -> None:
    """The message lists the options that exist."""
    unknown = sorted(set(options) - set(known))
    if unknown:
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise CdgrabError(f"{kind} {name} has no option {', '.join(unknown)}; {takes}")


def is_dense(value: object) -> bool:
    """Whether this is a tensor with numbers in memory. Their memory may have been given back, as FSDP does."""
    if not isinstance(value, Tensor) or value.is_nested or value.is_meta or value.layout != torch.strided:
        return False
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    needed = (value.storage_offset() + last + 1) * value.element_size() if value.numel() else 0
    return value.untyped_storage().nbytes() >= needed


def all_finite(tensor: Tensor) -> bool:
    """A finite sum has finite terms and is much cheaper to check. Only if the sum is not finite is every term checked:
    it may have overflowed."""
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


def observed(positions: Tensor | Sequence[int], gradients: Tensor, unseen: bool) -> tuple[Tensor, Tensor, bool]:
    """Both as dense tensors, and whether the gradients are finite floating-point numbers; unseen: take finite for
    granted."""
    positions, gradients = _dense("positions", positions), _dense("gradients", gradients).detach()
    return positions, gradients, gradients.is_floating_point() and (unseen or all_finite(gradients))


def _dense(name: str, value: Tensor | Sequence[int]) -> Tensor:
    try:
        tensor = torch.as_tensor(list(value) if isinstance(value, range) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CdgrabError(f"{name} must be a tensor or become one, got {type(value).__name__}") from error
    if not is_dense(tensor):
        raise CdgrabError(f"{name} must be a dense tensor with its numbers in memory")
    return tensor
