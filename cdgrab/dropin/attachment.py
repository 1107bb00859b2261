"""How a sampler gets to see a model's gradients: hooks on a plain module, or a communication hook of DDP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel

from ..buckets import BucketHook, common_dtype
from ..errors import CdgrabError
from ..exchange import Mean
from ..sparsify import make_sparsifier
from ..sparsify import sparsifier_options as options_of
from .examples import ExampleGradients

if TYPE_CHECKING:
    from .sampler import OrderedBatchSampler

WIRE = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


def attach(
    sampler: OrderedBatchSampler, model: nn.Module, compress: str | None, sparsifier: str | None, options: dict
) -> int:
    """Let `sampler` see the gradients of `model`. Returns their length."""
    if not isinstance(model, nn.Module):
        raise CdgrabError(f"attach needs a torch.nn.Module, got {type(model).__name__}")
    inner = getattr(model, "_orig_mod", model)  # of torch.compile
    parallel = isinstance(inner, DistributedDataParallel)
    parameters = [parameter for parameter in inner.parameters() if parameter.requires_grad]
    if not parameters:
        raise CdgrabError("the model has no parameters that need a gradient")
    processes = sampler.group.world_size
    if processes > 1 and not parallel:
        raise CdgrabError(
            f"there are {processes} processes, but the model is not wrapped in DistributedDataParallel; "
            "wrap it before attach"
        )
    if compress not in WIRE:
        raise CdgrabError(f"compress must be bf16 or fp16, got {compress!r}")
    if (compress or sparsifier) and not parallel:
        raise CdgrabError("compress and sparsifier concern what DistributedDataParallel sends; this model is not one")
    if compress and sparsifier:
        raise CdgrabError("choose compress or sparsifier, not both")
    if options and not sparsifier:
        raise CdgrabError(f"attach has no option {', '.join(sorted(options))}")
    dim = sum(parameter.numel() for parameter in parameters)
    sampler._handles.append(register_multi_grad_hook(parameters, lambda _: _count(sampler), mode="any"))
    if sampler.unit == "example":
        ExampleGradients(inner.module if parallel else inner, parameters, sampler)
    elif not parallel:
        PlainGradients(parameters, sampler)
    if parallel and (sampler.unit == "batch" or compress or sparsifier):
        BucketHook(parameters, _Average(sampler, parameters, dim, compress, sparsifier, options)).register(inner)
    return dim


def _count(sampler: OrderedBatchSampler) -> None:
    sampler._backwards += not sampler._paused


class PlainGradients:
    """Shows the sampler the gradient of every backward pass, or the sum over those that are accumulated."""

    def __init__(self, parameters: Sequence[nn.Parameter], sampler: OrderedBatchSampler) -> None:
        self._parameters, self._sampler, self._dtype = parameters, sampler, common_dtype(parameters)
        self._sum: Tensor | None = None
        sampler._handles.append(register_multi_grad_hook(parameters, self._complete))

    def _complete(self, gradients: Sequence[Tensor | None]) -> None:
        sampler = self._sampler
        if not sampler.counts():
            return
        whole = flat(self._parameters, gradients, self._dtype)
        self._sum = whole if sampler._backwards == 1 or self._sum is None else self._sum + whole
        if sampler._backwards == sampler.accumulation_steps:
            sampler._backwards = 0
            sampler.see(self._sum[None])


class _Average:
    """The mean gradient of all processes; the sampler sees what is averaged, before it is."""

    def __init__(
        self,
        sampler: OrderedBatchSampler,
        parameters: Sequence[nn.Parameter],
        dim: int,
        compress: str | None,
        sparsifier: str | None,
        options: dict,
    ) -> None:
        self._sampler, self._dim, self._wire = sampler, dim, WIRE[compress]
        self._mean: Mean | None = None
        if sparsifier:
            if "layers" in options_of(sparsifier):
                options.setdefault("layers", [parameter.numel() for parameter in parameters])
            group = sampler.group
            sampler._sparsifier = make_sparsifier(sparsifier, workers=group.workers, dim=dim, group=group, **options)

    def __call__(self, gradient: Tensor) -> Tensor:
        sampler = self._sampler
        if sampler.unit == "example":  # seen one by one already
            return self._averaged(gradient)
        wanted = sampler.counts()
        if wanted and sampler._backwards != sampler.accumulation_steps:
            raise CdgrabError(
                f"gradients of {sampler._backwards} batches were accumulated before they were averaged; "
                f"make the sampler with accumulation_steps={sampler._backwards}"
            )
        sampler._backwards = 0
        shares = wanted and sampler.sorter.takes_shares and not sampler._sparsifier
        if wanted and not shares:
            sampler.see(gradient[None])
        mean = self._averaged(gradient, keep_shares=shares)
        if shares:
            sampler.see_share(self._mean.take_shares())
        return mean

    def _averaged(self, gradient: Tensor, keep_shares: bool = False) -> Tensor:
        if self._sampler._sparsifier:
            return self._sampler._sparsifier.reduce(gradient[None])
        if self._mean is None:
            self._mean = Mean(self._sampler.group, self._dim, wire=self._wire)
        self._mean.keep_shares = keep_shares
        return self._mean(gradient)


def flat(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
    """One vector, zero where a parameter took no part."""
    pieces = [
        parameter.new_zeros(parameter.numel()) if gradient is None else gradient.detach().flatten()
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    return torch.cat([piece.to(dtype) for piece in pieces])
