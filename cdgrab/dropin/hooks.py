"""Backward passes, detected by hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from cdgrab.errors import CdgrabError

NO_TENSORS = (int, float, str, type(None))
NOTHING: list = []  # `_states` where no gradient is there
SHOWN = 2  # units in a row that did without hooks on all parameters, before these go


@dataclass(slots=True)
class _Pass:
    """A backward pass."""

    task: int  # autograd's number for it
    at_output: bool = False  # it began at an output of the model, before any parameter got a gradient
    before: list | None = None  # `_states` of all .grad at that moment
    wanted: bool | None = None  # whether it belongs to a batch; None: not known yet
    found: dict[int, Tensor | None] = field(default_factory=dict)  # gradients by parameter; None: in its .grad


class BackwardPasses:
    """Calls `start_backward` in every backward pass that reaches a parameter and, if that returns True, `complete` when
    the pass is over: with all gradients (None for a parameter that took no part), and whether these are sums over the
    unit's passes so far instead of this pass's own. A pass that fails is not completed.

    At first every parameter has a hook. Once passes have been seen to begin at an output of the model, with an empty
    .grad, and to leave their gradients there, a hook at the outputs tells of a pass, and gradients are read in .grad
    when it is over: after the last one of a unit, whose sum is there then. One parameter keeps its hook, to notice
    passes that do not begin at an output, and those of torch.autograd.grad. Hooks on all parameters stay, or come back,

    - where .grad is not empty at the start of a unit (`zero_grad(set_to_none=False)`, or gradients that are never
      zeroed): only a parameter's hook sees a gradient before it is added to something else;
    - where .grad is zeroed or changed between the passes of a unit, from the next unit on: of that one, what is left
      counts;
    - where gradients do not stay in .grad (torch.autograd.grad, steps inside the backward pass), for the same reason;
    - where only parts of the model are called, or a compiler traces it, and so leaves out the hook at the outputs.

    Autograd copies a gradient that somebody holds on to instead of moving it to .grad. So hooks leave it alone where it
    will be found in .grad, once a first pass has shown that it stays there; until then they hold on to its memory only.

    first_of_unit: whether no pass of the current unit has been completed yet. is_active: whether a pass might be wanted
    at all. Without `complete` nobody wants the gradients, and `start_backward` is called at a pass's start.

    Parameters may be frozen for some passes; a pass with all of them frozen does not count.

    torch.autograd.graph.register_multi_grad_hook is similar, but stops working when a model is moved or converted, and
    fails in torch.autograd.grad.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        start_backward: Callable[[], bool],
        complete: Callable[[list[Tensor | None], bool], None] | None = None,
        first_of_unit: Callable[[], bool] = lambda: True,
        is_active: Callable[[], bool] = lambda: True,
    ) -> None:
        self._start, self._complete, self._first = start_backward, complete, first_of_unit
        self._is_active = is_active
        self._parameters = list(parameters)
        self._now = _Pass(-1)
        self._stays: bool | None = None  # whether the last pass left its gradients in .grad
        self._left: list | None = NOTHING  # `_states` of all .grad after a pass of a unit that goes on, if all was well
        self._changed = False  # whether that was no longer so at the next pass
        self._shown = 0  # units in a row that did without hooks on all parameters
        self._hooks: dict[int, RemovableHandle] = {}
        self._watch_all()
        self._outputs = at_outputs(model, self._begin)

    def remove(self) -> None:
        self._outputs.remove()
        for index in list(self._hooks):
            self._unhook(index)

    def skip(self) -> None:
        """A batch without a backward pass: as one whose gradient is zero."""
        there = not self._all and not self._first()
        self._complete(self._in_grad() if there else [None] * len(self._parameters), not self._all)

    def _watch_all(self) -> None:
        self._all, self._shown, self._changed = True, 0, False
        for index, parameter in enumerate(self._parameters):
            if index not in self._hooks:
                self._hooks[index] = _hooked(parameter, partial(self._note, index))

    def _count(self, shown: bool, one: int) -> None:
        """A unit has ended. If there were enough of its kind, only `one` parameter is watched from now on."""
        self._shown = self._shown + 1 if shown else 0
        if self._shown >= SHOWN:
            self._all = False
            for index in self._hooks.keys() - {one}:
                self._unhook(index)

    def _unhook(self, index: int) -> None:
        parameter = self._parameters[index]
        self._hooks.pop(index).remove()
        if not parameter._backward_hooks:  # where autograd would go on looking for hooks, in every pass
            parameter._backward_hooks = None

    def _in_grad(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self._parameters]

    def _is_new(self) -> bool:
        """Whether this is the first call in a backward pass."""
        task = torch._C._current_graph_task_id()
        if task == self._now.task:
            return False
        self._now = _Pass(task)
        return True

    # -- during a pass ------------------------------------------------------------------------------------------------

    def _begin(self, gradient: Tensor) -> None:
        """The gradient of an output is there."""
        if not self._is_new():
            return
        now = self._now
        now.at_output = True
        if not self._is_active() or not any(parameter.requires_grad for parameter in self._parameters):
            return
        if self._complete is None:
            if not self._all:
                now.wanted = self._start()
            return
        now.before = _states(self._in_grad())
        if not self._all and self._first() and (now.before or self._changed):
            self._watch_all()
        elif not self._all and not self._first():
            self._changed |= now.before != self._left
        if not self._all:
            Variable._execution_engine.queue_callback(self._end_of_few)

    def _note(self, index: int, gradient: Tensor) -> None:
        """The gradient of a parameter is there, and is about to be added to .grad."""
        new, now = self._is_new(), self._now
        if new and not self._all and self._first():
            self._watch_all()  # the pass has not begun at an output
        if now.wanted is None:
            now.wanted = self._start()
            if now.wanted and self._complete and (self._all or new):
                Variable._execution_engine.queue_callback(self._end if self._all else self._end_of_few)
            if self._all and not self._complete:
                Variable._execution_engine.queue_callback(partial(self._count, now.at_output, index))
        if now.wanted and self._complete:
            parameter = self._parameters[index]
            moved = not self._all or (self._stays and parameter.grad is None)
            now.found[index] = None if moved else self._held(gradient)

    def _held(self, gradient: Tensor) -> Tensor:
        """What holds on to a gradient. Another tensor with the same memory does not keep autograd from moving it to
        .grad; but where gradients do not stay there, or a hook finds them there, something may overwrite them."""
        stays = self._stays is None and not any(one._post_accumulate_grad_hooks for one in self._parameters)
        return gradient.detach() if stays else gradient

    # -- after it -----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """All parameters were watched."""
        found, self._now.found = self._now.found, {}
        there = [self._parameters[index].grad for index in found]
        self._stays = all(gradient is not None for gradient in there)
        if not self._stays and None in found.values():
            _refuse()
        gradients = [None] * len(self._parameters)
        same = self._stays and self._now.before == NOTHING  # so that nobody needs those that hooks have held on to
        for (index, gradient), moved in zip(found.items(), there, strict=True):
            gradients[index] = moved if gradient is None or same else gradient
        shown = self._stays and self._now.at_output and self._now.before == (NOTHING if self._first() else self._left)
        left = _states(self._in_grad()) if shown else None
        one = next(iter(found))
        del found, there, gradient, moved
        self._complete(gradients, False)
        self._left = NOTHING if self._first() else left
        if self._first() or not shown:
            self._count(shown, one)

    def _end_of_few(self) -> None:
        """Gradients are in .grad."""
        now, gradients = self._now, self._in_grad()
        if not now.found and _states(gradients) == now.before:
            return  # the gradient of something else was wanted
        if now.wanted is None:
            now.wanted = self._start()
        if now.wanted and any(gradients[index] is None for index in now.found):
            _refuse()
        if now.wanted:
            self._complete(gradients, True)
            self._left = NOTHING if self._first() else _states(gradients)


