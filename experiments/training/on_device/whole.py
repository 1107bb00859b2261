"""fp16 and PowerSGD of several runs together: every coordinate gets a value. See `cdgrab.sparsify.peers`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cdgrab.sparsify.compressor import rounded, summed_bytes
from cdgrab.sparsify.peers import PowerSGD, Whole
from experiments.training.gradients import sum_by_run
from experiments.training.on_device.base import VALUE, Kind, finite_or_nan

ROUNDING = 8  # times what a number is rounded by: what is left of a column, if not larger, has no direction


class Wholes(Kind):
    """A subclass implements `mean`."""

    def __init__(self, compressors: Sequence[Whole], device: torch.device) -> None:
        super().__init__(len(compressors), compressors[0].workers, compressors[0].dim, device)

    def average(self, gradients: Tensor, rows: Tensor) -> Tensor:
        gradients = gradients.index_select(0, rows)
        mean, sent = self.mean(gradients)
        self._add(density=1.0, imbalance=0.0, threshold=None, bytes=self.workers - 1 + sent)
        self.iteration += 1
        return finite_or_nan(mean, gradients)

    def mean(self, gradients: Tensor) -> tuple[Tensor, int]:
        """The means [runs, dim] of gradients [runs, workers, dim], and the bytes that a worker sends for one."""
        raise NotImplementedError


class Halves(Wholes):
    """fp16"""

    def mean(self, gradients: Tensor) -> tuple[Tensor, int]:
        half, own = torch.float16, gradients.dtype
        mean = sum_by_run(rounded(gradients, half).to(own)) / self.workers
        return rounded(mean, half).to(own), summed_bytes(self.workers, half.itemsize * self.dim)


class PowerSgds(Wholes):
    """All of the same rank and shapes."""

    def __init__(self, compressors: Sequence[PowerSGD], device: torch.device) -> None:
        super().__init__(compressors, device)
        first = compressors[0]
        self._matrices, self._others = first._matrices, first._others
        self._sizes = [each.columns * each.rank for each in self._matrices]
        self._factors = torch.stack([each._factors for each in compressors]).to(device)
        self._forgets = torch.tensor([not each.error_feedback for each in compressors], device=device)[:, None, None]
        self._residual = torch.zeros(self.runs, self.workers, self.dim, device=device)

    def mean(self, gradients: Tensor) -> tuple[Tensor, int]:
        self._residual.masked_fill_(self._forgets, 0).add_(gradients)
        matrices = [self._residual[..., each.place].unflatten(2, (each.rows, -1)) for each in self._matrices]
        others = [self._residual[..., place] for place in self._others]
        products = [(m @ orthonormal(q)[:, None]).flatten(2) for m, q in zip(matrices, self._columns(), strict=True)]
        found, sent = self._averaged([*others, *products])
        mean = self._residual.new_empty(self.runs, self.dim)
        for place, values in zip(self._others, found, strict=False):
            mean[:, place] = values
        if matrices:
            sums = zip(self._matrices, found[len(others) :], strict=True)
            rows = [orthonormal(values.unflatten(1, (each.rows, -1))) for each, values in sums]
            factors, more = self._averaged(
                [(m.mT @ p[:, None]).flatten(2) for m, p in zip(matrices, rows, strict=True)]
            )
            self._factors.copy_(torch.cat(factors, dim=1))
            for each, p, q in zip(self._matrices, rows, self._columns(), strict=True):
                mean[:, each.place] = (p @ q.mT).flatten(1)
            sent += more
        for each in self._matrices:
            self._residual[..., each.place] -= mean[:, None, each.place]
        for place in self._others:
            self._residual[..., place] = 0
        return mean, sent

    def _columns(self) -> list[Tensor]:
        """The factors [runs, columns, rank] of all matrices."""
        parts = self._factors.split(self._sizes, dim=1)
        return [part.unflatten(1, (each.columns, -1)) for each, part in zip(self._matrices, parts, strict=True)]

    def _averaged(self, parts: list[Tensor]) -> tuple[list[Tensor], int]:
        """Means over the workers of parts [runs, workers, numbers], and the bytes that a worker sends for them."""
        rows = torch.cat(parts, dim=2)
        means = (sum_by_run(rows) / self.workers).split([part.shape[2] for part in parts], dim=1)
        return list(means), summed_bytes(self.workers, VALUE * rows.shape[2])


def orthonormal(matrices: Tensor) -> Tensor:
    """Columns with the same span as those of each of the matrices [runs, rows, columns], by the Gram-Schmidt process,
    which asks nothing of the device. In place of a column that depends on those before it, the direction of the row
    that they have least of."""
    done, taken = [], torch.zeros_like(matrices[..., 0])
    for column in matrices.unbind(2):
        unit = torch.zeros_like(column).scatter_(1, taken.argmin(1, keepdim=True), 1)
        left = _without(column, done)
        depends = _norm(left) <= ROUNDING * torch.finfo(column.dtype).eps * _norm(column)
        left = torch.where(depends, _without(unit, done), left)
        done.append(left / _norm(left))
        taken = taken + done[-1] ** 2
    return torch.stack(done, dim=2)


def _without(column: Tensor, others: list[Tensor]) -> Tensor:
    """What is orthogonal to the others. Twice: once would leave nearly parallel columns too far from that."""
    for other in (*others, *others):
        column = column - (column * other).sum(1, keepdim=True) * other
    return column


def _norm(column: Tensor) -> Tensor:
    return torch.linalg.vector_norm(column, dim=1, keepdim=True)
