"""What PyTorch's own hooks do, to compare sparsifiers with: half the bits (`fp16_compress_hook`), and factors of low
rank (`powerSGD_hook`). Every coordinate gets a value, so there is no density to ask for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from cdgrab.checks import count, shown
from cdgrab.errors import CdgrabError
from cdgrab.runtime.fields import Field
from cdgrab.runtime.mean import Averager, tree_sum
from cdgrab.sparsify.compressor import Compressor, Parts, Stats, rounded, summed_bytes

LEAST_SAVING = 2  # times: a matrix whose factors would save less is sent as it is


class Whole(Compressor):
    """A subclass implements `mean`."""

    def __init__(self, *, density: float = 1.0, **settings) -> None:
        super().__init__(**settings, density=1.0)  # whatever is asked for

    def mean(self, accumulated: Tensor) -> tuple[Tensor, int]:
        """accumulated [local workers, dim] -> an approximate mean [dim] over all workers, and the bytes that a worker
        sends for it. With error feedback, what is not sent is left in `accumulated`."""
        raise NotImplementedError

    def reduce(self, gradients: Tensor) -> Tensor:
        gradients = self._checked(gradients)
        return self._exchange([(slice(0, self.dim), gradients)], gradients.dtype).to(gradients.dtype)

    def reduce_parts(self, parts: Parts, dtype: torch.dtype) -> None:
        self._refuse_not_finite([part for _, part in parts])
        mean = self._exchange(parts, dtype)
        for place, part in parts:
            part.copy_(mean[place].view_as(part))

    def _exchange(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """The mean, as the types of these parts can hold it. With error feedback, what they cannot is sent later."""
        accumulated = self._accumulate(parts, dtype)
        mean, sent = self.mean(accumulated)
        for place, part in (each for each in parts if each[1].dtype != mean.dtype):
            held = rounded(mean[place], part.dtype).to(mean.dtype)
            if self.error_feedback:
                accumulated[:, place] += mean[place] - held
            mean[place] = held
        counts = [self.dim] * self.workers
        self.stats = Stats(
            density=1.0, counts=counts, threshold=None, imbalance=0.0, bytes=self._checking_bytes() + sent
        )
        self.iteration += 1
        return mean

    def _average(self, rows: Tensor, wire: torch.dtype | None = None) -> tuple[Tensor, int]:
        """The mean over all workers of rows [local workers, numbers], and the bytes that a worker sends for it."""
        size = rows.shape[1] * (wire or rows.dtype).itemsize
        mean, _ = Averager(self.group, rows.shape[1], wire=wire).average(tree_sum(rows))
        return mean, summed_bytes(self.workers, size)


class HalfPrecision(Whole):
    """Every worker sends its gradient in float16, and gets the mean in float16. Sums have the gradients' own type: what
    a worker sends does not overflow with the number of workers, as it does in PyTorch's hook."""

    label = "fp16"
    options = ()

    def __init__(self, **settings) -> None:
        super().__init__(**settings, error_feedback=False)

    def mean(self, accumulated: Tensor) -> tuple[Tensor, int]:
        own, half = accumulated.dtype, torch.float16
        rows = rounded(accumulated, half).to(own)
        # the sum of several workers would not fit into 16 bits: only a worker alone sends them
        mean, _ = self._average(rows, wire=half if self.local_workers == 1 else None)
        return rounded(mean, half).to(own), summed_bytes(self.workers, half.itemsize * self.dim)


class Matrix(NamedTuple):
    """A parameter that is sent as factors [rows, rank] and [columns, rank]."""

    place: slice
    rows: int
    columns: int
    rank: int


