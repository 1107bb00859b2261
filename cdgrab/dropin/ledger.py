"""The current epoch: batches handed out, backward passes seen, gradients passed on to the sorter."""

from __future__ import annotations

import math
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from cdgrab.dropin.diagnosis import Diagnosis
from cdgrab.dropin.outstanding import Batch, Outstanding
from cdgrab.dropin.parts import Parts
from cdgrab.dropin.refusals import CYCLE, ONCE, REENTRANT
from cdgrab.dropin.warn import warn
from cdgrab.errors import CdgrabError
from cdgrab.sorters.base import Sorter
from cdgrab.sparsify.base import Sparsifier


class Reader(Protocol):
    """A `BatchIterator`, as others see it."""

    read_out: bool
    rest: bool
    delivered: bool
    ended: bool

    def late(self) -> list[Batch]: ...


class Ledger:
    """Credits gradients to batches, first in, first out (see `Outstanding`), and passes them on to the sorter.

    The sorter is told a gradient only if its batch is the one whose turn it is. A loop that fetches the next epoch's
    batches before the last gradients are in gets an order without these; they come too late and are not told.
    """

    def __init__(self, batch_size: int, accumulation_steps: int, unit: str) -> None:
        self.batch_size, self.accumulation_steps, self.unit = batch_size, accumulation_steps, unit
        self.sorter: Sorter | None = None
        self.scaler: object = None  # its scale is divided out of every gradient
        self.sparsifier: Sparsifier | None = None  # averages the gradients
        self.on_gpu = False  # where the model is
        self.paused = False
        self.resuming = False  # a state was loaded, and its epoch has not continued yet
        self.not_finite = False  # a gradient of this epoch was not finite
        self.handed_out = 0  # batches of this epoch
        self.passes = 0  # backward passes of the current unit
        self.reader: Reader | None = None  # the only iterator that may hand out batches; older ones are refused
        self.last_event = ""  # see `BatchIterator.state_dict`
        self.outstanding = Outstanding()
        self.backward_seen = False  # in this iteration, whatever batch it belonged to
        self.left_early = ""  # what to tell if the batches outstanding when this iteration began are not used
        self.diagnosis: Diagnosis | None = None  # keeps what a report needs, if one is wanted
        self.stopwatch: AbstractContextManager = nullcontext()  # the same, if there is one: it counts the time inside
        self.lock: AbstractContextManager = nullcontext()  # between gradients and a thread that reads batches
        self._thread = 0  # the one that trains
        self._current: Batch | None = None  # the batch to which the last backward pass belongs

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
        return len(self.outstanding.waiting[0].examples) if self.unit == "example" else 1

    def train_in_this_thread(self) -> None:
        """Batches may be read in another one from now on."""
        self.lock, self._thread = threading.RLock(), threading.get_ident()

    def read_elsewhere(self) -> bool:
        """Whether this is another thread than the one that trains."""
        return self._thread not in (0, threading.get_ident())

    def begin(self, last: Reader | None, reads_on: bool) -> None:
        """An iteration begins after this one; reads_on: see `Outstanding.begin`."""
        reads_on = reads_on and self._thread != 0  # before `attach` nothing is used
        if last is not None and last.ended and not reads_on:
            self._ask_about_the_first()
        self.outstanding.steady = not self.read_elsewhere()
        self.outstanding.begin(last is None or last.read_out, reads_on)
        self.backward_seen, self.left_early = False, ""
        if not self.outstanding.waiting:
            self.passes = 0

    def _ask_about_the_first(self) -> None:
        if number := self.outstanding.may_be_left_out():
            batches = "1 batch" if number == 1 else f"{number} batches"
            warn(
                f"at the end of the epoch {batches} had no backward pass. If the loop fetches as many ahead, also over "
                "the end of an epoch, there is nothing to do. If it has left them out, gradients are credited to the "
                "wrong batches: call sampler.skip() for every batch without a backward pass"
            )
            self.outstanding.certain = True  # asked once

    def forget(self, pace: dict[str, int | bool]) -> None:
        """A state was loaded, so that nothing is outstanding; pace: see `Outstanding.forget`."""
        self.outstanding.forget(**pace)
        if self.diagnosis:
            self.diagnosis.forget()
        self.handed_out, self.passes, self.reader = self.batches_done(), 0, None
        self.backward_seen, self.left_early = False, ""

    def is_active(self) -> bool:
        """Whether an epoch is under way, so that gradients belong to a batch."""
        return not (self.paused or self.resuming or self.sorter is None or self.sorter.epoch < 0)

    def start_backward(self) -> bool:
        """Called when a backward pass starts. Returns whether it belongs to a batch. One too many is refused."""
        if self.on_gpu and not self.paused and torch.cuda.is_current_stream_capturing():
            raise CdgrabError(
                "this backward pass is captured in a CUDA graph, which will run without hooks: call "
                "torch.cuda.make_graphed_callables before attach instead, or use torch.compile"
            )
        if not self.is_active():
            return False
        self.last_event = "backward"
        with self.lock:
            if not self.outstanding.waiting:
                raise CdgrabError(
                    f"more backward passes than the {self.handed_out} batches so far: {ONCE}, and detach() a sampler "
                    f"that is used no longer ({REENTRANT}; {CYCLE})"
                )
            self._settle()
            self._current = self.outstanding.waiting[0]
        return True

    def _settle(self) -> None:
        reader, read_out = self.reader, self.reader.read_out
        found = self.outstanding.settle(read_out and reader.rest, read_out and reader.delivered)
        if found.extra:
            raise CdgrabError(f"more backward passes than batches: {ONCE} ({REENTRANT})")
        if found.dropped:
            self.passes = 0
            if self.left_early:
                warn(self.left_early)
        if found.doubtful:
            warn(
                "a batch had no backward pass, so it is uncertain which batches the next gradients belong to, and the "
                "rest of this epoch does not count: call sampler.skip() for batches that are left out (a loop that "
                "from now on fetches more batches ahead counts again in the next epoch)"
            )
        self.backward_seen, self.left_early = True, ""

    def count_pass(self) -> None:
        """Count one more backward pass of the current unit."""
        with self.lock:
            self.outstanding.use()
        self.passes += 1

    def end_unit(self) -> int:
        """Let the next backward pass belong to another unit. Returns how many this one had."""
        passes, self.passes = self.passes, 0
        return passes

    def unit_complete(self) -> bool:
        """Count a backward pass of the current unit. Returns whether it was the last one."""
        self.count_pass()
        if (self._current.index + 1) % self.accumulation_steps:
            return False
        self.end_unit()
        return True

    def scale(self, like: Tensor) -> Tensor | float:
        """The factor that the scaler multiplies gradients by. If it is on the device of `like` it stays there: nobody
        waits for a GPU to tell."""
        if self.scaler is None:
            return 1.0
        there = getattr(self.scaler, "_scale", None)
        return there if isinstance(there, Tensor) and there.device == like.device else self.scaler.get_scale()

    def current_unit(self) -> tuple[int, int]:
        """To which this backward pass belongs: the epoch, and the place of the unit's first batch in it."""
        steps = 1 if self.unit == "example" else self.accumulation_steps
        return self._current.epoch, self._current.index // steps * steps

    def its_turn(self) -> bool:
        """Whether the sorter waits for the gradient of the current unit: not if that comes too late, or if it is not
        certain whose it is."""
        return self.outstanding.counts and self.current_unit() == (self.sorter.epoch, self.batches_done())

    def observe(self, gradients: Tensor) -> None:
        """Gradients [k, dim] of the next k units of this process, which may be overwritten here."""
        with self.lock, self.stopwatch:
            if self.unit == "example":
                if len(gradients) != self.next_units():
                    wanted = f"the {self.next_units()} of its batch"
                    raise CdgrabError(f"a backward pass has gradients of {len(gradients)} examples instead of {wanted}")
                self.outstanding.use()
            if not self.its_turn():
                return
            sorter, start = self.sorter, self.sorter.position
            if sorter.needs_gradients or self.diagnosis:
                gradients = self._clean(gradients.detach())
            if self.diagnosis:
                self.diagnosis.put(start, gradients)
            if not sorter.needs_gradients:  # it was made before the model was known, with dim 1
                gradients = gradients.new_zeros(len(gradients), sorter.dim)
            sorter.observe(range(start, start + len(gradients)), gradients[None], unseen=True)  # it is finite
            self._finish_epoch()

    def observe_parts(self, gradient: Parts) -> None:
        """The gradient of this process's next unit, which stays as it is."""
        sorter = self.sorter
        if not sorter.needs_gradients:
            self.observe(gradient.like.new_empty(1, 1))
        elif self.diagnosis or not sorter.takes_parts:
            self.observe(gradient.vector()[None])
        else:
            with self.lock:
                if not self.its_turn():
                    return
                if not gradient.like.is_cuda and not gradient.finite():
                    gradient, self.not_finite = gradient.cleaned(), True
                sorter.observe_parts(gradient)
                self._finish_epoch()

    def begin_shares(self, like: Tensor) -> None:
        """The next gradients follow in pieces, divided by coordinates: see `Sorter.begin_shares`."""
        self.sorter.begin_shares(like)
        if self.diagnosis:
            self.diagnosis.begin(self.sorter.division, like)

    def take_share(self, place: slice, share: Tensor, add: bool = False, mean: Tensor | None = None) -> None:
        """A piece, which may be overwritten here; see `Sorter.take_share`. mean: over the processes, which tells sooner
        whether all are finite."""
        share = self._clean(share, mean)
        if self.diagnosis:
            self.diagnosis.take(place, share, add)
        self.sorter.take_share(place, share, add)

    def kept_shares(self) -> tuple[Tensor, bool] | None:
        """See `Sorter.kept_shares`; None if pieces have to pass through here."""
        return None if self.diagnosis or self.scaler is not None else self.sorter.kept_shares()

    def took_shares(self, finite: bool) -> None:
        """Pieces were written there."""
        self.not_finite |= not finite

    def end_shares(self) -> None:
        """All pieces have been taken."""
        with self.stopwatch:
            if self.diagnosis:
                self.diagnosis.end(self.sorter.position)
            self.sorter.end_shares()
            self._finish_epoch()

    def observe_zero(self, like: Tensor) -> None:
        """The next gradients count as zero; like: a tensor of their type and device."""
        if not self.takes_shards:
            self.observe(like.new_zeros(self.next_units(), self.sorter.dim))
        elif self.its_turn():
            width = self.sorter.division.width
            like = like.float() if like.element_size() < 4 else like  # the gradients to come are not in 16 bits either
            self.begin_shares(like)
            self.take_share(slice(0, width), like.new_zeros(self.sorter.workers, width))
            self.end_shares()

    def _finish_epoch(self) -> None:
        """All processes observe an epoch's last gradient, but one alone may ask for the next order: drain now. (Where
        there is only one process, it need not wait yet.)"""
        if self.sorter.position == self.sorter.units and self.sorter.group.world_size > 1:
            self.sorter.drain()

    def _clean(self, gradients: Tensor, mean: Tensor | None = None) -> Tensor:
        """In float32 at least, without the scaler's scale, and finite: the scaler skips steps that overflow anyway."""
        gradients = gradients.float() if gradients.element_size() < 4 else gradients
        if self.scaler is not None:
            gradients /= self.scale(gradients)
        if gradients.is_cuda or not math.isfinite(float((gradients if mean is None else mean).sum())):
            self.not_finite |= not gradients.is_cuda
            gradients.nan_to_num_(0.0, 0.0, 0.0)
        return gradients