def _hooked(parameter: nn.Parameter, note: Callable[[Tensor], None]) -> RemovableHandle:
    """A hook that stays when the parameter is frozen or unfrozen. PyTorch registers none while it is frozen."""
    trained = parameter.requires_grad
    try:
        return parameter.requires_grad_().register_hook(note)
    finally:
        parameter.requires_grad_(trained)


def _states(gradients: Sequence[Tensor | None]) -> list[tuple[int, int, int]]:
    """Of those that are there. Changes if one comes, goes, is replaced or changed. (A tensor's number is its own as
    long as it exists.)"""
    return [(i, id(each), each._version) for i, each in enumerate(gradients) if each is not None]


def _refuse() -> None:
    raise CdgrabError(
        "gradients of this backward pass are not in .grad, where those of the pass before were: run passes of "
        "torch.autograd.grad inside `with sampler.paused():`"
    )


def after_forward(module: nn.Module, call: Callable[[], None]) -> RemovableHandle:
    """Call `call()` after every forward pass with gradients, but those that a compiler traces."""
    return module.register_forward_hook(Note(_tell, call))


def _tell(call: Callable[[], None], module: nn.Module, arguments: tuple, output: object) -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        call()


def at_outputs(module: nn.Module, call: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `call(gradient)` when the gradient of an output of this module is there. A compiler that traces the module
    leaves this out."""
    return module.register_forward_hook(Note(_watch, call))


def _watch(call: Callable[[Tensor], None], module: nn.Module, arguments: tuple, output: object) -> None:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    _hook_all(output, call)


def _hook_all(output: object, call: Callable[[Tensor], None]) -> None:
    """Register the hook at every tensor in an output that is part of a graph. Dicts, lists and tuples are walked here,
    also kinds that pytree does not know, and in less time."""
    if isinstance(output, Tensor):
        if output.grad_fn is not None:
            output.register_hook(call)
    elif isinstance(output, (dict, list, tuple)):
        for part in dict.values(output) if isinstance(output, dict) else output:
            _hook_all(part, call)
    elif not isinstance(output, NO_TENSORS):
        for part in tree_leaves(output):
            if part is not output:
                _hook_all(part, call)


class Note(partial):
    """A forward hook. Copies of the model, for a moving average or in a file, note nothing. A file with a whole model
    can be loaded with `weights_only=True` wherever cdgrab is imported."""

    def __reduce__(self) -> tuple:
        return no_hook, ()


def no_hook() -> Callable[..., None]:
    """What stands for the hook in a file: a function that does nothing."""
    return _note_nothing


def _note_nothing(module: nn.Module, arguments: tuple, output: object) -> None:
    pass


torch.serialization.add_safe_globals([no_hook])


def flat(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> Tensor:
    """All gradients as one vector, of a type that can hold all of them; zero where a parameter took no part."""
    pieces = [
        parameter.new_zeros(parameter.numel()) if gradient is None else gradient.detach().to_dense().flatten()
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    return torch.cat(pieces)