class PowerSGD(Whole):
    """PowerSGD (Vogels et al. 2019, arXiv 1905.13727), with warm start: one step of the power iteration per gradient,
    from the factors of the last one. Vectors are sent whole, and so are matrices of which factors would not save half.
    """

    label = "PowerSGD"
    options = (*Whole.options, "rank", "shapes")
    per_worker = ()
    saved = ("_residual", "_factors")

    def __init__(self, *, rank: int = 1, shapes: Sequence[Sequence[int]] | None = None, **settings) -> None:
        """shapes: of the parameter tensors, in their order in the vector; by default one vector. The rows of a matrix
        are its first dimension, all others are its columns."""
        super().__init__(**settings)
        self.rank = count("rank", rank, 1)
        self.shapes = _checked_shapes([[self.dim]] if shapes is None else shapes, self.dim)
        self._matrices, self._others = _divided(self.shapes, self.rank)
        draws = torch.Generator().manual_seed(0)
        self._factors = torch.randn(sum(each.columns * each.rank for each in self._matrices), generator=draws)

    def mean(self, accumulated: Tensor) -> tuple[Tensor, int]:
        """By rows P and columns Q, M ≈ P Qᵀ: P = M Q, made orthonormal; then Q = Mᵀ P."""
        matrices = [accumulated[:, each.place].unflatten(1, (each.rows, -1)) for each in self._matrices]
        others = [accumulated[:, place] for place in self._others]
        mean = accumulated.new_empty(self.dim)
        columns = map(_orthonormal, self._columns(accumulated))
        products = [_times(m, q).flatten(1) for m, q in zip(matrices, columns, strict=True)]
        found, sent = self._average(torch.cat([*others, *products], dim=1))
        first = found.split([part.shape[1] for part in (*others, *products)])
        for place, values in zip(self._others, first, strict=False):
            mean[place] = values
        if matrices:
            sums = zip(self._matrices, first[len(others) :], strict=True)
            rows = [_orthonormal(values.view(each.rows, -1)) for each, values in sums]
            second = torch.cat([_times(m.mT, p).flatten(1) for m, p in zip(matrices, rows, strict=True)], dim=1)
            self._factors, more = self._average(second)
            sent += more
            for each, p, q in zip(self._matrices, rows, self._columns(accumulated), strict=True):
                mean[each.place] = (p @ q.mT).flatten()
        if self.error_feedback:
            for each in self._matrices:
                accumulated[:, each.place] -= mean[each.place]
            for place in self._others:
                accumulated[:, place] = 0
        return mean, sent

    def _columns(self, like: Tensor) -> list[Tensor]:
        """The factors Q [columns, rank] of all matrices."""
        sizes = [each.columns * each.rank for each in self._matrices]
        parts = self._factors.to(like).split(sizes)
        return [part.view(each.columns, -1) for each, part in zip(self._matrices, parts, strict=True)]

    def fields(self, *, iteration: int) -> dict[str, Field]:
        factors = Field((torch.float32, torch.float64), tuple(self._factors.shape))
        return super().fields(iteration=iteration) | {"_factors": factors}


def _times(matrices: Tensor, factor: Tensor) -> Tensor:
    """Each of the matrices [workers, rows, columns] times the factor. On a CPU one by one: in a batch, last bits depend
    on how many there are, and so on the number of processes."""
    return matrices @ factor if matrices.is_cuda else torch.stack([matrix @ factor for matrix in matrices])


def _orthonormal(matrix: Tensor) -> Tensor:
    """Columns with the same span; of a column of zeros, any other direction."""
    return torch.linalg.qr(matrix).Q


def _checked_shapes(shapes: Sequence[Sequence[int]], dim: int) -> list[list[int]]:
    lists = isinstance(shapes, Sequence) and not isinstance(shapes, str)
    if not lists or not all(isinstance(each, Sequence) and not isinstance(each, str) for each in shapes):
        raise CdgrabError(f"shapes must be a list of lists of sizes, got {shown(shapes)}")
    checked = [[count("a size in shapes", size, 1) for size in each] for each in shapes]
    if (total := sum(map(prod, checked))) != dim:
        raise CdgrabError(f"shapes must have dim = {dim} numbers together, got {total}")
    return checked


def _divided(shapes: list[list[int]], rank: int) -> tuple[list[Matrix], list[slice]]:
    """What is sent as factors, and the places of what is not."""
    matrices, others = [], []
    starts = accumulate(map(prod, shapes), initial=0)
    for each, start in zip(shapes, starts, strict=False):
        place, rows, columns = slice(start, start + prod(each)), each[0] if each else 1, prod(each[1:])
        own = min(rows, columns, rank)
        if LEAST_SAVING * own * (rows + columns) < rows * columns:
            matrices.append(Matrix(place, rows, columns, own))
        else:
            others.append(place)
    return matrices, others
