"""Calls in any order. A refused one must change nothing: what comes of a sequence of calls is what comes of those that
were taken."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, distributed, nn

import cdgrab
from cdgrab.errors import CdgrabError, NotFiniteError
from scripts.fuzz.words import words

WORKERS, UNITS, DIM = 2, 4, 3
Call = tuple[object, ...]  # the name of a method of the classes below, and its arguments
ODD = (-1, 0, 1, 2, 3, 4, 7, 2.5, None, "1", True, [0], 10**20)


def calls(generator: random.Random, scratch: Path) -> Iterator[Callable[[], object]]:
    kinds = [partial(_Sorter, name) for name in cdgrab.SORTERS]
    kinds += [partial(_Sparsifier, name) for name in cdgrab.SPARSIFIERS]
    kinds += [partial(_Sampler, name) for name in ("d_rr", "cd_grab", "id_grab_bal", "kh")]
    kinds += [partial(_Hook, name) for name in ("topk", "exdyna")]

    def attempt(make: Callable[[], object]) -> None:
        user, refused, taken = make(), None, []
        for _ in range(generator.randrange(2, 16)):
            call = user.draw(generator)
            try:
                _carry_out(user, call)
                taken.append(call)
            except CdgrabError as error:
                refused = error
                assert "\n" not in str(error), f"not one sentence: {error}"
        other = make()
        for call in taken:
            _carry_out(other, call)
        outcomes = [_carry_out(each, ("outcome",)) for each in (user, other)]
        assert outcomes[0] == outcomes[1], "refused calls changed something"
        if refused:
            raise refused

    with _connected():
        while True:
            yield partial(attempt, generator.choice(kinds))


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    """DDP wants a process group, here of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def _carry_out(user: object, call: Call) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # epochs that end early
        name, *arguments = call
        return getattr(user, name)(*arguments)


def _numbers(generator: random.Random, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(generator.randrange(2**31)))


class _Sorter:
    def __init__(self, name: str) -> None:
        self._made = cdgrab.make_sorter(name, workers=WORKERS, units=UNITS, dim=DIM)
        self._saved = self._made.state_dict()

    def draw(self, generator: random.Random) -> Call:
        """Mostly what is right now."""
        odd, position = generator.random() < 0.3, max(0, self._made.position)
        if generator.random() < 0.2:
            return (generator.choice(("save", "load")),)
        if self._made.epoch < 0 or position == UNITS or (odd and generator.random() < 0.3):
            return "order", generator.choice(ODD) if odd else self._made.epoch + 1
        start = generator.choice((0, 1, position, position + 1)) if odd else position
        count = generator.randrange(0, UNITS + 1) if odd else generator.randrange(1, UNITS + 1 - position)
        return "observe", range(start, start + count), _numbers(generator, WORKERS, count, DIM)

    def order(self, epoch: object) -> None:
        self._made.order(epoch)

    def observe(self, positions: range, gradients: Tensor) -> None:
        self._made.observe(positions, gradients)

    def save(self) -> None:
        self._saved = self._made.state_dict()

    def load(self) -> None:
        self._made.load_state_dict(self._saved)

    def outcome(self) -> str:
        return words(self._made.state_dict())


class _Sparsifier:
    def __init__(self, name: str) -> None:
        self._made = cdgrab.make_sparsifier(name, workers=WORKERS, dim=9, density=0.3)
        self._saved = self._made.state_dict()

    def draw(self, generator: random.Random) -> Call:
        if generator.random() < 0.3:
            return (generator.choice(("save", "load")),)
        wrong = generator.choice(((1, 9), (2, 8), (3, 9), (9,), (2, 9, 1)))
        gradients = _numbers(generator, *((WORKERS, 9) if generator.random() < 0.8 else wrong))
        if generator.random() < 0.1:
            gradients.view(-1)[generator.randrange(gradients.numel())] = torch.nan
        return "reduce", gradients

    def reduce(self, gradients: Tensor) -> None:
        self._made.reduce(gradients)

    save, load, outcome = _Sorter.save, _Sorter.load, _Sorter.outcome


class _Hook:
    """A sparsifier that averages the gradients of a DDP model."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self._name, self._plain = name, nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        self._model, self._made = nn.parallel.DistributedDataParallel(self._plain), None
        self.hook("model")
        self._saved = self._made.state_dict()

    def draw(self, generator: random.Random) -> Call:
        if generator.random() < 0.6:
            return "backward", _numbers(generator, 4, 3), generator.random() < 0.2
        if generator.random() < 0.3:
            return "hook", generator.choice(("model", "module", "text", "nothing"))
        return (generator.choice(("save", "load", "zero", "infinite")),)

    def hook(self, what: str) -> None:
        models = {"model": self._model, "module": self._plain, "text": "model", "nothing": None}
        self._made = cdgrab.sparsify.ddp_hook(models[what], self._name, density=0.3)

    def backward(self, data: Tensor, more_to_come: bool) -> None:
        with self._model.no_sync() if more_to_come else contextlib.nullcontext():
            self._model(data).sum().backward()

    def infinite(self) -> None:
        """Refused, which leaves gradients that are NaN: whoever goes on sets them to zero."""
        with contextlib.suppress(NotFiniteError):
            self._model(torch.full((4, 3), torch.inf)).sum().backward()
            raise AssertionError("gradients were taken that are not finite")
        self.zero()

    def zero(self) -> None:
        self._model.zero_grad()

    save, load = _Sorter.save, _Sorter.load

    def outcome(self) -> str:
        gradients = [parameter.grad for parameter in self._model.parameters()]
        return words(self._made.state_dict()) + words(gradients)


class _Sampler:
    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self._model, self._data = nn.Linear(2, 1), torch.randn(11, 2)
        self._made = cdgrab.OrderedBatchSampler(self._data, batch_size=3, sorter=name, seed=1)
        self._saved, self._batches, self._batch = {}, iter(()), [0]

    def draw(self, generator: random.Random) -> Call:
        often = ("fetch", "fetch", "backward", "backward", "begin", "attach")
        rare = ("save", "load", "detach", "skip", "paused", "report")
        return (generator.choice(often if generator.random() < 0.8 else rare),)

    def attach(self) -> None:
        self._made.attach(self._model)

    def detach(self) -> None:
        self._made.detach()

    def begin(self) -> None:
        self._batches = iter(self._made)

    def fetch(self) -> None:
        self._batch = next(self._batches, self._batch)

    def backward(self) -> None:
        self._model(self._data[self._batch]).sum().backward()

    def paused(self) -> None:
        with self._made.paused():
            self.backward()

    def skip(self) -> None:
        self._made.skip()

    def report(self) -> None:
        self._made.report()

    save, load = _Sorter.save, _Sorter.load

    def outcome(self) -> str:
        try:
            return words(self._made.state_dict()) + words(list(self._made))
        except CdgrabError as error:
            return str(error)
