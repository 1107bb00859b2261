"""The streams of a GPU in which rows are decided, and their order. The host does as little as it can: in a step of a
small model it is the host that takes the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


class Streams:
    """The streams of one GPU. Each is one object here, so that `is` tells whether two are the same."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._index = device, device.index
        self._known: dict[int, torch.cuda.Stream] = {}  # by their handles
        self._reached: dict[torch.cuda.Stream, torch.cuda.Event] = {}  # used again: making one takes longer
        self._side: torch.cuda.Stream | None = None

    def current(self) -> torch.cuda.Stream:
        """The one in which the caller queues."""
        handle = torch._C._cuda_getCurrentRawStream(self._index)  # PyTorch's own object is new every time
        if handle not in self._known:
            self._known[handle] = torch.cuda.current_stream(self.device)
        return self._known[handle]

    def beside(self) -> torch.cuda.Stream:
        """One for whatever goes on beside the training."""
        if self._side is None:
            side = torch.cuda.Stream(self.device)
            self._side = self._known.setdefault(side.cuda_stream, side)
        return self._side

    def follow(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> bool:
        """What is queued in this stream from now on comes after what is queued in the other. Returns False if both
        are the same."""
        if stream is other:
            return False
        reached = self._reached.get(other) or self._reached.setdefault(other, torch.cuda.Event())
        reached.record(other)
        stream.wait_event(reached)
        return True

    def queue(self, stream: torch.cuda.Stream, function: Callable[..., Result], *arguments: object) -> Result:
        """Call this, and queue its kernels in this stream."""
        current = self.current()
        if torch.cuda.current_device() != self._index:
            with torch.cuda.stream(stream):
                return function(*arguments)
        if stream is current:
            return function(*arguments)
        try:
            torch.cuda.set_stream(stream)
            return function(*arguments)
        finally:
            torch.cuda.set_stream(current)
