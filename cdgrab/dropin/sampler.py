"""A batch sampler that learns its order from the gradients of the training it feeds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sized
from contextlib import contextmanager

from torch import nn
from torch.utils.data import Sampler

from cdgrab.checks import count, one_of, random_seed, refuse_unknown_options
from cdgrab.dropin import refusals, units
from cdgrab.dropin.gradients import ObservedModel
from cdgrab.dropin.ledger import BatchIterator, Ledger
from cdgrab.errors import CdgrabError
from cdgrab.runtime.group import one_worker_per_process
from cdgrab.runtime.state import gathered
from cdgrab.sorters import SORTERS, make_sorter, sorter_options
from cdgrab.sorters.base import Sorter

UNITS = ("batch", "example")
SETTINGS = ("batch_size", "accumulation_steps", "unit", "drop_last", "seed")
STATE_VERSION = 1
BUFFER_MB = 32.0  # rows that are decided together: the more, the fewer exchanges of inner products


class OrderedBatchSampler(Sampler[list[int]]):
    """Batches of example numbers for a `DataLoader(dataset, batch_sampler=…)`, in an order that is learnt anew for
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
        one_of("unit", unit, UNITS)
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
        self.ledger = Ledger(self.batch_size, self.accumulation_steps, unit)
        self._model: ObservedModel | None = None
        self._waiting: dict | None = None  # a state that was loaded before `attach`
        self._began = -1  # the position at which the last iteration began; -1: there was none, or none since a load
        if not SORTERS[sorter].needs_gradients:
            self._make_sorter(1)  # orders can be had without a model

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(sorter={self._sorter_name!r}, unit={self.unit!r}, batches={self._batches}, "
            f"processes={self.group.world_size}, attached={self._model is not None})"
        )

    @property
    def sorter(self) -> Sorter | None:
        """What decides the orders; None where that needs gradients and no model is attached yet."""
        return self.ledger.sorter

    # -- what a DataLoader wants --------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches per epoch, of this process."""
        return self._batches

    def __iter__(self) -> BatchIterator:
        """The batches of the next epoch; after `load_state_dict` the rest of the one that was interrupted."""
        return BatchIterator(self.ledger, self._start_epoch)

    def set_epoch(self, epoch: int) -> None:
        """Accepted, since scripts call it on a DistributedSampler. Epochs are counted here without it."""

    def _start_epoch(self) -> list[list[int]]:
        """Starts the next epoch, or goes on with one. Returns the batches that are left of it."""
        sorter, ledger = self.sorter, self.ledger
        if sorter is None:
            raise CdgrabError("call sampler.attach(model) before the first epoch: orders come from its gradients")
        if self._began < 0:  # wrappers that come later are not worth a search
            refusals.refuse_wrappers(self)
        if self._model and sorter.needs_gradients:
            refusals.refuse_new_parameters(self._model.model, self._model.parameters)
        only_looked = 0 < sorter.position < sorter.units and sorter.position == self._began
        if not ledger.resuming and not only_looked:
            self._next_order()
        ledger.resuming, self._began, self._waiting = False, sorter.position, None
        ledger.hand_out_from_here()
        return self._in_order(sorter.order(sorter.epoch)[0].tolist())[ledger.handed_out :]

    def _in_order(self, order: list[int]) -> list[list[int]]:
        if self.unit == "example":
            return [batch.tolist() for batch in self._own[order].split(self.batch_size)]
        return [batch for unit in order for batch in self._own[unit]]

    def _next_order(self) -> None:
        sorter, epoch = self.sorter, self.sorter.epoch
        if epoch >= 0 and sorter.needs_gradients and not sorter.position:
            if self.ledger.handed_out == self._batches:
                _warn(
                    f"no gradient of epoch {epoch} was seen, so it starts again: attach the model that is trained (and "
                    "to look at batches only, make a loader without this sampler)"
                )
            return  # else somebody only looked at a batch
        unseen = sorter.units - sorter.position if epoch >= 0 else 0
        if unseen and sorter.needs_gradients:
            name = "examples" if self.unit == "example" else "batches" if self.accumulation_steps == 1 else "units"
            _warn(
                f"epoch {epoch} ended with {unseen} of {sorter.units} {name} without a gradient; they "
                "keep their order (they are the last: call sampler.skip() for batches left out in between)"
            )
        if self.ledger.not_finite:
            _warn(f"gradients of epoch {epoch} were not finite; what was not, counted as zero")
        sorter.order(epoch + 1, cut_short=True)
        self.ledger.not_finite = False

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
        if self._model:
            raise CdgrabError("this sampler is attached to a model already; make another one for another model")
        observed = ObservedModel(model, self.ledger, self.group, compress, sparsifier, **sparsifier_options)
        layout = self._layout() | {"sorter": self._sorter_name, "options": self._options, "dim": observed.dim}
        refusals.refuse_different_ranks(self.group, layout)
        before = dict(vars(self.ledger))
        self._model, self.ledger.scaler, self.ledger.sparsifier = observed, scaler, observed.sparsifier
        try:
            if self.sorter is None:
                self._make_sorter(observed.dim)
            if self._waiting is not None:
                self.load_state_dict(self._waiting)
            observed.start()
        except BaseException:  # as if nothing had happened
            observed.stop()
            self._model = None
            vars(self.ledger).update(before)
            raise
        self._waiting = None
        return self

    def detach(self) -> None:
        """Look at the model no longer. (DDP keeps a communication hook for ever: it goes on averaging.)"""
        if self._model:
            self._model.stop()
        self.ledger.paused = True

    @contextmanager
    def paused(self):
        """Backward passes in this context are not counted: those that do not belong to a batch of the loader."""
        before, self.ledger.paused = self.ledger.paused, True
        try:
            yield
        finally:
            self.ledger.paused = before

    def skip(self) -> None:
        """The batch that came last gets no backward pass; its gradient counts as zero. On all processes together."""
        if self._model and self.ledger.start_backward():
            self._model.gradients.skip()

    def _make_sorter(self, dim: int) -> None:
        buffer = {"buffer_mb": BUFFER_MB} if "buffer_mb" in sorter_options(self._sorter_name) else {}
        options = {"seed": self.seed, "group": self.group} | buffer | self._options
        workers, units = self.group.workers, len(self._own)
        self.ledger.sorter = make_sorter(self._sorter_name, workers=workers, units=units, dim=dim, **options)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """Everything needed to go on from here, mid-epoch too. All processes call it; all get the whole state.

        A StatefulDataLoader that has just read a batch ahead gets a note in its place, see `BatchIterator.state_dict`.
        """
        if self.sorter is None:
            raise CdgrabError("a sampler has no state before sampler.attach(model)")
        ledger, sparsifier = self.ledger, self.ledger.sparsifier
        noted, ledger.last_event = ledger.last_event == "batch noted", "state"
        if noted and ledger.handed_out > ledger.batches_done():
            return {"version": STATE_VERSION, "read_ahead": True}
        if ledger.passes:
            raise CdgrabError("gradients are being accumulated: take the state after a step of the optimiser")
        return {
            "version": STATE_VERSION,
            "layout": self._layout(),
            "sorter": gathered(self.sorter.state_dict(), self.group),
            "sparsifier": gathered(sparsifier.state_dict(), self.group) if sparsifier else None,
        }

    def load_state_dict(self, state: dict, *, repartition: bool = False) -> None:
        """Go on where `state_dict` was taken; before or after `attach`.

        A state of another number of processes, batch size or dataset is refused; with `repartition` the dataset is
        divided anew and orders start at random.
        """
        if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
            raise CdgrabError("this is not the state of an OrderedBatchSampler")
        if "read_ahead" in state:  # of a loader: our own was loaded before, and its iterator compares the two
            if self.sorter is None or self.sorter.epoch < 0 or self._began >= 0:
                raise CdgrabError(
                    "this loader reads ahead, so its state lacks gradients: save sampler.state_dict() beside it, "
                    "and load that first"
                )
            self.ledger.resuming = True  # though nothing may be left of the epoch
            return
        if not refusals.same_layout(state["layout"], self._layout(), repartition):
            return
        if self._model is None:
            self._waiting = state  # for `attach`
            if self.sorter is None:
                return
        else:
            refusals.refuse_other_sparsifier(state["sparsifier"], self.ledger.sparsifier)
        self.sorter.load_state_dict(state["sorter"])
        if self.ledger.sparsifier:
            self.ledger.sparsifier.load_state_dict(state["sparsifier"])
        self.ledger.resuming = self.sorter.epoch >= 0 and self.sorter.position < self.sorter.units
        self.ledger.hand_out_from_here()
        self._began = -1

    def _layout(self) -> dict:
        """What decides which examples make a batch, and which batches a unit."""
        data = {"examples": self._examples, "processes": self.group.world_size}
        return data | {name: getattr(self, name) for name in SETTINGS}


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=5)  # at the loader
