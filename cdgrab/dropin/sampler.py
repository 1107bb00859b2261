"""A batch sampler that learns its order from the gradients of the training it feeds."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator, Sized
from contextlib import contextmanager

from torch import Tensor, nn
from torch.utils.data import Sampler

from cdgrab.checks import count, random_seed, refuse_unknown_options
from cdgrab.dropin import refusals, units
from cdgrab.dropin.gradients import Attachment
from cdgrab.dropin.ledger import Pace
from cdgrab.errors import CdgrabError
from cdgrab.runtime.group import one_worker_per_process
from cdgrab.runtime.state import gathered
from cdgrab.sorters import SORTERS, make_sorter, sorter_options
from cdgrab.sorters.base import Sorter

UNITS = ("batch", "example")
STATE_VERSION = 1
BUFFER_MB = 32.0  # of rows that are decided together: the more, the fewer exchanges of inner products


class OrderedBatchSampler(Sampler[list[int]]):
    """Batches of example numbers for a `DataLoader(dataset, batch_sampler=…)`, in an order that is chosen anew for
    every epoch from the gradients of the last one.

        sampler = OrderedBatchSampler(dataset, batch_size=32, sorter="cd_grab", seed=0)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
        sampler.attach(model)                      # a plain module, or one wrapped in DistributedDataParallel
        for epoch in range(epochs):
            for batch in loader: …                 # one backward pass per batch

    Every process owns a random part of the dataset, fixed by `seed`. What is ordered is a unit: a fixed batch of
    examples (`unit="batch"`), several of them when gradients are accumulated over `accumulation_steps` batches before
    they are averaged, or a single example (`unit="example"`, for models without BatchNorm; slower). Processes are found
    as PyTorch's DistributedSampler finds them; `process_group` names others. Without `drop_last` a few examples are
    visited twice where the dataset cannot be divided evenly, also as there. Further options are the sorter's.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        sorter: str = "cd_grab",
        seed: int = 0,
        drop_last: bool = False,
        accumulation_steps: int = 1,
        unit: str = "batch",
        process_group: object = None,
        **options,
    ) -> None:
        if not hasattr(dataset, "__len__") or not len(dataset):
            raise CdgrabError("the dataset must have a length of at least 1: an iterable one has no order to choose")
        if unit not in UNITS:
            raise CdgrabError(f"unit must be {' or '.join(UNITS)}, got {unit!r}")
        self.batch_size, self.seed = count("batch_size", batch_size, 1), random_seed("seed", seed)
        self.accumulation_steps = count("accumulation_steps", accumulation_steps, 1)
        self.unit, self.drop_last, self.group = unit, bool(drop_last), one_worker_per_process(process_group)
        refusals.refuse_gpu_only(self.group)
        refuse_unknown_options("sorter", sorter, options, sorter_options(sorter))
        self._sorter_name, self._options = sorter, options
        multiple = self.batch_size * self.accumulation_steps if drop_last else None
        own = units.share(len(dataset), self.group.rank, self.group.world_size, self.seed, multiple)
        self._examples = len(dataset)
        self._batches = math.ceil(len(own) / self.batch_size)
        self._own = own if unit == "example" else units.cut(own, self.batch_size, self.accumulation_steps)
        self.sorter: Sorter | None = None
        self._loaded: dict | None = None  # a state that waits for `attach`
        self._attachment: Attachment | None = None
        self._resuming = self._fresh = False  # in the middle of an epoch; a state was loaded, nothing done since
        self._paused = self._not_finite = False
        self._began = -1  # the position at which the last iteration began
        self.pace = Pace()
        self._iterator = object()
        self._scaler = self._sparsifier = None
        self._handles: list = []
        if not SORTERS[sorter].needs_gradients:
            self._make_sorter(1)  # orders can be had without a model

    # -- what a DataLoader wants ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches per epoch, of this process."""
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of the next epoch; after `load_state_dict` the rest of the one that was interrupted.

        The epoch start_backward with its first batch: loaders make iterators that they never use.
        """
        if self.sorter is None:
            raise CdgrabError("call sampler.attach(model) before the first epoch: orders come from its gradients")
        refusals.refuse_wrapper(sys._getframe(1).f_locals.get("self"))
        if self._attachment and self.sorter.needs_gradients:
            self._attachment.check()
        if not self._resuming and not self._only_looked():
            self._next_epoch()
        self._resuming = self._fresh = False
        self._began = self.sorter.position
        self._loaded = None
        self._iterator = mine = object()
        self.pace.start(self._done())
        for batch in self._in_order(self.sorter.order(self.sorter.epoch)[0].tolist())[self.pace.yielded :]:
            if self._iterator is not mine:
                raise CdgrabError("a new epoch of this sampler has begun: give every loader a sampler of its own")
            self.pace.yielded += 1
            yield batch

    def _only_looked(self) -> bool:
        """Since the last iteration began, in the middle of an epoch, no gradient has come."""
        return 0 < self.sorter.position < self.sorter.units and self.sorter.position == self._began

    def set_epoch(self, epoch: int) -> None:
        """Accepted, since scripts call it on a DistributedSampler. Epochs are counted here without it."""

    def _in_order(self, order: list[int]) -> list[list[int]]:
        if self.unit == "example":
            return [batch.tolist() for batch in self._own[order].split(self.batch_size)]
        return [batch for unit in order for batch in self._own[unit]]

    def _done(self) -> int:
        """Batches whose gradients have been seen."""
        position = self.sorter.position
        return math.ceil(position / self.batch_size) if self.unit == "example" else position * self.accumulation_steps

    def _next_epoch(self) -> None:
        sorter, epoch = self.sorter, self.sorter.epoch
        self.pace.backwards = 0
        if epoch >= 0 and sorter.needs_gradients and not sorter.position:
            if self.pace.yielded == self._batches:
                _warn(
                    f"no gradient of epoch {epoch} was seen, so it starts again: attach the model that is trained (and "
                    "to look at batches only, make a loader without this sampler)"
                )
            return  # else somebody only looked at a batch
        unseen = sorter.units - sorter.position if epoch >= 0 else 0
        if unseen and sorter.needs_gradients:
            _warn(
                f"epoch {epoch} ended with {unseen} of {sorter.units} {self._unit_name()} without a gradient; they "
                "keep their order (they are the last: call sampler.skip() for batches left out in between)"
            )
        if self._not_finite:
            _warn(f"gradients of epoch {epoch} were not finite; what was not, counted as zero")
        sorter.order(epoch + 1, cut_short=True)
        self._not_finite = False

    def _unit_name(self) -> str:
        return "examples" if self.unit == "example" else "batches" if self.accumulation_steps == 1 else "units"

    # -- gradients ----------------------------------------------------------------------------------------------------

    def attach(
        self,
        model: nn.Module,
        *,
        scaler: object = None,
        compress: str | None = None,
        sparsifier: str | None = None,
        **sparsifier_options,
    ) -> OrderedBatchSampler:
        """Look at the gradients of `model` from now on, once per backward pass, before they are averaged. Last of all:
        after the model is complete, on its device, and wrapped in DistributedDataParallel.

        With DistributedDataParallel this replaces its all-reduce by an exchange of the same traffic, whose result is
        the same mean; `compress="bf16"` or `"fp16"` halves it, `sparsifier="exdyna"` (and its options, as for
        `cdgrab.make_sparsifier`) sends a selection only. `scaler`: the GradScaler whose scale gradients carry.
        """
        if self._attachment:
            raise CdgrabError("this sampler is attached to a model already; make another one for another model")
        attachment = Attachment(self, model, compress, sparsifier, sparsifier_options)
        layout = self._layout() | {"sorter": self._sorter_name, "options": self._options, "dim": attachment.dim}
        refusals.refuse_different_ranks(self.group, layout)
        before = self.sorter
        self._scaler, self._sparsifier = scaler, attachment.sparsifier
        try:
            if self.sorter is None:
                self._make_sorter(attachment.dim)
            if self._loaded is not None:
                self.load_state_dict(self._loaded)
            attachment.start()
        except BaseException:  # as if nothing had happened
            self._remove_hooks()
            self.sorter, self._scaler, self._sparsifier = before, None, None
            raise
        self._attachment, self._loaded = attachment, None
        return self

    def detach(self) -> None:
        """Look at the model no longer. (DDP keeps a communication hook for ever: it goes on averaging.)"""
        self._remove_hooks()
        self._paused = True

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @contextmanager
    def paused(self):
        """Backward passes in this context are not counted: those that do not belong to a batch of the loader."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _make_sorter(self, dim: int) -> None:
        buffer = {"buffer_mb": BUFFER_MB} if "buffer_mb" in sorter_options(self._sorter_name) else {}
        self.sorter = make_sorter(
            self._sorter_name,
            workers=self.group.workers,
            units=len(self._own),
            dim=dim,
            seed=self.seed,
            group=self.group,
            **(buffer | self._options),
        )

    def skip(self) -> None:
        """The batch that came last gets no backward pass; its gradient counts as zero. On all processes together."""
        if self._attachment and self.start_backward():
            self._attachment.skip()

    def is_active(self) -> bool:
        """Whether gradients belong to a batch now: some epoch is under way."""
        return not (self._paused or self._resuming or self.sorter is None or self.sorter.epoch < 0)

    def start_backward(self) -> bool:
        """Called when a backward pass start_backward. Returns whether it counts; one too many is refused."""
        counts = self.is_active()
        if counts:
            self.pace.backward(self._done())
        return counts

    def scale(self) -> float:
        """What gradients are multiplied by."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def observe(self, gradients: Tensor) -> None:
        """Gradients [k, dim] of the next k units of this process."""
        position = self.sorter.position
        if not self.sorter.needs_gradients:  # it was made before the model was known
            gradients = gradients.new_zeros(len(gradients), self.sorter.dim)
        self.sorter.observe(range(position, position + len(gradients)), self._clean(gradients.detach().clone())[None])
        self._end_epoch()

    def observe_shard(self, share: Tensor) -> None:
        """This process's coordinates of everybody's next gradient (see `cdgrab.runtime.mean`)."""
        self.sorter.observe_shard(self._clean(share))
        self._end_epoch()

    def _end_epoch(self) -> None:
        """With the last gradient of an epoch, where all processes are: one of them may ask for the next order alone."""
        if self.sorter.position == self.sorter.units:
            self.sorter.drain()

    def _clean(self, gradients: Tensor) -> Tensor:
        """In float32 at least, without the scaler's scale, and finite: a step that overflowed is skipped anyway."""
        gradients = gradients.float() if gradients.element_size() < 4 else gradients
        if self._scaler is not None:
            gradients /= self.scale()
        if gradients.is_cuda or not math.isfinite(float(gradients.sum())):
            self._not_finite |= not gradients.is_cuda
            gradients.nan_to_num_(0.0, 0.0, 0.0)
        return gradients

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """Everything needed to go on from here, mid-epoch too. All processes call it; all get the whole state."""
        if self.sorter is None:
            raise CdgrabError("a sampler has no state before sampler.attach(model)")
        if _called_by_a_loader() and self.pace.yielded > self._done():
            # A stateful loader takes notes whenever it reads ahead, before the gradients of those batches are there.
            return {"version": STATE_VERSION, "read_ahead": self.pace.yielded, "epoch": self.sorter.epoch}
        if self.pace.backwards:
            raise CdgrabError("gradients are being accumulated: take the state after a step of the optimiser")
        return {
            "version": STATE_VERSION,
            "layout": self._layout(),
            "sorter": gathered(self.sorter.state_dict(), self.group),
            "sparsifier": gathered(self._sparsifier.state_dict(), self.group) if self._sparsifier else None,
        }

    def load_state_dict(self, state: dict, *, repartition: bool = False) -> None:
        """Go on where `state_dict` was taken; before or after `attach`.

        A state of another number of processes, batch size or dataset is refused; with `repartition` the dataset is
        divided anew and orders start at random.
        """
        if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
            raise CdgrabError("this is not the state of an OrderedBatchSampler")
        if "read_ahead" in state:  # of a loader: our own state, loaded before, must be of the same moment
            here = (self.sorter.epoch, self._done()) if self._fresh else None
            refusals.refuse_other_moment((state["epoch"], state["read_ahead"]), here)
            self._resuming = True  # though nothing may be left of the epoch
            return
        if not refusals.same_layout(state["layout"], self._layout(), repartition):
            return
        if self._attachment is None and self._loaded is not state:
            self._loaded = state  # `attach` comes back with it
            if self.sorter is None:
                return
        else:
            refusals.refuse_other_sparsifier(state["sparsifier"], self._sparsifier)
        self.sorter.load_state_dict(state["sorter"])
        if self._sparsifier:
            self._sparsifier.load_state_dict(state["sparsifier"])
        self._resuming = self.sorter.epoch >= 0 and self.sorter.position < self.sorter.units
        self._fresh, self.pace.backwards = True, 0
        self.pace.start(self._done())

    def _layout(self) -> dict:
        return {
            "examples": self._examples,
            "processes": self.group.world_size,
            "batch_size": self.batch_size,
            "accumulation_steps": self.accumulation_steps,
            "unit": self.unit,
            "drop_last": self.drop_last,
            "seed": self.seed,
        }


def _called_by_a_loader() -> bool:
    return sys._getframe(2).f_globals.get("__name__", "").startswith("torchdata.")


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=4)  # at the loader
