"""The batches of one epoch, and what torchdata's StatefulDataLoader saves of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cdgrab.dropin.ledger import Ledger
from cdgrab.dropin.refusals import refuse_other_moment
from cdgrab.errors import CdgrabError


class BatchIterator(Iterator[list[int]]):
    """Hands out batches. The epoch starts with its first batch: loaders make iterators that they never use.

    start: begins an epoch, or goes on with one, and returns its remaining batches.
    """

    def __init__(self, ledger: Ledger, start: Callable[[], list[list[int]]]) -> None:
        self._ledger, self._start = ledger, start
        self._batches: Iterator[list[int]] | None = None

    def __next__(self) -> list[int]:
        if self._batches is None:
            self._batches, self._ledger.reader = iter(self._start()), self
        batch = next(self._batches)
        if self._ledger.reader is not self:
            raise CdgrabError("a new epoch of this sampler has begun: give every loader a sampler of its own")
        self._ledger.handed_out += 1
        self._ledger.last_event = "batch"
        return batch

    def state_dict(self) -> dict:
        """How far this iterator has read; a StatefulDataLoader saves it beside the sampler's state.

        With loader processes it does so whenever it has read a batch ahead: it asks the iterator, then the sampler. The
        gradients of that batch are not there yet, so `OrderedBatchSampler.state_dict` is told by `last_event` that only
        a note is wanted. Without them it asks when its user does, the sampler first.
        """
        if self._ledger.last_event == "batch":
            self._ledger.last_event = "batch noted"
        sorter = self._ledger.sorter
        return {"epoch": sorter.epoch if sorter else -1, "batches": self._ledger.handed_out}

    def load_state_dict(self, state: dict) -> None:
        """The sampler's own state, loaded before, must be of the same moment."""
        ledger = self._ledger
        refuse_other_moment((state["epoch"], state["batches"]), (ledger.sorter.epoch, ledger.batches_done()))
