"""Triton kernels for partitions of several runs' coordinates. See `experiments.training.on_device.partitions`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # coordinates of a program


def seen_by_owners(accumulated: Tensor, cuts: Tensor, iteration: Tensor) -> Tensor:
    runs, workers, dim = accumulated.shape
    seen = accumulated.new_empty(runs, dim)
    _seen_by_owners[grid(dim, runs)](seen, accumulated, cuts.contiguous(), iteration, dim, workers, BLOCK)
    return seen


def sampled(magnitudes: Tensor, cuts: Tensor, every: Tensor, iteration: Tensor) -> Tensor:
    found, (runs, dim) = torch.empty_like(magnitudes), magnitudes.shape
    parts = cuts.contiguous(), every.contiguous(), iteration
    _sampled[grid(dim, runs)](found, magnitudes, *parts, dim, cuts.shape[1] - 1, BLOCK)
    return found


def among(magnitudes: Tensor, cuts: Tensor, values: Tensor, places: Tensor) -> Tensor:
    found, (runs, dim) = torch.empty_like(magnitudes, dtype=torch.bool), magnitudes.shape
    parts = cuts.contiguous(), values.contiguous(), places.contiguous()
    _among[grid(dim, runs)](found, magnitudes, *parts, dim, cuts.shape[1] - 1, BLOCK)
    return found


def among_anyones(vectors: Tensor, values: Tensor, places: Tensor) -> Tensor:
    runs, workers, dim = vectors.shape
    found = torch.empty(runs, dim, dtype=torch.bool, device=vectors.device)
    parts = values.contiguous(), places.contiguous()
    _among_anyones[grid(dim, runs)](found, vectors, *parts, dim, workers, BLOCK)
    return found


def grid(dim: int, runs: int) -> tuple[int, int]:
    return triton.cdiv(dim, BLOCK), runs


@triton.jit
def coordinates(dim, BLOCK: tl.constexpr):
    """This program's run and coordinates, and which of those there are."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return tl.program_id(1).to(tl.int64), at, at < dim


@triton.jit
def _partition(cuts, run, at, workers):
    """The number of the partition in which each coordinate is."""
    number = at * 0
    for cut in range(1, workers):
        number += (at >= tl.load(cuts + run * (workers + 1) + cut)).to(tl.int32)
    return number


@triton.jit
def _seen_by_owners(seen, accumulated, cuts, iteration, dim, workers, BLOCK: tl.constexpr):
    run, at, inside = coordinates(dim, BLOCK)
    turn = (tl.load(iteration) % workers).to(tl.int32)
    owner = (_partition(cuts, run, at, workers) + workers - turn) % workers
    own = tl.load(accumulated + (run * workers + owner) * dim + at, mask=inside, other=0.0)
    tl.store(seen + run * dim + at, tl.abs(own), mask=inside)


@triton.jit
def _sampled(found, magnitudes, cuts, every, iteration, dim, workers, BLOCK: tl.constexpr):
    run, at, inside = coordinates(dim, BLOCK)
    step = tl.load(every + run)
    start = tl.load(cuts + run * (workers + 1) + _partition(cuts, run, at, workers), mask=inside, other=0)
    counted = (at - start) % step == tl.load(iteration) % step
    magnitude = tl.load(magnitudes + run * dim + at, mask=inside & counted, other=0.0)
    tl.store(found + run * dim + at, magnitude, mask=inside)


@triton.jit
def _is_taken(magnitude, value, at, place):
    """Those above the value, and of those equal to it, those up to a place."""
    return (magnitude > value) | ((magnitude == value) & (at <= place))


@triton.jit
def _among(found, magnitudes, cuts, values, places, dim, workers, BLOCK: tl.constexpr):
    run, at, inside = coordinates(dim, BLOCK)
    its = run * workers + _partition(cuts, run, at, workers)
    magnitude = tl.load(magnitudes + run * dim + at, mask=inside, other=0.0)
    value, place = tl.load(values + its, mask=inside, other=0.0), tl.load(places + its, mask=inside, other=0)
    tl.store(found + run * dim + at, _is_taken(magnitude, value, at, place), mask=inside)


@triton.jit
def _among_anyones(found, vectors, values, places, dim, workers, BLOCK: tl.constexpr):
    run, at, inside = coordinates(dim, BLOCK)
    taken = at < 0
    for worker in range(workers):
        its = run * workers + worker
        magnitude = tl.abs(tl.load(vectors + its * dim + at, mask=inside, other=0.0))
        value, place = tl.load(values + its), tl.load(places + its)
        taken = taken | _is_taken(magnitude, value, at, place)
    tl.store(found + run * dim + at, taken, mask=inside)
