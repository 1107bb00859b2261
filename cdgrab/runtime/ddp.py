"""The whole gradient of a DistributedDataParallel model, from the buckets that DDP hands over, for sparsifiers.

DDP passes gradients on in buckets, and regroups the buckets after the first iteration. Here every bucket gets a future,
and the last one averages all of them and completes all futures: as one vector whose coordinates stay where they are,
with every gradient at the place of its parameter. The price is that nothing is sent while the backward pass still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.futures import Future

from cdgrab.errors import CdgrabError, NotFiniteError
from cdgrab.runtime.group import WorkerGroup

Parts = list[tuple[slice, Tensor]]  # places in the whole gradient, and what is there


class BucketHook:
    """A communication hook. `average` writes the mean over all processes over this process's gradient.

    debtor: a sparsifier, if it is what averages. With find_unused_parameters DDP does not pass on the mean of
    parameters that no process has used, so what it owes to them must wait.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], average: Callable[[Parts], None], debtor: Debtor | None = None
    ) -> None:
        self._average, self._debtor = average, debtor
        self._used: set[int] | None = None  # ids of parameters that got a gradient since the last exchange; None: all
        self._places = places(parameters)
        self._promises: list[tuple[Future, Tensor, Parts]] = []

    def register(self, model: nn.Module) -> None:
        """Let DDP call this hook instead of its all-reduce."""
        register(model, self, BucketHook.communicate)
        if self._debtor and getattr(model, "find_unused_parameters", False):
            self._used = set()
            for name, (parameter, _) in self._places.items():
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._used.add(name))

    # DDP inspects the signature: the argument must be called `bucket`, without string annotations.
    def communicate(self, bucket):
        """DDP calls this for each bucket, in the order of their indices. Returns a future."""
        buffer = bucket.buffer()
        if bucket.index() == 0:  # a new iteration, even if the last one was refused halfway
            self._promises = []
        where = [self._places[id(parameter)][1] for parameter in bucket.parameters()]
        promise = Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._promises.append((promise, buffer, list(zip(where, bucket.gradients(), strict=True))))
        if bucket.is_last():
            self._average_all([part for _, _, parts in self._promises for part in parts])
            for kept, buffer, _ in self._promises:
                kept.set_result(buffer)
            self._promises = []
        return promise

    def _average_all(self, parts: Parts) -> None:
        """A gradient that is not finite on one process is refused on all. If the hook raised an error, DDP would wait
        for its buckets for ever: it gets NaN instead, and the backward pass fails once DDP is done."""
        try:
            with self._waiting(parts):
                self._average(parts)
        except NotFiniteError as error:
            after_backward(partial(_fail, error))
            for _, gradient in parts:
                gradient.fill_(torch.nan)

    def _waiting(self, parts: Parts) -> AbstractContextManager:
        """Let what is owed to parameters that no process has used wait. Their gradients are zero, whatever is left in
        `.grad`, which DDP has put into their buckets."""
        if self._used is None:
            return nullcontext()
        mine = torch.tensor([[name in self._used for name in self._places]], device=parts[0][1].device)
        anywhere = self._debtor.group.gather(mine.to(torch.uint8)).any(0).tolist()
        unused = [place for (_, place), used in zip(self._places.values(), anywhere, strict=True) if not used]
        for place, gradient in parts:
            if place in unused:
                gradient.zero_()
        self._used.clear()
        return self._debtor.holding_back(unused)


class Collected:
    """Averages a gradient that is in parts. `average`: this process's whole gradient [dim] -> the mean [dim]."""

    def __init__(self, parameters: Sequence[nn.Parameter], average: Callable[[Tensor], Tensor]) -> None:
        self._average, self._dtype = average, common_dtype(parameters)  # each bucket has its own
        self._dim = sum(parameter.numel() for parameter in parameters)
        self._gradient: Tensor | None = None  # reused: allocating it takes longer than writing to it

    def __call__(self, parts: Parts) -> None:
        device = parts[0][1].device
        if self._gradient is None or self._gradient.device != device:
            self._gradient = torch.zeros(self._dim, dtype=self._dtype, device=device)
        for place, gradient in parts:
            self._gradient[place].view_as(gradient).copy_(gradient)
        mean = self._average(self._gradient)
        for place, gradient in parts:
            gradient.copy_(mean[place].view_as(gradient))


class Debtor(Protocol):
    """Something that owes values to coordinates: see `Sparsifier.holding_back`."""

    group: WorkerGroup

    def holding_back(self, places: Sequence[slice]) -> AbstractContextManager: ...


def register(model: nn.Module, hook: object, communicate: Callable) -> None:
    """Let DDP call `communicate(hook, bucket)` for every bucket instead of its all-reduce."""
    try:
        model.register_comm_hook(hook, communicate)
    except RuntimeError as error:
        raise CdgrabError("the model has a communication hook already, and DDP takes only one") from error


def queue_callback(call: Callable[[], None]) -> None:
    """To run after the backward pass and what is queued by now: if a hook queues it, before DDP's own last step."""
    Variable._execution_engine.queue_callback(call)


def after_backward(call: Callable[[], None]) -> None:
    """DDP queues its own last step after the hooks have run. To run after that step, queue a callback that queues."""
    queue = Variable._execution_engine.queue_callback
    queue(partial(queue, call))


def _fail(error: Exception) -> None:
    raise error


def places(parameters: Sequence[nn.Parameter]) -> dict[int, tuple[nn.Parameter, slice]]:
    """The place of each parameter in one vector, by id: tensors compare element by element. The parameters are kept
    alive, since Python reuses ids."""
    starts = accumulate((parameter.numel() for parameter in parameters), initial=0)
    return {
        id(parameter): (parameter, slice(start, start + parameter.numel()))
        for parameter, start in zip(parameters, starts, strict=False)
    }


def common_dtype(parameters: Sequence[nn.Parameter]) -> torch.dtype:
    """The type that holds the values of all of them."""
    return reduce(torch.promote_types, (parameter.dtype for parameter in parameters))
