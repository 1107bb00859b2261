"""States of sorters, sparsifiers and DDP hooks, changed somewhere inside."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import cdgrab
from cdgrab.errors import CdgrabError
from cdgrab.runtime.group import WorkerGroup
from cdgrab.runtime.state import copied
from cdgrab.sparsify import Hook, sparsifier_of
from scripts.fuzz.gradients import DTYPES, NUMBERS, given_back
from scripts.fuzz.words import words

UNITS, DIM = 5, 70  # coordinates: enough for two blocks of the published ExDyna
UNENDING: list = []  # it holds itself
UNENDING.append(UNENDING)
OTHERS = (None, "text", "two\nlines", -1, 0, 1, 10**9, 10**400, 0.5, float("nan"), True, [], [1], {}, {1: 2})
OTHERS += (UNENDING, {"": UNENDING})
OTHERS += (torch.zeros(0), torch.tensor(torch.nan), torch.ones(2, 3), torch.ones(2, 2).to_sparse())
BALANCING = ({"sketch": "countsketch", "sketch_size": 4}, {"sketch": "gaussian", "sketch_size": 4}, {"rule": "walk"})
BALANCING += ({"background": True}, {"initial": "identity"})
SELECTING = ({"threshold": "proportional"}, {"threshold": "paper"}, {"rule": "paper"}, {"rule": "relative"})
SELECTING += ({"faithful": True, "blocks": 2}, {"error_feedback": False})


def states(generator: random.Random, scratch: Path) -> Iterator[Callable[[], object]]:
    """Whoever refuses one must be unchanged afterwards; whoever takes one must have exactly that state, and go on as
    anybody else who has it."""
    kinds = [partial(_Sorted, name, {}) for name in cdgrab.SORTERS]
    kinds += [partial(_Sorted, name, way) for name in ("id_grab_pair", "cd_grab") for way in BALANCING]
    kinds += [partial(_Sparsified, name, {}, hook) for name in cdgrab.SPARSIFIERS for hook in (False, True)]
    kinds += [partial(_Sparsified, "exdyna", way, False) for way in SELECTING]

    def attempt(make: Callable[[], object], steps: int, mine: int) -> None:
        there, here, fresh = make(), make(), make()
        there.train(steps)
        here.train(mine)
        state, before = tampered(there.made.state_dict(), generator), words(here.made.state_dict())
        try:
            here.made.load_state_dict(state)
        except CdgrabError:
            assert words(here.made.state_dict()) == before, "a refused state changed something"
            raise
        assert words(here.made.state_dict()) == words(state), "it did not take the state that was given"
        fresh.made.load_state_dict(state)
        assert words(here.train(2 * UNITS)) == words(fresh.train(2 * UNITS)), "something was left of its own state"

    while True:
        yield partial(attempt, generator.choice(kinds), generator.randrange(1, 3 * UNITS), generator.randrange(1, 4))


class _Sorted:
    def __init__(self, name: str, options: dict) -> None:
        self.made = cdgrab.make_sorter(name, workers=2, units=UNITS, dim=DIM, **options)

    def train(self, units: int) -> list[Tensor]:
        """Returns the orders."""
        orders, gradients = [], _gradients(units, 2, 1)
        for gradient in gradients:
            if self.made.epoch < 0 or self.made.position == UNITS:
                orders.append(self.made.order(self.made.epoch + 1))
                assert orders[-1].sort(1).values.tolist() == [list(range(UNITS))] * 2, "not an order"
            self.made.observe([self.made.position], gradient)
        return orders


class _Sparsified:
    """By itself, or as the hook of a DDP model."""

    def __init__(self, name: str, options: dict, hook: bool) -> None:
        self._workers = 1 if hook else 2
        if hook:
            parameters = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(DIM - 4))]
            self.made = Hook(parameters, sparsifier_of(parameters, name, WorkerGroup(1), density=0.3))
            self._sparsifier = self.made.sparsifier
        else:
            self.made = self._sparsifier = cdgrab.make_sparsifier(name, workers=2, dim=DIM, density=0.3, **options)

    def train(self, steps: int) -> list[Tensor]:
        """Returns the updates."""
        updates = [self._update(gradients) for gradients in _gradients(steps, self._workers)]
        assert torch.stack(updates).isfinite().all(), "not finite"
        return updates

    def _update(self, gradients: Tensor) -> Tensor:
        if self._workers > 1:
            return self._sparsifier.reduce(gradients)
        places = slice(0, 4), slice(4, DIM)
        self._sparsifier.reduce_parts([(place, gradients[0, place]) for place in places], gradients.dtype)
        return gradients[0]


def _gradients(count: int, *sizes: int) -> Tensor:
    """The same ones for everybody."""
    return torch.randn(count, *sizes, DIM, generator=torch.Generator().manual_seed(count))


def tampered(state: dict, generator: random.Random) -> dict:
    """A copy with one change, somewhere inside."""
    state = copied(state)
    place, key = state, generator.choice(list(state))
    while isinstance(place[key], dict | list) and place[key] and generator.random() < 0.9:
        place = place[key]
        key = generator.choice(list(place)) if isinstance(place, dict) else generator.randrange(len(place))
    if generator.random() < 0.1 or not isinstance(place[key], Tensor):
        way = generator.choice(("gone", "more", "other", "other"))
        if way == "gone":
            del place[key]
        elif way == "more" and isinstance(place, dict):
            place[generator.choice(("more", "two\nlines", 3, None))] = 1
        else:
            place[key] = generator.choice(OTHERS)
    else:
        place[key] = _another(place[key], generator)
    return state


def _another(tensor: Tensor, generator: random.Random) -> Tensor:
    way = generator.choice(("type", "cut", "longer", "number", "number", "full", "flat", "turned", "given back"))
    if way == "given back":
        return given_back(tensor, generator.choice((0, 4)))
    if way == "type":
        return tensor.to(generator.choice(DTYPES))
    if way == "flat":
        return tensor.flatten()
    if way == "turned":
        return tensor.mT if tensor.dim() > 1 else tensor.flip(0)
    if way in ("cut", "longer") and tensor.dim():
        axis = generator.randrange(tensor.dim())
        size = tensor.shape[axis] + (1 if way == "longer" else -1)
        sizes = [max(0, size) if n == axis else each for n, each in enumerate(tensor.shape)]
        return tensor.new_zeros(sizes)
    numbers = NUMBERS if tensor.is_floating_point() else (-(10**9), -2, -1, 0, 1, 2, 100, 10**9)
    number = torch.tensor(generator.choice(numbers), dtype=torch.float64).to(tensor.dtype)
    if way == "full":
        return torch.full_like(tensor, number)
    tensor = tensor.clone()
    if tensor.numel():
        tensor.view(-1)[generator.randrange(tensor.numel())] = number
    return tensor
