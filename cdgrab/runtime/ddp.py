"""The whole gradient of a DistributedDataParallel model, from the buckets that DDP hands over.

DDP hands gradients over in buckets, and regroups the buckets after the first iteration. What needs the gradient as one
vector, whose coordinates stay where they are, collects: every bucket gets a promise, its gradients are copied to where
their parameters have their place, and the last bucket of the iteration averages that vector and keeps all promises.
The price is that nothing is sent while the backward pass still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.futures import Future

from cdgrab.errors import CdgrabError, NotFiniteError


class BucketHook:
    """A communication hook. `average`: this process's gradient [dim] -> the mean over all processes [dim]."""

    def __init__(self, parameters: Sequence[nn.Parameter], average: Callable[[Tensor], Tensor]) -> None:
        self._average = average
        self._places = places(parameters)
        self._dim = sum(parameter.numel() for parameter in parameters)
        self._dtype = common_dtype(parameters)  # buckets have one each
        self._gradient: Tensor | None = None  # kept: fresh memory takes longer than what is written into it
        self._promises: list[tuple[Future, Tensor, list[slice], list[Tensor]]] = []

    def register(self, model: nn.Module) -> None:
        """Let DDP call this hook instead of its all-reduce."""
        try:
            model.register_comm_hook(self, BucketHook.communicate)
        except RuntimeError as error:
            raise CdgrabError("the model has a communication hook already, and DDP takes only one") from error

    def communicate(self, bucket):  # DDP looks at the signature: this name, and no annotations as text
        """What DDP calls for each bucket, in the order of their indices: the last one comes last. Returns a future."""
        buffer = bucket.buffer()
        if bucket.index() == 0:  # of a new iteration, even if the one before was refused halfway
            self._promises = []
            if self._gradient is None or self._gradient.device != buffer.device:
                self._gradient = buffer.new_zeros(self._dim, dtype=self._dtype)
        where = [self._places[id(parameter)][1] for parameter in bucket.parameters()]
        gradients = bucket.gradients()  # parts of the buffer
        for place, gradient in zip(where, gradients, strict=True):
            self._gradient[place].view_as(gradient).copy_(gradient)
        promise = Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._promises.append((promise, buffer, where, gradients))
        if bucket.is_last():
            mean = self._averaged()
            for kept, buffer, where, gradients in self._promises:
                for place, gradient in zip(where, gradients, strict=True):
                    gradient.copy_(mean[place].view_as(gradient))
                kept.set_result(buffer)
            self._promises = []
        return promise

    def _averaged(self) -> Tensor:
        """What is not finite on one process is refused on all. A hook that raises would leave DDP waiting for its
        buckets for ever: it gets NaN instead, and the backward pass fails once DDP is done."""
        try:
            return self._average(self._gradient)
        except NotFiniteError as error:
            _after_backward(partial(_fail, error))
            return torch.full_like(self._gradient, torch.nan)


def _after_backward(call: Callable[[], None]) -> None:
    """DDP's own last step is queued after the hooks', so that what is to follow it has to queue again from there."""
    queue = Variable._execution_engine.queue_callback
    queue(partial(queue, call))


def _fail(error: Exception) -> None:
    raise error


def places(parameters: Sequence[nn.Parameter]) -> dict[int, tuple[nn.Parameter, slice]]:
    """Where each parameter has its place in one vector, by identity: tensors compare element by element. The
    parameters are kept alive, since an identity may be given away again."""
    starts = accumulate((parameter.numel() for parameter in parameters), initial=0)
    return {
        id(parameter): (parameter, slice(start, start + parameter.numel()))
        for parameter, start in zip(parameters, starts, strict=False)
    }


def common_dtype(parameters: Sequence[nn.Parameter]) -> torch.dtype:
    """The type that holds the values of all of them."""
    return reduce(torch.promote_types, (parameter.dtype for parameter in parameters))
