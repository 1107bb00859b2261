"""What hands out the batches of an epoch, to a loader or to a loop."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from cdgrab.dropin.ledger import Ledger
from cdgrab.dropin.outstanding import Batch
from cdgrab.errors import CdgrabError


def _read_ahead(reader: object) -> int:
    """reader: the iterator of a DataLoader, or something else."""
    return (getattr(reader, "_num_workers", 0) or 0) * (getattr(reader, "_prefetch_factor", 0) or 0)


class BatchIterator(Iterator[list[int]]):
    """Hands out the batches of an epoch. The epoch starts with the first batch, since some iterators are never used.

    start: starts or continues an epoch, and returns the remaining batches. reader: the generator that reads this
    iterator, if it is one. It may read the next one, too (timm's MultiEpochsDataLoader), and so may a thread.
    """

    def __init__(self, ledger: Ledger, start: Callable[[BatchIterator], list[Batch]], reader: FrameType | None) -> None:
        self._ledger, self._start = ledger, start
        self._reader: FrameType | threading.Thread | None = reader
        self._batches: list[Batch] | None = None
        self._next = 0
        self._read_ahead = 0  # batches that a loader asks for before it delivers the first, for its processes
        self._in_vain = 0  # how often a batch was asked for after the last one
        self._overtaken = False  # whether another one has begun while batches of this one waited for their gradients

    def __next__(self) -> list[int]:
        ledger = self._ledger
        with ledger.lock:
            elsewhere = ledger.read_elsewhere()
            if elsewhere:  # perhaps not from the start: some loaders ask for their first batches when they are made
                ledger.outstanding.steady = False
            if self._batches is None:
                self._reader = threading.current_thread() if elsewhere else self._reader
                before, self._batches, ledger.reader = ledger.reader, self._start(self), self
                if before:
                    before._overtaken = bool(ledger.outstanding.waiting)
                self._read_ahead = _read_ahead(sys._getframe(1).f_locals.get("self"))
                ledger.outstanding.by_loader = self._read_ahead
            if ledger.reader is self:
                ledger.outstanding.ask()
            elif not self.read_out or (self._overtaken and ledger.outstanding.delivering and not elsewhere):
                raise CdgrabError(
                    "a new epoch of this sampler has begun: give every loader a sampler of its own, and to look at a "
                    "batch, make a loader without this sampler"
                )
            if self.read_out:
                self._in_vain += 1
                raise StopIteration
            batch = self._batches[self._next]
            self._next += 1
            ledger.outstanding.waiting.append(batch)
            ledger.handed_out += batch.epoch == ledger.sorter.epoch
            ledger.last_event = "batch"
            return batch.examples

    def continues(self, last: BatchIterator) -> bool:
        """Whether the same generator or thread reads both, one after the other."""
        return self._reader is not None and self._reader is last._reader

    def late(self) -> list[Batch]:
        """Those still to be handed out of the epoch before that of a state."""
        return [batch for batch in (self._batches or ())[self._next :] if batch.epoch < 0]

    @property
    def rest(self) -> bool:
        """Whether these are only the last batches of an epoch."""
        return bool(self._batches and self._batches[0].index)

    @property
    def read_out(self) -> bool:
        """Whether all batches were handed out."""
        return self._batches is not None and self._next == len(self._batches)

    @property
    def delivered(self) -> bool:
        """Whether the loop may have got all batches. (A loader with processes asks in vain until it has delivered all,
        and a generator in between may not.)"""
        return self.read_out and self._in_vain >= self._read_ahead

    @property
    def ended(self) -> bool:
        """Whether it has got them, and, as far as can be told, knows that these were all."""
        return self.delivered and self._in_vain > 0

    def state_dict(self) -> dict:
        """How far this iterator has read; a StatefulDataLoader saves it beside the sampler's state.

        With loader processes it saves after every batch that it reads ahead: first the iterator's state, then the
        sampler's. The gradients of that batch do not exist yet, so `last_event` tells `OrderedBatchSampler.state_dict`
        that a note is enough. Without loader processes it saves when the user asks, the sampler's state first.
        """
        if self._ledger.last_event == "batch":
            self._ledger.last_event = "batch noted"
        sorter = self._ledger.sorter
        return {"epoch": sorter.epoch if sorter else -1, "batches": self._ledger.handed_out}

    def load_state_dict(self, state: dict) -> None:
        """The sampler's own state, loaded before, must be of the same moment. (A state waiting for `attach` is assumed
        to match.)"""
        if not isinstance(state, dict) or not all(type(state.get(name)) is int for name in ("epoch", "batches")):
            raise CdgrabError("this is not the state of a loader with such a sampler")
        there, ledger = (state["epoch"], state["batches"]), self._ledger
        here = (ledger.sorter.epoch, ledger.batches_done()) if ledger.sorter else there
        if there != here:
            raise CdgrabError(
                f"the loader was saved in epoch {there[0]} after batch {there[1]}, the sampler in epoch {here[0]} "
                f"after batch {here[1]}: save both together, at a step of the optimiser, with snapshot_every_n_steps=1"
            )
