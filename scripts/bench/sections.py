"""Sparsifiers that send while the backward pass goes on, to measure what that brings (`make bench BENCH=link`).

The model's parameters are divided into sections, each with a sparsifier of its own. A section is sent, by a thread, as
soon as DDP has handed over the gradients of all its parameters; those of the last layers come first. Sections do not
follow DDP's buckets, which change after the first step: so results depend on nothing but the number of sections.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.futures import Future

from cdgrab.runtime.ddp import Parts, after_backward, common_dtype, places, register
from cdgrab.runtime.group import WorkerGroup
from cdgrab.sparsify import sparsifier_of
from cdgrab.sparsify.compressor import Compressor, Stats


def sections_of(parameters: Sequence[nn.Parameter], number: int) -> list[list[nn.Parameter]]:
    """At most so many sections, of about as many coordinates each: the model's last parameters first, of which the
    backward pass has the gradients first."""
    ends = list(accumulate(parameter.numel() for parameter in parameters))
    found: dict[int, list[nn.Parameter]] = {}
    for end, parameter in zip(ends, parameters, strict=True):
        middle = end - parameter.numel() / 2
        found.setdefault(min(number - 1, int(number * middle / ends[-1])), []).append(parameter)
    return list(found.values())[::-1]


class Section:
    """Some of the model's parameters, and what averages their gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter], sparsifier: Compressor) -> None:
        self.sparsifier, self._dtype = sparsifier, common_dtype(parameters)
        self.parameters = list(parameters)  # kept alive: `places` has their ids
        self.places = {name: place for name, (_, place) in places(parameters).items()}
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
    """A communication hook for models on a CPU; group: the thread's own channel. DDP must have all parameters that it
    is given here, and each must get a gradient in every backward pass.

    If something fails in one section, this process sends no more of them, and the backward pass fails once DDP is done:
    DDP would wait for ever for a hook that raised an error. What was sent before is lost.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], name: str, group: WorkerGroup, number: int, **options
    ) -> None:
        parts = sections_of(parameters, number)
        self.sections = [Section(part, sparsifier_of(part, name, group, **options)) for part in parts]
        self._section = {name: section for section in self.sections for name in section.places}
        self._pool = ThreadPoolExecutor(1, "sparsifier")
        self._lock = threading.Lock()  # of the promises, which two threads keep
        self._promises: list[tuple[Future, Tensor, set[Section]]] = []  # of buckets, and the sections they wait for
        self._waiting: list[Section] = []  # sections that have not been sent in this step
        self._error: Exception | None = None

    @property
    def sparsifiers(self) -> list[Compressor]:
        return [section.sparsifier for section in self.sections]

    def register(self, model: nn.Module) -> None:
        """Let DDP call this hook instead of its all-reduce."""
        register(model, self, SectionedHook.communicate)

    # DDP inspects the signature: the argument must be called `bucket`, without string annotations.
    def communicate(self, bucket):
        """DDP calls this for each bucket, in the order of their indices. Returns a future."""
        buffer, names = bucket.buffer(), [id(parameter) for parameter in bucket.parameters()]
        if bucket.index() == 0:
            self._begin()
        if bucket.is_last():  # which comes in the outermost backward pass, if there are several
            after_backward(self._end)
        promise = Future()
        with self._lock:
            self._promises.append((promise, buffer, {self._section[name] for name in names}))
        for name, gradient in zip(names, bucket.gradients(), strict=True):
            section = self._section[name]
            section.parts.append((section.places[name], gradient))
        while self._waiting and self._waiting[0].complete:  # in the same order on every process
            self._pool.submit(self._send, self._waiting.pop(0))
        return promise

    def _begin(self) -> None:
        self._error, self._promises, self._waiting = None, [], list(self.sections)
        for section in self.sections:
            section.parts = []

    def _send(self, section: Section) -> None:
        try:
            if self._error is None:
                section.reduce()
        except Exception as error:
            self._error = error
        if self._error is not None:
            section.spoil()
        kept = []
        with self._lock:
            for promise, buffer, sections in self._promises:
                if section in sections:
                    sections.remove(section)
                    kept += [] if sections else [(promise, buffer)]
        for promise, buffer in kept:  # whose callbacks run here
            promise.set_result(buffer)

    def _end(self) -> None:
        if self._error is not None:
            raise self._error

    # -- as of one sparsifier -----------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Of all sections together. Each pads what it sends to what its busiest worker sends."""
        found = [one.stats for one in self.sparsifiers]
        counts = [sum(each) for each in zip(*(one.counts for one in found), strict=True)]
        sizes = [one.dim for one in self.sparsifiers]
        longest = sum(max(one.counts) for one in found)
        return Stats(
            density=sum(one.density * dim for one, dim in zip(found, sizes, strict=True)) / sum(sizes),
            counts=counts,
            imbalance=len(counts) * longest / sum(counts) - 1 if any(counts) else 0.0,
            bytes=sum(one.bytes for one in found),
        )

    def state_dict(self) -> list[dict]:
        return [one.state_dict() for one in self.sparsifiers]

    def load_state_dict(self, states: list[dict]) -> None:
        for one, state in zip(self.sparsifiers, states, strict=True):
            one.load_state_dict(state)
