"""How a sampler gets to see a model's gradients: hooks on a plain module, or a communication hook of DDP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cdgrab.dropin.examples import ExampleGradients
from cdgrab.dropin.hooks import BackwardPasses, flat
from cdgrab.dropin.refusals import REENTRANT, refuse_new_parameters, refuse_other_processes, refuse_sparse_gradients
from cdgrab.errors import CdgrabError, NotFiniteError
from cdgrab.runtime.ddp import BucketHook
from cdgrab.runtime.mean import Mean
from cdgrab.sparsify import make_sparsifier
from cdgrab.sparsify import sparsifier_options as options_of

if TYPE_CHECKING:
    from cdgrab.dropin.sampler import OrderedBatchSampler

WIRE = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}
PROBES = 4  # parameters at which gradients left from before are looked for, the smallest ones


class Attachment:
    """The model that a sampler looks at. Nothing is hooked to it before `start`."""

    def __init__(
        self,
        sampler: OrderedBatchSampler,
        model: nn.Module,
        compress: str | None,
        sparsifier: str | None,
        options: dict,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise CdgrabError(f"attach needs a torch.nn.Module, got {type(model).__name__}")
        self._sampler, self._model = sampler, getattr(model, "_orig_mod", model)  # of torch.compile
        self._parallel = isinstance(self._model, DistributedDataParallel)
        self.parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self.dim = sum(parameter.numel() for parameter in self.parameters)
        self._compress, self.sparsifier = compress, None
        compiled = self._model is not model or model._compiled_call_impl is not None
        self._refuse(compiled, sparsifier, options)
        if sparsifier:
            if "layers" in options_of(sparsifier):
                options.setdefault("layers", [parameter.numel() for parameter in self.parameters])
            group = sampler.group
            self.sparsifier = make_sparsifier(sparsifier, workers=group.workers, dim=self.dim, group=group, **options)
        inner = self._model.module if self._parallel else self._model
        if sampler.unit == "example":
            self._gradients = ExampleGradients(inner, self.parameters, sampler)
        else:
            self._gradients = (ParallelGradients if self._parallel else PlainGradients)(self.parameters, sampler)

    def _refuse(self, compiled: bool, sparsifier: str | None, options: dict) -> None:
        processes = self._sampler.group.world_size
        if not self.parameters:
            raise CdgrabError("the model has no parameters that need a gradient")
        if compiled and self._sampler.unit == "example":
            raise CdgrabError(
                "unit='example' cannot look into a compiled model; use unit='batch', or do not compile it"
            )
        if processes > 1 and not self._parallel:
            raise CdgrabError(
                f"there are {processes} processes, but the model is not wrapped in DistributedDataParallel; "
                "wrap it before attach"
            )
        if self._compress not in WIRE:
            raise CdgrabError(f"compress must be bf16 or fp16, got {self._compress!r}")
        if (self._compress or sparsifier) and not self._parallel:
            raise CdgrabError(
                "compress and sparsifier concern what DistributedDataParallel sends; this model is not one"
            )
        if self._compress and sparsifier:
            raise CdgrabError("choose compress or sparsifier, not both")
        if options and not sparsifier:
            raise CdgrabError(f"attach has no option {', '.join(sorted(options))}")
        if self._parallel:
            refuse_other_processes(self._sampler.group, self._model.process_group)
            refuse_sparse_gradients(self._model.module)

    def start(self) -> None:
        """Look at gradients from now on. DDP keeps a hook for ever, so it gets its one last of all."""
        sampler = self._sampler
        sampler._handles += self._gradients.hook()
        if self._parallel and (sampler.unit == "batch" or self._compress or self.sparsifier):
            average = _Average(sampler, self._gradients, self.dim, WIRE[self._compress])
            try:
                BucketHook(self.parameters, average).register(self._model)
            except CdgrabError as error:
                raise CdgrabError(f"{error}; compress= and sparsifier= of attach take the place of others") from error

    def check(self) -> None:
        refuse_new_parameters(self._model, self.parameters)

    def skip(self) -> None:
        self._gradients.skip()


class PlainGradients:
    """Shows the sampler the gradient of every backward pass, or the sum over those that are accumulated."""

    def __init__(self, parameters: Sequence[nn.Parameter], sampler: OrderedBatchSampler) -> None:
        self._parameters, self._sampler = parameters, sampler
        self._sum: Tensor | None = None

    def hook(self) -> list:
        return BackwardPasses(self._parameters, self._sampler.start_backward, self._complete).handles

    def skip(self) -> None:
        self._complete([None] * len(self._parameters))

    def _complete(self, gradients: Sequence[Tensor | None]) -> None:
        sampler = self._sampler
        whole = flat(self._parameters, gradients)
        self._sum = self._sum + whole if sampler.pace.backwards else whole
        sampler.pace.backwards += 1
        if sampler.pace.backwards >= sampler.accumulation_steps:
            gradient, self._sum, sampler.pace.backwards = self._sum, None, 0
            sampler.observe(gradient[None])


class ParallelGradients:
    """Shows the sampler what DDP is about to average: see `_Average`. Here, backward passes are only counted."""

    def __init__(self, parameters: Sequence[nn.Parameter], sampler: OrderedBatchSampler) -> None:
        self._parameters, self._sampler = parameters, sampler
        self._probes = sorted(parameters, key=torch.numel)[:PROBES]

    def hook(self) -> list:
        return BackwardPasses(self._parameters, self._begins).handles

    def skip(self) -> None:
        sampler = self._sampler
        sampler.pace.backwards += 1
        if sampler.pace.backwards < sampler.accumulation_steps:
            return
        sampler.pace.backwards = 0
        nothing, sorter = self._parameters[0].new_zeros, sampler.sorter
        if self.shared():
            sampler.observe_shard(nothing(sampler.group.workers, sampler.group.widths(sorter.dim)[sampler.group.rank]))
        else:
            sampler.observe(nothing(1, sorter.dim))

    def shared(self) -> bool:
        """Whether the sorter wants gradients divided by coordinates, as they come by on their way to the mean."""
        return self._sampler.sorter.takes_shards and not self._sampler._sparsifier

    def wanted(self) -> bool:
        """Whether what is averaged now is the gradient of a unit."""
        sampler = self._sampler
        if not sampler.is_active():
            return False
        passes, wanted, sampler.pace.backwards = sampler.pace.backwards, sampler.accumulation_steps, 0
        if passes < wanted:
            raise CdgrabError(
                f"DDP averaged after {passes} of accumulation_steps={wanted} batches: "
                "run all but the last inside `with model.no_sync():`"
            )
        if passes > wanted:
            raise CdgrabError(
                f"gradients of {passes} backward passes were accumulated before they were averaged; "
                f"make the sampler with accumulation_steps={passes} ({REENTRANT})"
            )
        return True

    def _begins(self) -> bool:
        sampler = self._sampler
        if not sampler.start_backward():
            return False
        if not sampler.pace.backwards:
            self._refuse_leftovers()
        sampler.pace.backwards += 1
        return True

    def _refuse_leftovers(self) -> None:
        """DDP averages what .grad holds, of earlier batches too. Who lets them stay does so from an epoch's beginning;
        to look later would let a GPU wait again and again."""
        if self._parameters[0].is_cuda and self._sampler.sorter.position > 1:
            return
        if any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in self._probes):
            raise CdgrabError(
                "gradients of earlier backward passes are still there, and DDP would add them to this batch's: call "
                "zero_grad() after every step, or accumulate inside no_sync() with accumulation_steps=…"
            )


class _Average:
    """The mean gradient of all processes; the sampler sees what is averaged, before it is."""

    def __init__(self, sampler: OrderedBatchSampler, gradients: object, dim: int, wire: torch.dtype | None) -> None:
        self._sampler, self._gradients = sampler, gradients
        self._mean = Mean(sampler.group, dim, wire=wire)

    def __call__(self, gradient: Tensor) -> Tensor:
        sampler = self._sampler
        # examples have been seen one by one already
        wanted = sampler.unit == "batch" and self._gradients.wanted()
        shares = wanted and self._gradients.shared()
        if wanted and not shares:
            sampler.observe(gradient[None])
        if sampler._sparsifier:
            return self._sparse(gradient)
        self._mean.keep_shares = shares
        mean = self._mean(gradient)
        if shares:
            sampler.observe_shard(self._mean.take_shares())
        return mean

    def _sparse(self, gradient: Tensor) -> Tensor:
        """Residuals outlive the scaler's scale, so they are kept without it. A step that overflowed is not to be taken:
        the scaler finds that out from what it gets."""
        sampler, scale = self._sampler, self._sampler.scale()
        try:
            return sampler._sparsifier.reduce(gradient[None] / scale) * scale
        except NotFiniteError:
            if sampler._scaler is None:
                raise
            return torch.full_like(gradient, torch.nan)
