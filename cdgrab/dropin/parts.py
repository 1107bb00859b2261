"""A model's gradient where autograd leaves it: in one tensor per parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, reduce
from itertools import accumulate

import torch
from torch import Tensor, nn

DENSE = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


class Layout:
    """The place of every parameter in one vector. Coordinates have the order of a parameter's own memory. Autograd lays
    out its gradient in the same way, so that all gradients are copied in one launch."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        *self.starts, self.dim = accumulate((parameter.numel() for parameter in parameters), initial=0)
        self._key: tuple | None = None  # of the memory that was asked for last
        self._views: list[Tensor] = []
        self._like: Tensor | None = None  # what `like` returned last

    def views(self, row: Tensor) -> list[Tensor]:
        """The places in a row of dim numbers, each in the shape of its parameter."""
        every, row = zip(self.parameters, self.starts, strict=True), row.view(-1)
        return [_place(row, parameter, start) for parameter, start in every]

    def kept_views(self, row: Tensor) -> list[Tensor]:
        """The same for memory that is used in every step: they hold on to it."""
        key = (row.data_ptr(), row.dtype, row.device)
        if key != self._key:
            self._key, self._views = key, self.views(row)
        return self._views

    def like(self, there: Sequence[Tensor]) -> Tensor:
        """An empty tensor on the device of these gradients, of a type that can hold all of them."""
        there = there or self.parameters[:1]
        dtype = reduce(torch.promote_types, {part.dtype for part in there}, torch.float32)
        device, like = there[0].device, self._like
        if like is None or like.dtype != dtype or like.device != device:
            self._like = there[0].new_empty(0, dtype=dtype)
        return self._like


def _place(row: Tensor, parameter: nn.Parameter, start: int) -> Tensor:
    if _is_dense(parameter):
        return row.as_strided(parameter.shape, parameter.stride(), row.storage_offset() + start)
    return row[start : start + parameter.numel()].view(parameter.shape)


def _is_dense(tensor: Tensor) -> bool:
    return any(tensor.is_contiguous(memory_format=form) for form in DENSE)


class Parts:
    """A gradient [dim] in parts; None: zeros. scale: a factor in it, which is to be divided out."""

    def __init__(self, layout: Layout, gradients: Sequence[Tensor | None], scale: Tensor | float = 1.0) -> None:
        self._layout, self.scale = layout, scale
        self._scaled = isinstance(scale, Tensor) or scale != 1.0
        there = [part for part in gradients if part is not None]
        if {part.layout for part in there} - {torch.strided}:
            gradients = [part if part is None else part.to_dense() for part in gradients]
            there = [part for part in gradients if part is not None]
        self._parts, self._there = gradients, there

    @cached_property
    def like(self) -> Tensor:
        """An empty tensor on the parts' device, of a type that can hold all of them."""
        return self._layout.like(self._there)

    def write(self, row: Tensor, subtract: bool = False) -> None:
        """Write the gradient to a row of dim numbers, or subtract it from what is there, without the factor. Takes no
        memory."""
        if subtract and self._scaled:
            row *= self.scale
        self._write(self._layout.kept_views(row), subtract)
        if self._scaled:
            row /= self.scale

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """The parts as vectors, factor included, each with the number of its first coordinate; none for zeros."""
        for start, parameter, part in zip(self._layout.starts, self._layout.parameters, self._parts, strict=True):
            if part is not None and _is_dense(parameter):
                same = part.stride() == parameter.stride()
                laid_out = part if same else torch.empty_like(parameter, dtype=part.dtype).copy_(part)
                yield start, laid_out.as_strided((part.numel(),), (1,))
            elif part is not None:
                yield start, part.flatten()

    def vector(self) -> Tensor:
        """A copy, [dim], factor included."""
        row = self.like.new_empty(self._layout.dim)
        self._write(self._layout.views(row), False)
        return row

    def _write(self, places: list[Tensor], subtract: bool) -> None:
        there = self._there
        if len(there) < len(places):
            missing = [place for place, part in zip(places, self._parts, strict=True) if part is None]
            places = [place for place, part in zip(places, self._parts, strict=True) if part is not None]
            if not subtract:
                torch._foreach_zero_(missing)
        if there:
            (torch._foreach_sub_ if subtract else torch._foreach_copy_)(places, there)

    def finite(self) -> bool:
        """Whether everything is; a GPU would have to wait for the answer."""
        sums = (part.sum(dtype=torch.promote_types(part.dtype, torch.float32)) for part in self._there)
        return math.isfinite(sum(map(float, sums)))

    def cleaned(self) -> Parts:
        """With zeros for what is not finite."""
        parts = [None if part is None else part.nan_to_num(0.0, 0.0, 0.0) for part in self._parts]
        return Parts(self._layout, parts, self.scale)
