"""The current epoch: batches handed out, backward passes seen, gradients passed on to the sorter."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator

from torch import Tensor

from cdgrab.dropin.refusals import REENTRANT
from cdgrab.errors import CdgrabError
from cdgrab.sorters.base import Sorter
from cdgrab.sparsify.base import Sparsifier


class Ledger:
    """Matches gradients with batches. Every batch needs a backward pass; otherwise gradients are attributed to the
    wrong batches."""

    def __init__(self, batch_size: int, accumulation_steps: int, unit: str) -> None:
        self.batch_size, self.accumulation_steps, self.unit = batch_size, accumulation_steps, unit
        self.sorter: Sorter | None = None
        self.scaler: object = None  # its scale is divided out of every gradient
        self.sparsifier: Sparsifier | None = None  # averages the gradients
        self.paused = False
        self.resuming = False  # a state was loaded, and its epoch has not continued yet
        self.not_finite = False  # a gradient of this epoch was not finite
        self.handed_out = 0  # batches of this epoch
        self.passes = 0  # backward passes of the current unit
        self.reader: object = None  # the only iterator allowed to hand out batches; older ones are refused
        self.last_event = ""  # see `BatchIterator.state_dict`
        self._ahead: int | None = None  # how far the loader reads ahead; it never reads further than at the first pass

    @property
    def takes_shards(self) -> bool:
        """Whether the sorter takes this process's coordinates of all gradients, from the exchange for the mean, instead
        of whole gradients."""
        return self.unit == "batch" and self.sorter.by_shards(1, self.sparsifier is not None)

    def batches_done(self) -> int:
        """Batches of this epoch whose gradients have been observed."""
        position = self.sorter.position
        return math.ceil(position / self.batch_size) if self.unit == "example" else position * self.accumulation_steps

    def next_units(self) -> int:
        """How many units the next gradients belong to."""
        return min(self.batch_size, self.sorter.units - self.sorter.position) if self.unit == "example" else 1

    def hand_out_from_here(self) -> None:
        """Start an epoch, or continue one after the batches that are done."""
        self.handed_out, self.passes, self._ahead = self.batches_done(), 0, None

    def is_active(self) -> bool:
        """Whether an epoch is under way, so that gradients belong to a batch."""
        return not (self.paused or self.resuming or self.sorter is None or self.sorter.epoch < 0)

    def start_backward(self) -> bool:
        """Called when a backward pass starts. Returns whether it belongs to a batch. One too many is refused."""
        if not self.is_active():
            return False
        self.last_event = "backward"
        ahead = self.handed_out - self.batches_done() - self.passes - 1
        if ahead < 0:
            raise CdgrabError(
                f"more backward passes than the {self.handed_out} batches so far: call backward once per batch, and "
                f"run others inside `with sampler.paused():` ({REENTRANT})"
            )
        if self._ahead is not None and ahead > self._ahead:
            warnings.warn(
                "a batch had no backward pass, so the next gradient was attributed to it: call sampler.skip() for "
                "batches that are left out",
                stacklevel=4,
            )
        self._ahead = ahead if self._ahead is None else max(ahead, self._ahead)
        return True

    def count_pass(self) -> None:
        """Count one more backward pass of the current unit."""
        self.passes += 1

    def end_unit(self) -> int:
        """Let the next backward pass belong to another unit. Returns how many this one had."""
        passes, self.passes = self.passes, 0
        return passes

    def unit_complete(self) -> bool:
        """Count a backward pass of the current unit. Returns whether it was the last one."""
        self.count_pass()
        if self.passes < self.accumulation_steps:
            return False
        self.end_unit()
        return True

    def scale(self) -> float:
        """The factor that the scaler multiplies gradients by."""
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def observe(self, gradients: Tensor) -> None:
        """Gradients [k, dim] of the next k units of this process."""
        sorter, start = self.sorter, self.sorter.position
        if not sorter.needs_gradients:  # it was made before the model was known, with dim 1
            gradients = gradients.new_zeros(len(gradients), sorter.dim)
        sorter.observe(range(start, start + len(gradients)), self._clean(gradients.detach().clone())[None])
        self._finish_epoch()

    def begin_shares(self, like: Tensor) -> None:
        """The next gradients follow in pieces, divided by coordinates: see `Sorter.begin_shares`."""
        self.sorter.begin_shares(like)

    def take_share(self, place: slice, share: Tensor, add: bool = False) -> None:
        """A piece, which may be overwritten here; see `Sorter.take_share`."""
        self.sorter.take_share(place, self._clean(share), add)

    def end_shares(self) -> None:
        """All pieces have been taken."""
        self.sorter.end_shares()
        self._finish_epoch()

    def observe_zero(self, like: Tensor) -> None:
        """The next gradients count as zero; like: a tensor of their type and device."""
        sorter = self.sorter
        if self.takes_shards:
            sorter.observe_shard(like.new_zeros(sorter.workers, sorter.division.width))
            self._finish_epoch()
        else:
            self.observe(like.new_zeros(self.next_units(), sorter.dim))

    def _finish_epoch(self) -> None:
        """All processes observe an epoch's last gradient, but one alone may ask for the next order: drain now."""
        if self.sorter.position == self.sorter.units:
            self.sorter.drain()

    def _clean(self, gradients: Tensor) -> Tensor:
        """In float32 at least, without the scaler's scale, and finite: the scaler skips steps that overflow anyway."""
        gradients = gradients.float() if gradients.element_size() < 4 else gradients
        if self.scaler is not None:
            gradients /= self.scale()
        if gradients.is_cuda or not math.isfinite(float(gradients.sum())):
            self.not_finite |= not gradients.is_cuda
            gradients.nan_to_num_(0.0, 0.0, 0.0)
        return gradients


class BatchIterator(Iterator[list[int]]):
    """Hands out the batches of an epoch. The epoch starts with the first batch, since some iterators are never used.

    start: starts or continues an epoch, and returns the remaining batches.
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
