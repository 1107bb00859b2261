"""torchopt optimisers and learning-rate schedules over flat parameter vectors, for one run or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torchopt
from omegaconf import DictConfig
from torch import Tensor
from torch.utils import _pytree as pytree

from experiments.training.compiled import Compiled

OPTIMISERS = ("sgd", "adamw")
SCHEDULES = ("constant", "step", "linear")
SETTINGS = ("optimiser", "lr", "momentum", "weight_decay", "clip", "schedule")  # may differ between runs of a group


class Optimiser:
    """`update(parameters, gradient, *state)` returns the new parameters and the new state, and changes nothing.

    `state` is a list of tensors, initially the first state; the caller stores the new state after every step.
    Parameters are [dim] or [replicas, dim]: replicas with the same settings are updated together.
    """

    def __init__(
        self,
        configs: Sequence[DictConfig],
        steps_per_epoch: int,
        epochs: int,
        parameters: Tensor,
        compiled: bool = True,
    ) -> None:
        """configs: the task settings of every replica."""
        settings = [str({name: config.get(name) for name in SETTINGS}) for config in configs]
        same = {chosen: [i for i, its in enumerate(settings) if its == chosen] for chosen in settings}
        self._rows = [torch.tensor(rows, device=parameters.device) for rows in same.values()]
        self._back = torch.cat(self._rows).argsort()  # to the order of the replicas
        self._several = len(configs) > 1
        self._rules, self.state, self._counts = [], [], []
        for rows in same.values():
            rule = _Rule(configs[rows[0]], steps_per_epoch, epochs, self._some(parameters, rows))
            self._rules.append(rule)
            self.state += rule.first_state
            self._counts.append(len(rule.first_state))
        gradient = torch.zeros_like(parameters)  # not `parameters` itself: tracing tells inputs apart by identity
        self.update = Compiled(self._update, compiled).for_inputs(parameters, gradient, *self.state)

    def _some(self, vectors: Tensor, rows: Tensor | list[int]) -> Tensor:
        return vectors if len(self._rows) == 1 else vectors[rows]

    def _update(self, parameters: Tensor, gradient: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        updated, states = [], []
        for rule, rows, its_state in zip(self._rules, self._rows, self._by_rule(state), strict=True):
            some, *its_state = rule(self._some(parameters, rows), self._some(gradient, rows), its_state)
            updated.append(some)
            states += its_state
        return updated[0] if len(updated) == 1 else torch.cat(updated)[self._back], *states

    def _by_rule(self, state: Sequence[Tensor]) -> list[list[Tensor]]:
        parts, state = [], list(state)
        for count in self._counts:
            parts.append(state[:count])
            state = state[count:]
        return parts

    # -- states of single replicas ------------------------------------------------------------------------------------

    def split(self, state: Sequence[Tensor]) -> list[list[Tensor]]:
        """The state of each replica, as if it had trained alone. Step counts are the same for all."""
        if not self._several:
            return [list(state)]
        states: dict[int, list[Tensor]] = {}
        for rows, tensors in zip(self._rows, self._by_rule(state), strict=True):
            for place, replica in enumerate(rows.tolist()):
                states[replica] = [tensor[place] if tensor.dim() else tensor for tensor in tensors]
        return [states[replica] for replica in sorted(states)]

    def join(self, states: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The state of all replicas, from those of single ones."""
        if not self._several:
            return list(states[0])
        joined = []
        for rows in self._rows:
            for parts in zip(*(states[replica] for replica in rows.tolist()), strict=True):
                joined.append(torch.stack(parts) if parts[0].dim() else parts[0])
        return joined


class _Rule:
    """The update of replicas with the same settings: parameters [dim] or [replicas, dim]."""

    def __init__(self, config: DictConfig, steps_per_epoch: int, epochs: int, parameters: Tensor) -> None:
        self._transform = _build(config, _schedule(config, steps_per_epoch, epochs))
        self._clip = config.get("clip")
        # torchopt's states are nested tuples of tensors; they are kept flat, for tracing and for checkpoints
        self.first_state, self._spec = pytree.tree_flatten(self._transform.init(parameters))
        # In its very first call torchopt's momentum omits its factor, by a Python flag that would be traced (and would
        # be set again after every resume). Make that call with zeros, where it makes no difference.
        self(parameters, torch.zeros_like(parameters), self.first_state)

    def __call__(self, parameters: Tensor, gradient: Tensor, state: list[Tensor]) -> tuple[Tensor, ...]:
        nested = pytree.tree_unflatten(state, self._spec)
        if self._clip is not None:
            gradient = clipped(gradient, self._clip)
        updates, nested = self._transform.update(gradient, nested, params=parameters, inplace=False)
        return torchopt.apply_updates(parameters, updates, inplace=False), *pytree.tree_leaves(nested)


def clipped(gradient: Tensor, norm: float) -> Tensor:
    """Gradients [..., dim], each scaled down to `norm` if it is longer, as torch.nn.utils.clip_grad_norm_ does."""
    return gradient * (norm / (gradient.norm(dim=-1, keepdim=True) + 1e-6)).clamp(max=1.0)


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
