"""A hook for DistributedDataParallel that sends while the backward pass goes on.

The model's parameters are divided into sections, each with a sparsifier of its own. A section is sent as soon as DDP
has handed over the gradients of all its parameters; those of the last layers come first. Sections do not follow DDP's
buckets, which change after the first step: so results depend on nothing but the number of sections.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.futures import Future

from cdgrab.errors import CdgrabError
from cdgrab.runtime.ddp import Parts, after_backward, common_dtype, places, register
from cdgrab.sparsify.compressor import Compressor, Stats


def sections_of(parameters: Sequence[nn.Parameter], number: int) -> list[list[nn.Parameter]]:
    """At most so many sections, of about as many coordinates each: the model's last parameters first, of which the
    backward pass has the gradients first."""
    if not parameters:
        return []
    ends = list(accumulate(parameter.numel() for parameter in parameters))
    middles = (end - parameter.numel() / 2 for end, parameter in zip(ends, parameters, strict=True))
    which = [min(number - 1, int(number * middle / max(1, ends[-1]))) for middle in middles]
    every = ([p for p, own in zip(parameters, which, strict=True) if own == section] for section in range(number))
    return [section for section in every if section][::-1]


class Section:
    """Some of the model's parameters, and what averages their gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter], sparsifier: Compressor) -> None:
        self.sparsifier, self._dtype = sparsifier, common_dtype(parameters)
        self.places = {name: place for name, (_, place) in places(parameters).items()}
        self._parameters = list(parameters)  # kept alive: `places` has their ids
        self.begin()

    def begin(self) -> None:
        self.parts: Parts = []

    @property
    def complete(self) -> bool:
        return len(self.parts) == len(self.places)

    def reduce(self) -> None:
        self.sparsifier.reduce_parts(self.parts, self._dtype)

    def spoil(self) -> None:
        """Nobody must go on with these gradients."""
        for _, gradient in self.parts:
            gradient.fill_(torch.nan)


class SectionedHook:
    """See `cdgrab.sparsify.ddp_hook`. On a CPU a thread does the work, for which the sparsifiers need a channel of
    their own; on a GPU it is queued where the gradients are computed.

    If something fails in one section, those after it are not sent, on any process, and the backward pass fails once DDP
    is done: it would wait for ever for a hook that raised an error.
    """

    def __init__(self, sections: Sequence[Section]) -> None:
        self._sections = list(sections)
        self._section = {name: section for section in sections for name in section.places}
        self._pool = ThreadPoolExecutor(1, "sparsifier")
        self._lock = threading.Lock()  # of the promises, which two threads keep
        self._promises: list[tuple[Future, Tensor, set[Section]]] = []  # of buckets, and the sections they wait for
        self._waiting: list[Section] = []  # sections that have not been sent in this step
        self._error: Exception | None = None

    @property
    def sparsifiers(self) -> list[Compressor]:
        return [section.sparsifier for section in self._sections]

    def register(self, model: nn.Module) -> None:
        """Let DDP call this hook instead of its all-reduce."""
        if getattr(model, "find_unused_parameters", False):
            raise CdgrabError("sections=1 is all that goes with find_unused_parameters=True: what is owed must wait")
        register(model, self, SectionedHook.communicate)

    # DDP inspects the signature: the argument must be called `bucket`, without string annotations.
    def communicate(self, bucket):
        """DDP calls this for each bucket, in the order of their indices. Returns a future."""
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._begin()
        promise = Future(devices=[buffer.device] if buffer.is_cuda else None)
        names = [id(parameter) for parameter in bucket.parameters()]
        with self._lock:
            self._promises.append((promise, buffer, {self._section[name] for name in names}))
        for name, gradient in zip(names, bucket.gradients(), strict=True):
            section = self._section[name]
            section.parts.append((section.places[name], gradient))
        run: Callable = _at_once if buffer.is_cuda else self._pool.submit
        while self._waiting and self._waiting[0].complete:  # in the same order on every process
            run(self._send, self._waiting.pop(0))
        return promise

    def _begin(self) -> None:
        self._error, self._promises, self._waiting = None, [], list(self._sections)
        for section in self._sections:
            section.begin()
        after_backward(self._end)

    def _send(self, section: Section) -> None:
        try:
            if self._error is None:
                section.reduce()
        except Exception as error:
            self._error = error
        if self._error is not None:
            section.spoil()
        with self._lock:
            for promise, buffer, sections in self._promises:
                if section in sections:
                    sections.remove(section)
                    if not sections:
                        promise.set_result(buffer)

    def _end(self) -> None:
        if self._error is not None:
            raise self._error

    # -- as of one sparsifier -----------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Statistics of the last backward pass that was not under `no_sync`, of all sections together. A threshold is
        that of the first section that was sent."""
        found, dim = self.sparsifiers, sum(one.dim for one in self.sparsifiers)
        counts = [sum(each) for each in zip(*(one.stats.counts for one in found), strict=True)]
        return Stats(
            density=sum(one.stats.density * one.dim for one in found) / dim,
            counts=counts,
            threshold=found[0].stats.threshold,
            imbalance=len(counts) * max(counts) / sum(counts) - 1 if any(counts) else 0.0,
            bytes=sum(one.stats.bytes for one in found),
        )

    def state_dict(self) -> dict:
        return {"sections": [one.state_dict() for one in self.sparsifiers]}

    def load_state_dict(self, state: dict) -> None:
        """A state that is refused changes nothing."""
        states = state.get("sections") if isinstance(state, dict) else None
        if not isinstance(states, list) or len(states) != len(self._sections):
            raise CdgrabError(f"this is not the state of a hook with {len(self._sections)} sections")
        before = self.state_dict()["sections"]
        try:
            _load(self.sparsifiers, states)
        except CdgrabError:
            _load(self.sparsifiers, before)
            raise


def _load(sparsifiers: Sequence[Compressor], states: Sequence[dict]) -> None:
    for one, state in zip(sparsifiers, states, strict=True):
        one.load_state_dict(state)


def _at_once(call: Callable, argument: object) -> None:
    call(argument)
