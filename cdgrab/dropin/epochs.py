"""When a sampler is iterated: whether the next epoch starts, the last one goes on, or it starts again."""

from __future__ import annotations

from collections.abc import Callable

from cdgrab.dropin.iterator import BatchIterator
from cdgrab.dropin.ledger import Ledger
from cdgrab.dropin.outstanding import Batch
from cdgrab.dropin.refusals import refuse_threads, refuse_unaveraged
from cdgrab.dropin.warn import warn
from cdgrab.runtime.group import WorkerGroup


class Epochs:
    """The epochs of a ledger's sorter. batches: in an epoch, of this process."""

    def __init__(self, ledger: Ledger, group: WorkerGroup, batches: int) -> None:
        self._ledger, self._group, self._batches = ledger, group, batches
        self._late: list[Batch] = []  # of the epoch before, to be used first: a state says so that was loaded
        self.began = -1  # the position at which the last iteration began; -1: none yet, or none since a load

    def resume(self, pace: dict[str, int | bool], late: list[Batch]) -> None:
        """Go on from a state that was loaded: see `cdgrab.dropin.outstanding.loaded`."""
        ledger, sorter = self._ledger, self._ledger.sorter
        ledger.resuming = sorter.epoch >= 0 and sorter.position < sorter.units
        ledger.forget(pace)
        self._late, self.began = late, -1

    def late(self) -> list[Batch]:
        """Batches of the epoch before that are still to be used, whether they were handed out or not."""
        reader = self._ledger.reader
        return self._ledger.outstanding.late() + (reader.late() if reader else self._late)

    def start(self, iterator: BatchIterator, in_order: Callable[[list[int]], list[list[int]]]) -> list[Batch]:
        """Start or continue an epoch. Returns the remaining batches; in_order: the batches of units."""
        ledger, sorter, last = self._ledger, self._ledger.sorter, self._ledger.reader
        refuse_unaveraged(ledger.passes, ledger.accumulation_steps)
        if ledger.backward_seen:
            self._late = []
        ledger.begin(last, reads_on=last is not None and iterator.continues(last))
        only_looked = not ledger.outstanding.may_be_held() and sorter.position == self.began
        if not ledger.resuming and not (only_looked and 0 < sorter.position < sorter.units):
            with ledger.stopwatch:
                self._next_order(only_looked)
        ledger.resuming, self.began = False, sorter.position
        ledger.handed_out = first = ledger.batches_done()
        order = sorter.order(sorter.epoch)
        if ledger.diagnosis:
            ledger.diagnosis.begin_epoch(sorter.epoch, order)
        batches = in_order(order[0].tolist())[first:]
        return self._late + [Batch(sorter.epoch, index, batch) for index, batch in enumerate(batches, first)]

    def _next_order(self, only_looked: bool) -> None:
        ledger, sorter = self._ledger, self._ledger.sorter
        epoch = sorter.epoch
        if epoch >= 0 and sorter.needs_gradients and not sorter.position and only_looked:
            if ledger.handed_out == self._batches:
                warn(
                    f"no gradient of epoch {epoch} was seen, so it starts again: attach the model that is trained (or, "
                    "to look at batches only, make a loader without this sampler)"
                )
            return  # otherwise somebody only looked at a batch
        if epoch >= 0 and sorter.needs_gradients and sorter.position < sorter.units:
            self._tell_unseen()
        if ledger.not_finite:
            warn(f"some gradients of epoch {epoch} were not finite and were counted as zero")
        sorter.order(epoch + 1, cut_short=True)
        ledger.not_finite, self._late = False, []

    def _tell_unseen(self) -> None:
        """Some units of this epoch have no gradient, at least not yet."""
        ledger, sorter = self._ledger, self._ledger.sorter
        refuse_threads(self._group, ledger.read_elsewhere())
        name = "examples" if ledger.unit == "example" else "batches" if ledger.accumulation_steps == 1 else "units"
        sentence = (
            f"epoch {sorter.epoch} ended with {sorter.units - sorter.position} of {sorter.units} {name} without a "
            "gradient; they keep their order (they are the last: call sampler.skip() for batches left out in between)"
        )
        if not ledger.outstanding.waiting:
            warn(sentence)
            return
        ledger.left_early = sentence  # told at the next backward pass, if their gradients are not still to come
        if not sorter.position:
            warn("the loop fetches a whole epoch of batches ahead: gradients come too late to learn an order from")
