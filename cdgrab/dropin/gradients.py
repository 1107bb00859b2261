"""How a ledger gets a model's gradients: by hooks on a plain module, or by a communication hook of DDP.

Memory that a training does not have otherwise, in numbers of four bytes per parameter, of `cd_grab`:

    one process      2    the running sum, in float64
                     1    a pair's first gradient, from which the second is subtracted; it is decided there, too
    sketch           ½    the place and sign of every coordinate (1 more, the whole gradient, with FSDP, and with DDP
                          if its buckets are .grad: gradient_as_bucket_view)
    DDP, FSDP  2 / processes    this process's coordinates of the running sum
                     1    its coordinates of everybody's pairs
                          and what is on its way: of FSDP two modules; of DDP on a GPU two pieces of a 32nd of all
                          parameters or 2 MB, and half of one, or twice that in the first steps and with `compress=`;
                          on a CPU a chunk of 0.5 MB (see `runtime.flows`), and copies of two pieces: in the first
                          steps of a 64th, with `compress=` always of up to 4 MB. Processes that share memory
                          (`runtime.shared`) need nothing more after the first steps

Where hooks on all parameters are needed (see `BackwardPasses`), gradients that they hold on to come on top: 1, and 1
more if they are accumulated. In the first passes, too, but for gradients that autograd moves to an empty .grad: these
take no more. The sorters `grab` and `id_grab_bal` have two more sums: 4.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cdgrab.balance import optional
from cdgrab.checks import one_of
from cdgrab.dropin.examples import ExampleGradients
from cdgrab.dropin.hooks import BackwardPasses, after_forward
from cdgrab.dropin.ledger import Ledger
from cdgrab.dropin.parts import Layout, Parts
from cdgrab.dropin.refusals import (
    REENTRANT,
    refuse_kinds,
    refuse_kinds_of_ddp,
    refuse_new_parameters,
    refuse_other_processes,
)
from cdgrab.dropin.sharded import ShardedGradients
from cdgrab.errors import CdgrabError, NotFiniteError
from cdgrab.runtime.averages import Compiled
from cdgrab.runtime.ddp import BucketHook, Collected
from cdgrab.runtime.division import Division
from cdgrab.runtime.fsdp import is_sharded, sharded_modules
from cdgrab.runtime.group import WorkerGroup
from cdgrab.runtime.mean import mean_of_rows
from cdgrab.runtime.overlap import OverlappingHook
from cdgrab.sparsify import Sparsifier, sparsifier_of

WIRE = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}
PROBES = 4  # how many parameters (the smallest) are checked for leftover gradients


class ObservedModel:
    """The model whose gradients are observed. No hooks are registered before `start`."""

    def __init__(
        self, model: nn.Module, ledger: Ledger, group: WorkerGroup, compress: str | None, sparsifier: str | None, **more
    ) -> None:
        if not isinstance(model, nn.Module):
            raise CdgrabError(f"attach needs a torch.nn.Module, got {type(model).__name__}")
        compiled = hasattr(model, "_orig_mod") or model._compiled_call_impl is not None
        inside, self._ledger = _without_wrappers(model), ledger
        # DDP has the communication hook, which leads here; no collector of garbage sees that
        self._get_model = weakref.ref(inside) if isinstance(inside, DistributedDataParallel) else lambda: inside
        self._sharded = sharded_modules(inside)
        for module in self._sharded:
            module.reshard()  # until the next backward pass some may have the parameters of the last forward pass
        self._parallel = isinstance(inside, DistributedDataParallel)
        trained = {name: each for name, each in inside.named_parameters() if each.requires_grad}
        if self._parallel:
            ours = _averaged(inside)
            self._names = {name for name, each in trained.items() if id(each) not in ours}
        else:
            self._names = {name for name, each in trained.items() if is_sharded(each)}
        self.parameters = [each for name, each in trained.items() if not self._parallel or name not in self._names]
        self.dim = sum(parameter.numel() for parameter in self.parameters)
        self._refuse(model, compiled, group)
        self._refuse_averaging(compress, sparsifier, more)
        self.sparsifier: Sparsifier | None = None
        self._hook: BucketHook | OverlappingHook | None = None  # until DDP has it
        self._get_hook: Callable[[], object] = lambda: None
        self._handles: list = []
        if self._sharded:
            self.gradients = ShardedGradients(self._sharded, self.parameters, ledger, group)
        elif ledger.unit == "example":
            inner = inside.module if self._parallel else inside
            self.gradients = ExampleGradients(inner, self.parameters, ledger)
        elif self._parallel:
            self.gradients = ParallelGradients(model, self.parameters, ledger, in_grad=_keeps_gradients(inside))
        else:
            self.gradients = PlainGradients(model, self.parameters, ledger)
        observer = self.gradients if ledger.unit == "batch" else None  # examples are observed beside the averaging
        if sparsifier:
            self.sparsifier = sparsifier_of(self.parameters, sparsifier, group, **more)
            average = Collected(self.parameters, partial(_sparse_average, ledger, observer))
            self._hook = BucketHook(self.parameters, average, self.sparsifier)
        elif self._parallel and (observer or compress):
            self._hook = OverlappingHook(self.parameters, group, observer, WIRE[compress], _mean_of_rows, _averaging)

    @property
    def model(self) -> nn.Module | None:
        """Without wrappers; None if it was DDP's and is gone."""
        return self._get_model()

    @property
    def hook(self) -> object:
        """That of DDP; None if there is none."""
        return self._get_hook()

    def _refuse(self, model: nn.Module, compiled: bool, group: WorkerGroup) -> None:
        if not self.parameters:
            raise CdgrabError("the model has no parameters that need a gradient")
        sorter = self._ledger.sorter  # before `attach` there is one only if it looks at no gradients
        refuse_kinds(model, self.parameters if self._parallel or sorter is None else ())
        if compiled and self._ledger.unit == "example":
            raise CdgrabError("unit='example' cannot look into a compiled model; use unit='batch'")
        if group.world_size > 1 and not self._parallel and not self._sharded:
            processes = f"{group.world_size} processes, but the model is not wrapped in DistributedDataParallel"
            way_out = "do that first, and attach what comes of it"
            raise CdgrabError(f"{processes}, nor is any part of it under fully_shard: {way_out}")
        if self._sharded and self._ledger.unit == "example":
            raise CdgrabError("unit='example' needs whole parameters, and FSDP divides them; use unit='batch'")
        if self._parallel:
            refuse_other_processes(group, self.model.process_group)
            refuse_kinds_of_ddp(self.model, self._ledger.accumulation_steps)

    def _refuse_averaging(self, compress: str | None, sparsifier: str | None, options: dict) -> None:
        one_of("compress", compress, WIRE)
        if (compress or sparsifier) and self._sharded:
            raise CdgrabError("with FSDP use MixedPrecisionPolicy(reduce_dtype=…) instead of compress and sparsifier")
        if (compress or sparsifier) and not self._parallel:
            raise CdgrabError("compress and sparsifier need a model wrapped in DistributedDataParallel")
        if compress and sparsifier:
            raise CdgrabError("choose compress or sparsifier, not both")
        if options and not sparsifier:
            raise CdgrabError(f"attach has no option {', '.join(sorted(options))}")

    def start(self, model: nn.Module) -> None:
        """Observe gradients from now on; model: with all wrappers. DDP's hook is registered last, because it can never
        be removed."""
        self._handles = [*self.gradients.hook(), after_forward(model, self._ledger.outstanding.forward)]
        hook, self._hook = self._hook, None
        if hook:
            self._get_hook = weakref.ref(hook)
            try:
                hook.register(self.model)
            except CdgrabError as error:
                way_out = "use attach's compress= or sparsifier= instead of that hook, or keep the sampler whose it is"
                raise CdgrabError(f"{error}; {way_out}") from error

    def refuse_new_parameters(self) -> None:
        """FSDP may have put those of the last forward pass in place of the sharded ones."""
        if self.model is not None:
            refuse_new_parameters(self.model, self.parameters, self._names)

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()


