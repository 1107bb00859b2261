"""Gradients of single examples, without a change to the model or to the loss.

Hooks record every layer's input in the forward pass and the gradient of its output in the backward pass. From these two
a vectorised vector-Jacobian product of that layer alone gives the gradient of its parameters, example by example.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cdgrab.dropin.hooks import BackwardPasses, Note, flat
from cdgrab.dropin.ledger import Ledger
from cdgrab.errors import CdgrabError
from cdgrab.runtime.ddp import common_dtype, places

AGREEMENT = 1e-3  # how much the sum over examples may differ from the batch's gradient, relative to its norm


class ExampleGradients:
    """Observes the gradients [batch, dim] of all examples of a batch after every backward pass."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], ledger: Ledger) -> None:
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm):
                raise CdgrabError(f"{name or 'the model'} mixes the examples of a batch (BatchNorm); use unit='batch'")
        self._model, self._ledger, self._parameters, self._places = model, ledger, parameters, places(parameters)
        self._dim = sum(parameter.numel() for parameter in parameters)
        self._rows: Tensor | None = None
        self._pass = -1  # autograd's number for the backward pass whose rows these are
        self._busy = self._checked = False

    def hook(self) -> list:
        notes = [layer.register_forward_hook(Note(self._note, name)) for name, layer in layers(self._model)]
        passes = BackwardPasses(self._model, self._parameters, self._ledger.start_backward, self._complete)
        return [*notes, passes]

    def skip(self) -> None:
        self._rows = None
        self._ledger.observe_zero(self._parameters[0])

    def _note(self, name: str, layer: nn.Module, arguments: tuple, output: object) -> None:
        if self._busy or not torch.is_grad_enabled() or not self._ledger.is_active():
            return
        sizes = {len(batch.examples) for batch in self._ledger.outstanding.waiting}
        if not sizes:  # this belongs to no batch
            return
        if not isinstance(output, Tensor) or len(arguments) != 1 or not isinstance(arguments[0], Tensor):
            raise CdgrabError(f"unit='example' needs layers of one tensor in, one tensor out; {name} is not")
        if len(output) != len(arguments[0]) or len(output) not in sizes:
            wanted = " or ".join(map(str, sorted(sizes)))
            raise CdgrabError(f"unit='example' needs the batch first: {name} sees {len(output)} rows, not {wanted}")
        if output.requires_grad:
            given = arguments[0].detach()
            output.register_hook(lambda gradient: self._add(name, layer, given, gradient))

    def _add(self, name: str, layer: nn.Module, given: Tensor, gradient: Tensor) -> None:
        trained = (item for item in layer.named_parameters() if item[1].requires_grad)
        own = {key: value for key, value in trained if id(value) in self._places}
        if not own or not self._ledger.is_active():
            return

        def product(example: Tensor, pulled: Tensor) -> dict[str, Tensor]:
            def call(weights: dict[str, Tensor]) -> Tensor:
                return torch.func.functional_call(layer, weights, (example[None],))

            return torch.func.vjp(call, own)[1](pulled[None])[0]

        self._busy = True
        try:
            with self._ledger.stopwatch:
                found = torch.func.vmap(product)(given, gradient.detach())
        except RuntimeError as error:
            autocast = " under autocast" * (gradient.dtype != next(iter(own.values())).dtype)
            raise CdgrabError(f"{name} gives no gradients of single examples{autocast}; use unit='batch'") from error
        finally:
            self._busy = False
        this_pass = torch._C._current_graph_task_id()
        if self._rows is None or this_pass != self._pass:  # the last one may have been for an input, or have failed
            self._pass = this_pass
            self._rows = gradient.new_zeros(len(given), self._dim, dtype=common_dtype(self._parameters))
        for key, value in found.items():
            self._rows[:, self._places[id(own[key])][1]] += value.flatten(1)

    def _complete(self, gradients: Sequence[Tensor | None], of_unit: bool) -> None:
        rows, self._rows = self._rows, None
        if rows is None:
            return
        if not self._checked:  # if the rows do not add up to the batch's gradient, some use of a parameter was missed
            whole = flat(self._parameters, gradients)
            if (rows.sum(0) - whole).norm() > AGREEMENT * whole.norm() + 1e-12:
                raise CdgrabError("the gradients of the examples do not add up for this model; use unit='batch'")
            self._checked = True
        self._ledger.observe(rows.mul_(len(rows)))  # in the batch's mean each example has weight 1 / batch size


def layers(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that own parameters directly; each is one layer, together with everything inside it."""
    if next(model.parameters(recurse=False), None) is not None:
        yield name or "the model", model
        return
    for key, child in model.named_children():
        yield from layers(child, f"{name}.{key}" if name else key)
