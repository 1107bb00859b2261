"""What the values of a state must look like. States come from files, and whoever continues from them trusts them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cdgrab.checks import is_dense
from cdgrab.errors import CdgrabError

FLOAT64, INT64, INT8 = (torch.float64,), (torch.int64,), (torch.int8,)
LARGEST = sys.float_info.max  # NaN and infinity are beyond
PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Field:
    """A tensor, a list of numbers, or a single number."""

    kinds: tuple[torch.dtype, ...] | tuple[type, ...]  # of tensors, or of plain numbers
    sizes: tuple[int, ...] | None = None  # None: a single number
    least: float = -LARGEST
    most: float = LARGEST
    rule: Callable[[object], bool] = lambda _: True  # asked last
    words: str = ""  # what the rule asks for

    def fits(self, value: object) -> bool:
        if isinstance(self.kinds[0], type):
            numbers = [value] if self.sizes is None else value
            right = isinstance(numbers, list) and (self.sizes is None or (len(numbers),) == self.sizes)
            right = right and all(type(each) in self.kinds and self.least <= each <= self.most for each in numbers)
            return right and self.rule(value)
        if not is_dense(value) or value.dtype not in self.kinds or tuple(value.shape) != self.sizes:
            return False
        if value.numel():
            lowest, highest = (end.item() for end in value.aminmax())
            if not (self.least <= lowest and highest <= self.most):
                return False
        return self.rule(value)

    def __str__(self) -> str:
        kinds = " or ".join(getattr(kind, "__name__", str(kind).removeprefix("torch.")) for kind in self.kinds)
        finite = self.least >= -LARGEST and self.most <= LARGEST
        bounded = finite and (self.least > -LARGEST or self.most < LARGEST)
        within = f" within [{self.least:g}, {self.most:g}]" if bounded else ", finite" if finite else ""
        sizes, words = "" if self.sizes is None else f" {list(self.sizes)}", self.words and f", {self.words}"
        return f"{kinds}{sizes}{within}{words}"


def refuse_others(what: str, values: Mapping[str, object], fields: Mapping[str, Field]) -> None:
    """Refuse values that do not look like their fields."""
    if not isinstance(values, Mapping) or not fields.keys() <= values.keys():
        raise CdgrabError(f"{what} is damaged: it must hold {', '.join(fields)}")
    for name, field in fields.items():
        if not field.fits(values[name]):
            raise CdgrabError(f"{what} is damaged: {name} must be {field}")


def is_plain(value: object) -> bool:
    """Whether this is a value that can be compared and printed: numbers, text, and lists or dicts of them."""
    return consists_of(value, PLAIN, lambda key: isinstance(key, str) and key.isprintable())


def consists_of(value: object, kinds: tuple[type, ...], key_fits: Callable[[object], bool], deepest: int = 20) -> bool:
    """Whether this is of these kinds, or lists and dicts of them. A list may hold itself: `deepest` ends the search."""
    if not isinstance(value, dict | list | tuple):
        return isinstance(value, kinds)
    keys, items = (value.keys(), value.values()) if isinstance(value, dict) else ((), value)
    return deepest > 0 and all(map(key_fits, keys)) and all(consists_of(i, kinds, key_fits, deepest - 1) for i in items)


def is_similar(value: object, known: object) -> bool:
    """Whether this may be another moment's value of what is `known` here: all that can be told of a value without a
    field. Tensors that are empty, and what is None, may become anything later."""
    if isinstance(known, Tensor):
        same = is_dense(value) and value.dtype.is_floating_point == known.dtype.is_floating_point
        return same and (not known.numel() or value.shape == known.shape)
    numbers = isinstance(known, int | float) and isinstance(value, int | float)
    return known is None or value is None or numbers or type(value) is type(known)