def _without_wrappers(model: nn.Module) -> nn.Module:
    """Without that of torch.compile; and DDP's, if there is one around all that is trained inside another one's."""
    model = getattr(model, "_orig_mod", model)
    parallel = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
    trained = [sum(each.requires_grad for each in part.parameters()) for part in (model, *parallel)]
    return parallel[0] if len(trained) == 2 and trained[0] == trained[1] else model


def _averaged(model: DistributedDataParallel) -> set[int]:
    """The ids of the parameters that DDP does not ignore. It asks for each by all of its names, and for those of the
    outermost module with a dot before."""
    names = model.module.named_parameters(remove_duplicate=False)
    return {id(each) for name, each in names if (name if "." in name else f".{name}") not in model.parameters_to_ignore}


def _keeps_gradients(model: DistributedDataParallel) -> bool:
    """Whether .grad is this process's gradient until DDP's last step."""
    return not model.gradient_as_bucket_view and model.mixed_precision is None


class PlainGradients:
    """Observes the gradient of every backward pass, or the sum over accumulated passes."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], ledger: Ledger) -> None:
        self._model, self._layout, self._ledger = model, Layout(parameters), ledger
        self._sum: Tensor | None = None  # of a unit's passes, if they do not add up in .grad

    def hook(self) -> list:
        parameters, ledger = self._layout.parameters, self._ledger
        self._passes = BackwardPasses(
            self._model, parameters, ledger.start_backward, self._complete, lambda: not ledger.passes, ledger.is_active
        )
        return [self._passes]

    def skip(self) -> None:
        self._passes.skip()

    def _complete(self, gradients: Sequence[Tensor | None], of_unit: bool) -> None:
        """of_unit: these are sums over the unit's passes so far."""
        ledger = self._ledger
        with torch.set_grad_enabled(False), ledger.stopwatch:  # as no_grad, in half of the time
            parts = Parts(self._layout, gradients, ledger.scale(self._layout.parameters[0]))
            if not of_unit and ledger.accumulation_steps > 1:
                self._sum = self._sum + parts.vector() if ledger.passes else parts.vector()
            if ledger.unit_complete():
                unit, self._sum = self._sum, None
                ledger.observe_parts(parts) if unit is None else ledger.observe(unit[None])


