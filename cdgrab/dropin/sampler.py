"""A batch sampler that learns its order from the gradients of the training it feeds."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.data import Sampler

from cdgrab.checks import count, one_of, random_seed, refuse_unknown_options
from cdgrab.dropin import refusals, units
from cdgrab.dropin.diagnosis import Diagnosis
from cdgrab.dropin.epochs import Epochs
from cdgrab.dropin.gradients import ObservedModel
from cdgrab.dropin.iterator import BatchIterator
from cdgrab.dropin.ledger import Ledger
from cdgrab.dropin.outstanding import Batch, loaded, saved
from cdgrab.dropin.report import Report, made
from cdgrab.errors import CdgrabError
from cdgrab.runtime.agreement import refuse_different_ranks
from cdgrab.runtime.connection import one_worker_per_process
from cdgrab.runtime.fields import is_plain
from cdgrab.runtime.state import gathered
from cdgrab.sorters import SORTERS, make_sorter, sorter_options
from cdgrab.sorters.base import Sorter

UNITS = ("batch", "example")
SETTINGS = ("batch_size", "accumulation_steps", "unit", "drop_last", "seed")
STATE_VERSION = 1
PATIENCE = 300.0  # seconds until all ranks take the state: one of them may evaluate or write files first
COORDINATES = 256  # of every gradient, kept for `report`
BUFFER_MB = 32.0  # with several processes: more rows decided together means fewer exchanges of inner products
ALONE_MB = 2.0  # with one: so long gradients have no other rows of their size in memory


class OrderedBatchSampler(Sampler[list[int]]):
    """Batches of example numbers for a `DataLoader(dataset, batch_sampler=…)`, in an order learnt anew for every epoch
    from the gradients of the last one.

        sampler = OrderedBatchSampler(dataset, batch_size=32, sorter="cd_grab", seed=0)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
        sampler.attach(model)                      # a plain module, or one with DistributedDataParallel or fully_shard
        for epoch in range(epochs):
            for batch in loader: …                 # one backward pass per batch

    Every process owns a random part of the dataset, fixed by `seed`. What is ordered are units: fixed batches of
    examples (`unit="batch"`; `accumulation_steps` batches each if gradients are accumulated before they are averaged),
    or single examples (`unit="example"`, for models without BatchNorm; slower). As with PyTorch's DistributedSampler,
    the processes are those of the default process group (or of `process_group`), and without `drop_last` a few examples
    are visited twice if the dataset cannot be divided evenly; with it the same ones are left out in every epoch.
    `diagnose` keeps what `report` needs. Further options are the sorter's.

    Gradients are credited to batches in the order in which these were handed out, so a loop may fetch batches ahead,
    also over the end of an epoch: the next order is then made without the last gradients, which come too late and count
    for no other epoch. Whoever leaves out a batch says so with `skip()`: nobody can tell it from one fetched ahead (in
    the middle of an epoch, or after a state was loaded, it is noticed, and the rest of that epoch does not count; at
    the start of the first epoch it is asked about at its end).
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
        diagnose: bool | int = False,
        **options,
    ) -> None:
        refusals.refuse_dataset(dataset)
        one_of("unit", unit, UNITS)
        one_of("drop_last", drop_last, (True, False))
        self.batch_size, self.seed = count("batch_size", batch_size, 1), random_seed("seed", seed)
        self.accumulation_steps = count("accumulation_steps", accumulation_steps, 1)
        self.unit, self.drop_last, self.group = unit, drop_last, one_worker_per_process(process_group)
        refusals.refuse_gpu_only(self.group)
        refuse_unknown_options("sorter", sorter, options, sorter_options(sorter))
        self._sorter_name, self._options = sorter, options
        multiple = self.batch_size * self.accumulation_steps if drop_last else None
        own = units.share(len(dataset), self.group.rank, self.group.world_size, self.seed, multiple)
        self._examples = len(dataset)
        self._batches = math.ceil(len(own) / self.batch_size)
        self._own = own if unit == "example" else units.cut(own, self.batch_size, self.accumulation_steps)
        self.ledger = Ledger(self.batch_size, self.accumulation_steps, unit)
        self._kept = COORDINATES if diagnose is True else 0 if diagnose is False else count("diagnose", diagnose, 1)
        if self._kept:
            self.ledger.diagnosis = self.ledger.stopwatch = Diagnosis(self._kept, self.seed, self.group)
        self._model: ObservedModel | None = None
        self._detached = False
        self._waiting: dict | None = None  # a state that was loaded before `attach`
        self._epochs = Epochs(self.ledger, self.group, self._batches)
        if not SORTERS[sorter].needs_gradients:
            self._make_sorter(1)  # its orders do not need a model

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(batch_size={self.batch_size}, sorter={self._sorter_name!r}, seed={self.seed}, "
            f"unit={self.unit!r}, batches={self._batches}, processes={self.group.world_size}, "
            f"attached={self._model is not None})"
        )

    @property
    def drop_last(self) -> bool:
        """Whether examples that fill no batch are left out. accelerate asks when it is about to divide the batches."""
        refusals.refuse_division(sys._getframe(1))
        return vars(self)["drop_last"]

    @drop_last.setter
    def drop_last(self, value: bool) -> None:
        vars(self)["drop_last"] = value  # where a sampler that was saved as a whole has it, too

    @property
    def sorter(self) -> Sorter | None:
        """What decides the orders; None as long as it needs gradients and no model is attached."""
        return self.ledger.sorter

    # -- for a DataLoader ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches per epoch of this process."""
        return self._batches

    def __iter__(self) -> BatchIterator:
        """The batches of the next epoch; after `load_state_dict` the rest of the interrupted one."""
        caller = sys._getframe(1)
        refusals.refuse_batches_of_batches(self, caller)
        reader = caller if caller.f_code.co_flags & inspect.CO_GENERATOR else None
        return BatchIterator(self.ledger, self._start_epoch, reader)

    def set_epoch(self, epoch: int) -> None:
        """Does nothing; it exists because scripts call it on a DistributedSampler. The sampler counts epochs itself."""

    def _start_epoch(self, iterator: BatchIterator) -> list[Batch]:
        """Start or continue an epoch. Returns the remaining batches."""
        if self.sorter is None:
            raise CdgrabError(
                "call sampler.attach(model) before the first epoch: orders come from its gradients (to look at a batch "
                "before, make a loader without this sampler)"
            )
        if self._epochs.began < 0:  # not in every epoch: the search takes time
            refusals.refuse_wrappers(self, self.group.world_size)
        if self._model and self.sorter.needs_gradients:
            self._model.refuse_new_parameters()
        self._waiting = None
        return self._epochs.start(iterator, in_order=partial(units.in_order, self._own, self.batch_size))

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
        """Observe the gradients of `model` from now on, once per backward pass, before they are averaged. Call this
        last: after the model is complete, on its device, and wrapped in DistributedDataParallel or under `fully_shard`.

        With these it replaces the all-reduce or reduce-scatter by an exchange with the same traffic and the same mean.
        With DistributedDataParallel `compress="bf16"` or `"fp16"` halves the traffic; `sparsifier="exdyna"` (and its
        options, as for `cdgrab.make_sparsifier`) sends only a selection. `scaler`: the GradScaler that scales the
        gradients.
        """
        if self._model:
            raise CdgrabError("this sampler is attached to a model already; make another one for another model")
        refusals.refuse_scaler(scaler)
        refusals.refuse_wrappers(self, self.group.world_size)  # here on all processes; some wrappers read on one only
        observed = ObservedModel(model, self.ledger, self.group, compress, sparsifier, **sparsifier_options)
        layout = self._layout() | {"sorter": self._sorter_name, "options": self._options, "dim": observed.dim}
        layout |= {"compress": compress, "sparsifier": sparsifier, "its options": sorted(sparsifier_options.items())}
        layout |= {"diagnose": self._kept}
        refuse_different_ranks(self.group, layout, "the same sampler, of the whole dataset")
        before = dict(vars(self.ledger))
        self._model, self.ledger.scaler, self.ledger.sparsifier = observed, scaler, observed.sparsifier
        self.ledger.on_gpu = observed.parameters[0].is_cuda
        try:
            if self.sorter is None:
                self._make_sorter(observed.dim)
            if self._waiting is not None:
                self.load_state_dict(self._waiting)
            observed.start(model)
            self.ledger.train_in_this_thread()
        except BaseException:  # as if nothing had happened
            observed.stop()
            self._model = None
            vars(self.ledger).update(before)
            raise
        self._waiting = None
        return self

    def detach(self) -> None:
        """Stop observing the model. (DDP keeps a communication hook for ever: it continues to average. With FSDP all
        processes call this together.)"""
        if self._model:
            self._model.stop()
        self.ledger.paused = self._detached = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore the backward passes in this context: for those that do not belong to a batch of the loader."""
        before, self.ledger.paused = self.ledger.paused, True
        try:
            yield
        finally:
            self.ledger.paused = before or self._detached

    def skip(self) -> None:
        """The batch whose backward pass would be next gets none; its gradient counts as zero. All processes call this
        together."""
        if self._model and self.ledger.start_backward():
            self._model.gradients.skip()

    def report(self) -> Report:
        """Does the order help? Of the last complete epoch: how well its order balanced the gradients, beside random
        orders of the same gradients; how much of the balance outlasts the epoch it was learnt from; what orders cost;
        and a verdict. Call `print(sampler.report())` after an epoch, on all processes together. Under DDP the
        first epoch is not judged, since DDP regroups its buckets in it.

        It needs `diagnose=True`, or a number of coordinates to keep of every gradient (True: 256). That takes so much
        memory per unit, for three epochs, and a little time in every step; without it there is nothing to pay.
        """
        if self.ledger.diagnosis is None:
            raise CdgrabError("a report needs samples of the gradients: make the sampler with diagnose=True")
        self.group.expect_all("sampler.report()", PATIENCE)
        return made(self.ledger.diagnosis, self.sorter, self._model)

    def _make_sorter(self, dim: int) -> None:
        size = ALONE_MB if self.group.world_size == 1 else BUFFER_MB
        buffer = {"buffer_mb": size} if "buffer_mb" in sorter_options(self._sorter_name) else {}
        options = {"seed": self.seed, "group": self.group} | buffer | self._options
        workers, units = self.group.workers, len(self._own)
        self.ledger.sorter = make_sorter(self._sorter_name, workers=workers, units=units, dim=dim, **options)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """Everything needed to continue from here, also mid-epoch. All processes call it; all get the whole state.

        A StatefulDataLoader that has just read a batch ahead gets a note instead, see `BatchIterator.state_dict`.
        """
        if self.sorter is None:
            raise CdgrabError("a sampler has no state before sampler.attach(model)")
        ledger, sparsifier = self.ledger, self.ledger.sparsifier
        noted, ledger.last_event = ledger.last_event == "batch noted", "state"
        if noted and ledger.handed_out > ledger.batches_done():
            return {"version": STATE_VERSION, "read_ahead": True}
        if ledger.passes:
            raise CdgrabError("gradients are being accumulated: take the state after a step of the optimiser")
        self.group.expect_all("sampler.state_dict()", PATIENCE)
        state = {
            "version": STATE_VERSION,
            "layout": self._layout(),
            "sorter": gathered(self.sorter.state_dict(), self.group),
            "sparsifier": gathered(sparsifier.state_dict(), self.group) if sparsifier else None,
        }
        if pace := ledger.outstanding.pace():
            state["fetched"] = saved(pace, self._epochs.late(), self.batch_size, self.group)
        return state

    def load_state_dict(self, state: dict, *, repartition: bool = False) -> None:
        """Continue where `state_dict` was taken. May be called before or after `attach`.

        A state with another number of processes, batch size or dataset is refused, unless `repartition` is given: then
        the dataset is divided anew and orders start at random.
        """
        version = state.get("version") if isinstance(state, dict) else None
        if type(version) is not int or version != STATE_VERSION:
            raise CdgrabError("this is not the state of an OrderedBatchSampler")
        if "read_ahead" in state:  # a loader's note: our own state was loaded before, and the iterator compares the two
            if self.sorter is None or self.sorter.epoch < 0 or self._epochs.began >= 0:
                raise CdgrabError(
                    "this loader reads ahead, so its state lacks gradients: save sampler.state_dict() beside it, "
                    "and load that first"
                )
            self.ledger.resuming = True  # even if nothing is left of the epoch
            return
        layout = state.get("layout")
        right = state.keys() - {"fetched"} == {"version", "layout", "sorter", "sparsifier"}
        if not right or not (isinstance(layout, dict) and is_plain(layout)):
            raise CdgrabError("this is not the whole state of an OrderedBatchSampler")
        if not refusals.same_layout(layout, self._layout(), repartition):
            return
        if self._model:
            refusals.refuse_other_sparsifier(state["sparsifier"], self.ledger.sparsifier)
        parts = {"sorter": self.sorter, "sparsifier": self.ledger.sparsifier}
        parts = {name: part for name, part in parts.items() if part}
        for name, part in parts.items():  # all are checked before any changes
            part.check_state_dict(state[name])
        pace, late = {}, []
        if "fetched" in state:
            pace, late = loaded(state["fetched"], self.batch_size, self.group, self._examples)
        if self._model is None:
            self._waiting = state  # for `attach`
            if self.sorter is None:
                return
        for name, part in parts.items():
            part.load_state_dict(state[name])
        self._epochs.resume(pace, late)

    def _layout(self) -> dict:
        """The settings that decide which examples form a batch, and which batches a unit."""
        data = {"examples": self._examples, "processes": self.group.world_size}
        return data | {name: getattr(self, name) for name in SETTINGS}
