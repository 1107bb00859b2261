"""Which examples a process owns, and how they are cut into the units that are ordered. Pure functions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cdgrab import streams
from cdgrab.errors import CdgrabError


def share(examples: int, rank: int, processes: int, seed: int, multiple: int | None) -> Tensor:
    """The numbers of one process's examples: a random part of the dataset, of the same size for every process.

    multiple: leave out examples so that each process's number of them is a multiple of this. None: repeat a few
    instead, as PyTorch's DistributedSampler does.
    """
    shuffled = streams.permutation(examples, seed, "partition")
    if multiple is None:
        missing = math.ceil(examples / processes) * processes - examples
        shuffled = torch.cat([shuffled, shuffled.repeat(math.ceil(missing / examples))[:missing]])
        return shuffled[rank::processes]
    own = examples // (processes * multiple) * multiple
    if not own:
        raise CdgrabError(
            f"drop_last leaves nothing: {examples} examples do not fill {multiple} for each of {processes} processes"
        )
    return shuffled[: own * processes][rank::processes]


def cut(own: Tensor, batch_size: int, accumulation_steps: int) -> list[list[list[int]]]:
    """Units of `accumulation_steps` batches of `batch_size` examples; only the very last batch may be smaller."""
    batches = [batch.tolist() for batch in own.split(batch_size)]
    if len(batches) % accumulation_steps:
        grouped = f"grouped by accumulation_steps={accumulation_steps}"
        raise CdgrabError(f"{len(batches)} batches per epoch cannot be {grouped}; use drop_last=True")
    return [batches[first : first + accumulation_steps] for first in range(0, len(batches), accumulation_steps)]


def in_order(own: Tensor | list[list[list[int]]], batch_size: int, order: list[int]) -> list[list[int]]:
    """The batches of these units; own: single examples, or what `cut` returns."""
    if isinstance(own, Tensor):
        return [batch.tolist() for batch in own[order].split(batch_size)]
    return [batch for unit in order for batch in own[unit]]