class ParallelGradients:
    """Observes what DDP averages; see `cdgrab.runtime.observer.Observer`. Here hooks only count backward passes.
    in_grad: see `_keeps_gradients`."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], ledger: Ledger, in_grad: bool) -> None:
        self._get_model, self._parameters, self._in_grad = weakref.ref(model), parameters, in_grad
        self._layout = Layout(parameters)
        self._ledger, self.take_share = ledger, ledger.take_share
        self.kept_shares, self.took_shares = ledger.kept_shares, ledger.took_shares
        self._probes = sorted(parameters, key=torch.numel)[:PROBES]

    def hook(self) -> list:
        if self._ledger.takes_shards:
            self.divide(Division.dealt(self._ledger.sorter.group, self._ledger.sorter.dim))
        return [BackwardPasses(self._get_model(), self._parameters, self._start_backward)]

    def skip(self) -> None:
        if self._ledger.unit_complete():
            self._ledger.observe_zero(self._parameters[0])

    def begin(self, like: Tensor) -> str:
        if not self._ledger.is_active():
            return "nothing"
        self._refuse_half_accumulated()
        if not self._ledger.its_turn():
            return "nothing"
        if not self._ledger.takes_shards:
            return "look" if self._in_grad else "whole"
        self._ledger.begin_shares(like)
        return "shares"

    @torch.no_grad()
    def look(self) -> None:
        gradients = [parameter.grad for parameter in self._parameters]
        self._ledger.observe_parts(Parts(self._layout, gradients, self._ledger.scale(self._parameters[0])))

    def decide_late(self, group: WorkerGroup) -> None:
        if self._ledger.takes_shards:
            self._ledger.sorter.decide_late(group)

    def decide_due(self) -> None:
        with self._ledger.stopwatch:
            self._ledger.sorter.decide_due()

    def make_room(self) -> None:
        self._ledger.sorter.make_room()

    @property
    def division(self) -> Division | None:
        ledger = self._ledger
        return ledger.sorter.division if ledger.sorter is not None and ledger.takes_shards else None

    def divide(self, division: Division) -> None:
        self._ledger.sorter.divide(division)

    @property
    def amid_pair(self) -> bool:
        return self._ledger.sorter.amid_pair

    def end(self, whole: Tensor | None) -> None:
        if whole is None:
            self._ledger.end_shares()
        else:
            self._ledger.observe(whole[None])

    def _refuse_half_accumulated(self) -> None:
        passes, wanted = self._ledger.end_unit(), self._ledger.accumulation_steps
        if passes < wanted:
            before = f"DDP averaged after {passes} of accumulation_steps={wanted} batches"
            way_out = "`with model.no_sync():`, or each inside accelerate's `with accelerator.accumulate(model):`"
            raise CdgrabError(f"{before}: run all but the last inside {way_out}")
        if passes > wanted:
            raise CdgrabError(
                f"gradients of {passes} backward passes were accumulated before they were averaged; "
                f"make the sampler with accumulation_steps={passes} ({REENTRANT})"
            )

    def _start_backward(self) -> bool:
        ledger = self._ledger
        if not ledger.start_backward():
            return False
        if not ledger.passes:
            self._refuse_leftovers()
        ledger.count_pass()
        return True

    def _refuse_leftovers(self) -> None:
        """DDP averages everything in .grad, also what earlier batches left there. A script that leaves gradients there
        does so from the start of an epoch; checking at every step would make a GPU wait each time."""
        if self._parameters[0].is_cuda and self._ledger.sorter.position > 1:
            return
        if any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in self._probes):
            raise CdgrabError(
                "gradients of earlier backward passes are still in .grad, and DDP would add them to this batch's: call "
                "zero_grad() after every step, or accumulate inside no_sync() with accumulation_steps=…"
            )


def _mean_of_rows(rows: Tensor, out: Tensor) -> Tensor:
    """By a compiled loop, where there is one: that takes a third of the time."""
    few = len(rows) in (2, 4) and not rows.is_cuda and rows.dtype == out.dtype and rows.element_size() >= 4
    return compiled.mean_of_rows(rows, out) if few and (compiled := optional("cpu")) else mean_of_rows(rows, out)


def _averaging(rows: list[Tensor], parts: list[tuple[int, int, int]], only: int | None) -> Compiled | None:
    compiled = optional("shared")
    return compiled.averaging(rows, parts, only) if compiled and compiled.takes(rows) else None


def _sparse_average(ledger: Ledger, observer: ParallelGradients | None, gradient: Tensor) -> Tensor:
    """Residuals are kept without the scaler's scale, which may change. After an overflow the result is NaN, so that the
    scaler skips the step."""
    if observer and observer.begin(gradient) != "nothing":
        observer.end(gradient.clone())
    scale = ledger.scale(gradient)
    try:
        return ledger.sparsifier.reduce(gradient[None] / scale) * scale
    except NotFiniteError:
        if ledger.scaler is None:
            raise
        return torch.full_like(gradient, torch.nan)
