"""Backward passes, detected by hooks on the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from cdgrab.errors import CdgrabError


class BackwardPasses:
    """Calls `start_backward` before the first gradient of every backward pass and, if that returns True, `complete`
    with all gradients after the last one (None for a parameter that took no part). A pass that fails is not completed.

    Autograd copies a gradient that somebody holds on to instead of moving it to .grad. So, where .grad was empty, the
    gradient is found there at the end, once a first pass has shown that it stays there: that of torch.autograd.grad
    does not, nor that of a step inside the backward pass.

    torch.autograd.graph.register_multi_grad_hook is similar, but stops working when a model is moved or converted, and
    fails in torch.autograd.grad.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        start_backward: Callable[[], bool],
        complete: Callable[[list[Tensor | None]], None] | None = None,
    ) -> None:
        self._start, self._complete, self._parameters = start_backward, complete, list(parameters)
        self._pass, self._wanted, self._stays = -1, False, False
        self._found: dict[int, Tensor | None] = {}  # by parameter; None: in its .grad
        self.handles = [parameter.register_hook(partial(self._note, i)) for i, parameter in enumerate(parameters)]

    def _note(self, index: int, gradient: Tensor) -> None:
        this_pass = torch._C._current_graph_task_id()
        if this_pass != self._pass:
            self._pass, self._found = this_pass, {}
            self._wanted = self._start() and self._complete is not None
            if self._wanted:
                Variable._execution_engine.queue_callback(self._end)
        if self._wanted:
            moved = self._stays and self._parameters[index].grad is None
            self._found[index] = None if moved else gradient

    def _end(self) -> None:
        found, self._found = self._found, {}
        there = [self._parameters[index].grad for index in found]
        self._stays = all(gradient is not None for gradient in there)
        if not self._stays and None in found.values():
            raise CdgrabError(
                "gradients of this backward pass are not in .grad, where those of the pass before were: run passes of "
                "torch.autograd.grad inside `with sampler.paused():`"
            )
        gradients: list[Tensor | None] = [None] * len(self._parameters)
        for (index, gradient), moved in zip(found.items(), there, strict=True):
            gradients[index] = moved if gradient is None else gradient
        self._complete(gradients)


def flat(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> Tensor:
    """All gradients as one vector, of a type that can hold all of them; zero where a parameter took no part."""
    pieces = [
        parameter.new_zeros(parameter.numel()) if gradient is None else gradient.detach().to_dense().flatten()
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    return torch.cat(pieces)
