"""Partitions of several runs' coordinates: what the owner of each sees, and what is selected there.

In plain operations, which a CPU computes; and by kernels on a GPU, where each of these would be read several times.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from experiments.training.on_device.counting import Groups, among


class Partitions:
    """Between neighbouring cuts [runs, workers + 1] of each run; in each iteration, worker w owns partition w +
    iteration."""

    def __init__(self, cuts: Tensor, dim: int, iteration: Tensor) -> None:
        self._cuts, self._dim, self._iteration = cuts, dim, iteration

    def seen_by_owners(self, accumulated: Tensor) -> Tensor:
        """The magnitudes [runs, dim] of what the workers have accumulated [runs, workers, dim]: every coordinate's as
        its owner has it."""
        if accumulated.is_cuda:
            return _kernels().seen_by_owners(accumulated, self._cuts, self._iteration)
        owners = (self._numbers() - self._iteration) % accumulated.shape[1]
        return accumulated.gather(1, owners[:, None])[:, 0].abs()

    def sampled(self, magnitudes: Tensor, every: Tensor) -> Tensor:
        """Zeros but for one of `every` [runs] so many coordinates of each partition, others in each iteration."""
        if magnitudes.is_cuda:
            return _kernels().sampled(magnitudes, self._cuts, every, self._iteration)
        in_partition = torch.arange(self._dim) - self._cuts.gather(1, self._numbers())
        return magnitudes.masked_fill(in_partition % every[:, None] != self._iteration % every[:, None], 0)

    def largest(self, magnitudes: Tensor, most: Tensor, fit: Tensor, near: Tensor) -> Tensor:
        """Which are among the `most` [runs, workers] largest of their partitions; in those that `fit`, all are. near
        [runs]: values that the least of them are near, probably."""
        rows = self._dim * torch.arange(len(magnitudes), device=magnitudes.device)[:, None]
        starts, ends = ((rows + cuts).flatten() for cuts in (self._cuts[:, :-1], self._cuts[:, 1:]))
        values, places = Groups(magnitudes, starts, ends).largest(
            most.flatten(), fit.flatten(), near.repeat_interleave(most.shape[1])
        )
        values, places = values.view_as(most), places.view_as(most)
        if magnitudes.is_cuda:
            return _kernels().among(magnitudes, self._cuts, values, places)
        return among(magnitudes, *(each.gather(1, self._numbers()) for each in (values, places)))

    def _numbers(self) -> Tensor:
        """Of the partition in which each coordinate is."""
        coordinates = torch.arange(self._dim).expand(len(self._cuts), -1).contiguous()
        return torch.searchsorted(self._cuts[:, 1:-1].contiguous(), coordinates, right=True)


def among_anyones(vectors: Tensor, values: Tensor, places: Tensor) -> Tensor:
    """Which coordinates [runs, dim] are among some worker's largest; vectors [runs, workers, dim], values and places
    [runs, workers]."""
    if vectors.is_cuda:
        return _kernels().among_anyones(vectors, values, places)
    return among(vectors.abs(), values[..., None], places[..., None]).any(1)


def _kernels() -> ModuleType:
    from experiments.training.on_device import partition_kernels  # needs Triton

    return partition_kernels
