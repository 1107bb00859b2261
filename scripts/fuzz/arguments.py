"""Sorters, sparsifiers and samplers that are made, and orders that are judged, with an odd argument. What is taken must
do what is done with the same number as a plain one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import cdgrab
from cdgrab.sorters import sorter_options
from cdgrab.sparsify import sparsifier_options
from scripts.fuzz.states import UNENDING
from scripts.fuzz.words import words

ODD = (None, True, False, -1, 0, 1, 2, 3, 2.0, 0.5, 1e-300, float("nan"), float("inf"), 10**20, 10**400, 10**5000)
ODD += ("", "2", "two\nlines", b"2", (), [], [2], [1, 2], {}, {1: 2}, UNENDING, object(), int, print, range(3), 1j)
ODD += (np.int64(3), np.float64(0.5), np.float32(0.5), np.bool_(True), np.array(3), np.ones(2), np.ones((2, 2)))
ODD += (torch.tensor(3), torch.tensor(0.5), torch.tensor(True), torch.ones(2), torch.ones(2, 2), torch.empty(0))
FEW = 100  # numbers of an order that is looked at


def arguments(generator: random.Random, scratch: Path) -> Iterator[Callable[[], object]]:
    def attempt(make: Callable[..., object], right: dict, name: str, value: object) -> None:
        plain = value.item() if isinstance(value, np.generic | np.ndarray | Tensor) and np.size(value) == 1 else value
        made = make(**right | {name: value})
        assert _doing(made) == _doing(make(**right | {name: plain})), "another result"

    sizes = {"workers": 2, "units": 4, "dim": 6}
    while True:
        kind = generator.choice(("sorter", "sparsifier", "sampler", "herding"))
        name = generator.choice(list(cdgrab.SPARSIFIERS if kind == "sparsifier" else cdgrab.SORTERS))
        if kind == "sorter":
            make, right, more = cdgrab.make_sorter, {"name": name} | sizes, ("seed", "initial", *sorter_options(name))
        elif kind == "sparsifier":
            right = {"name": name, "workers": 2, "dim": 6, "density": 0.5}
            make, more = cdgrab.make_sparsifier, sparsifier_options(name)
        elif kind == "herding":
            right, more = {"vectors": torch.eye(3)[None], "order": torch.tensor([[2, 0, 1]])}, ("per_vector",)
            make = cdgrab.herding.parallel_herding_bound
        else:
            right = {"dataset": range(8), "batch_size": 2, "sorter": name}
            make, more = cdgrab.OrderedBatchSampler, ("seed", "drop_last", "accumulation_steps", "unit", "diagnose")
        yield partial(attempt, make, right, generator.choice((*right, *more)), generator.choice(ODD))


def _doing(made: object) -> str:
    """What it is, and the first order if that is short."""
    if isinstance(made, float):
        return words(made)
    if isinstance(made, cdgrab.OrderedBatchSampler):
        return repr(made) + words(list(made) if made.sorter else None)
    short = hasattr(made, "order") and made.units * made.workers <= FEW
    return words(made.state_dict()) + words(made.order(0) if short else None)
