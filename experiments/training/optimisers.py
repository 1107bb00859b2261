"""torchopt optimisers and learning-rate schedules, over one flat parameter vector."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torchopt
from omegaconf import DictConfig
from torch import Tensor
from torch.utils import _pytree as pytree

from experiments.training.compiled import Compiled

OPTIMISERS = ("sgd", "adamw")
SCHEDULES = ("constant", "step", "linear")


class Optimiser:
    """`update(parameters, gradient, *state)` returns the new parameters and the new state, and changes nothing.

    `state` is a list of tensors, at first the one to start from; who steps keeps it up to date.
    """

    def __init__(
        self, config: DictConfig, steps_per_epoch: int, epochs: int, parameters: Tensor, compiled: bool = True
    ) -> None:
        self._transform = _build(config, _schedule(config, steps_per_epoch, epochs))
        self._clip = config.get("clip")
        # torchopt's states are nested tuples of tensors: kept flat, so that one traced function and one list hold all
        self.state, self._spec = pytree.tree_flatten(self._transform.init(parameters))
        gradient = torch.zeros_like(parameters)  # not `parameters` again: tracing tells inputs apart by identity
        # torchopt's momentum leaves its factor out in the first call it ever sees, a Python flag that would be traced
        # (and would come back with every resume): use that call up on zeros, where it makes no difference.
        self._update(parameters, gradient, *self.state)
        self.update = Compiled(self._update, compiled).for_inputs(parameters, gradient, *self.state)

    def _update(self, parameters: Tensor, gradient: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        nested = pytree.tree_unflatten(list(state), self._spec)
        if self._clip is not None:
            gradient = clipped(gradient, self._clip)
        updates, nested = self._transform.update(gradient, nested, params=parameters, inplace=False)
        return torchopt.apply_updates(parameters, updates, inplace=False), *pytree.tree_leaves(nested)


def clipped(gradient: Tensor, norm: float) -> Tensor:
    """The gradient, made as short as `norm` where it is longer, by the formula of torch.nn.utils.clip_grad_norm_."""
    return gradient * (norm / (gradient.norm() + 1e-6)).clamp(max=1.0)


def _build(config: DictConfig, rate: Callable[[Tensor], Tensor] | float) -> torchopt.base.GradientTransformation:
    if config.optimiser == "sgd":
        return torchopt.sgd(rate, momentum=config.momentum, weight_decay=config.weight_decay)
    return torchopt.adamw(rate, weight_decay=config.weight_decay)


def _schedule(config: DictConfig, steps_per_epoch: int, epochs: int) -> Callable[[Tensor], Tensor] | float:
    """constant; step: × factor every `every` epochs; linear: down to zero at the end of the run."""
    lr, schedule = config.lr, config.schedule
    if schedule.kind == "constant":
        return lr
    if schedule.kind == "step":
        return lambda count: lr * torch.pow(schedule.factor, (count // (schedule.every * steps_per_epoch)).double())
    return lambda count: lr * (1.0 - count.double() / (epochs * steps_per_epoch)).clamp_min(0.0)
