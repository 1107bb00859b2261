"""States of samplers, and of the loaders that read them, changed somewhere inside: loaded before `attach` and after."""

from __future__ import annotations

import itertools
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn

import cdgrab
from cdgrab.errors import CdgrabError
from scripts.fuzz.states import tampered
from scripts.fuzz.words import words

EXAMPLES, BATCH = 8, 2
MOST = 10  # batches
WAYS = ({}, {"unit": "example"}, {"accumulation_steps": 2}, {"drop_last": True, "seed": 3}, {"diagnose": True})


def samplers(generator: random.Random, scratch: Path) -> Iterator[Callable[[], object]]:
    """A state that is taken before `attach` must be taken after it, too, with the same batches. Whoever refuses one
    must go on with a right one as if nothing had happened."""

    def attempt(make: Callable[[bool], Sampled], batches: int) -> None:
        there, early, late = make(True), make(False), make(True)
        there.train(batches)
        right = there.made.state_dict()
        state = tampered(right, generator)
        outcomes = [_outcome(each, state) for each in (early, late)]
        assert isinstance(outcomes[0], CdgrabError) == isinstance(outcomes[1], CdgrabError), f"not alike: {outcomes}"
        if isinstance(outcomes[0], CdgrabError):
            wanted = _outcome(make(True), right)
            assert [_outcome(each, right) for each in (early, late)] == [wanted] * 2, "a refused state left something"
            raise outcomes[0]
        assert outcomes[0] == outcomes[1], "other batches if it is loaded before"

    def loader(make: Callable[[bool], Sampled], batches: int) -> None:
        """As a StatefulDataLoader does: first the sampler's state, then that of its iterator."""
        there, here = make(True), make(True)
        there.train(batches)
        right = iter(there.made).state_dict()
        state = tampered(right, generator)
        here.made.load_state_dict(there.made.state_dict())
        iter(here.made).load_state_dict(state)
        assert {name: state[name] for name in right} == right, "the state of another moment was taken"

    while True:
        name, way, ahead = generator.choice(list(cdgrab.SORTERS)), generator.choice(WAYS), generator.choice((0, 0, 2))
        steps = way.get("accumulation_steps", 1)
        batches = steps * generator.randrange(1, MOST // steps)
        make = partial(Sampled, name, 0 if steps > 1 else ahead, way)  # in the middle of a unit there is no state
        yield partial(loader if generator.random() < 0.1 else attempt, make, batches)


def _outcome(sampled: Sampled, state: dict) -> str | CdgrabError:
    """The batches that follow."""
    try:
        sampled.made.load_state_dict(state)
        sampled.attach()
        return words(sampled.train(MOST))
    except CdgrabError as error:
        return error


class Sampled:
    """A loop that trains with a sampler. ahead: batches that it fetches before it uses the first of them, also over the
    end of an epoch."""

    def __init__(self, name: str, ahead: int, options: dict, attached: bool = True) -> None:
        self._model, self._ahead, self._attached = nn.Linear(2, 1), ahead, False
        self._data = torch.randn(EXAMPLES, 2, generator=torch.Generator().manual_seed(1))
        self.made = cdgrab.OrderedBatchSampler(self._data, batch_size=BATCH, sorter=name, **options)
        if attached:
            self.attach()

    def attach(self) -> None:
        if not self._attached:
            self.made.attach(self._model)
            self._attached = True

    def train(self, batches: int) -> list[list[int]]:
        """Returns the batches."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # epochs that end early
            endless = itertools.chain.from_iterable(itertools.repeat(self.made))
            fetched, used = deque(itertools.islice(endless, self._ahead)), []
            for batch in itertools.islice(endless, batches):
                fetched.append(batch)
                used.append(fetched.popleft())
                self._model(self._data[used[-1]]).sum().backward()
        return used
