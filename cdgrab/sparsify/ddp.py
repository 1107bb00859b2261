"""A communication hook for DistributedDataParallel that averages gradients by a sparsifier.

DDP hands gradients over in buckets, and regroups the buckets after the first iteration. A threshold and partitions make
sense for the whole gradient only, so the hook collects: every bucket gets a promise, its gradients are copied to where
their parameters have their place in one vector, and the last bucket of the iteration reduces that vector and keeps all
promises. Residuals belong to places in the vector, so regrouping does not touch them. The price is that nothing is
sent while the backward pass still runs; what is sent is a hundredth.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.futures import Future

from .base import Sparsifier, Stats


class Hook:
    """State of the hook: see `cdgrab.sparsify.ddp_hook`, which makes and registers it."""

    def __init__(self, parameters: Sequence[nn.Parameter], sparsifier: Sparsifier) -> None:
        self.sparsifier = sparsifier
        starts = accumulate((parameter.numel() for parameter in parameters), initial=0)
        self._places = {  # by identity: parameters are kept alive here, and tensors compare element by element
            id(parameter): (parameter, slice(start, start + parameter.numel()))
            for parameter, start in zip(parameters, starts, strict=False)
        }
        self._dtype = reduce(
            torch.promote_types, (parameter.dtype for parameter in parameters)
        )  # buckets have one each
        self._gradient: Tensor | None = None
        self._promises: list[tuple[Future, list[slice], Tensor]] = []

    @property
    def stats(self) -> Stats:
        """Of the last backward pass that was not under `no_sync`."""
        return self.sparsifier.stats

    def state_dict(self) -> dict:
        """This rank's residuals and what all ranks share."""
        return self.sparsifier.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.sparsifier.load_state_dict(state)

    def communicate(self, bucket):  # DDP looks at the signature: this name, and no annotations as text
        """What DDP calls for each bucket, in the order of their indices: the last one comes last. Returns a future."""
        buffer = bucket.buffer()
        if bucket.index() == 0:  # of a new iteration, even if the one before was refused halfway
            self._promises = []
            self._gradient = buffer.new_empty(self.sparsifier.dim, dtype=self._dtype)
        places = [self._places[id(parameter)][1] for parameter in bucket.parameters()]
        for place, gradient in zip(places, bucket.gradients(), strict=True):
            self._gradient[place] = gradient.flatten()
        promise = Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._promises.append((promise, places, buffer))
        if bucket.is_last():
            update = self.sparsifier.reduce(self._gradient[None])  # divides by the number of workers
            for kept, places, buffer in self._promises:
                kept.set_result(torch.cat([update[place] for place in places]).to(buffer.dtype))
            self._promises = []
        return promise
