"""How a ledger gets the gradients of a model under FSDP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from cdgrab.dropin.hooks import at_outputs, flat
from cdgrab.dropin.ledger import Ledger
from cdgrab.dropin.refusals import refuse_other_shards, refuse_replicas
from cdgrab.errors import CdgrabError
from cdgrab.runtime.ddp import after_backward, common_dtype
from cdgrab.runtime.fsdp import ShardHook, division, is_sharded
from cdgrab.runtime.group import WorkerGroup


class ShardedGradients:
    """Observes what FSDP reduces, and the gradients of parameters that it leaves alone: this process's coordinates of
    everybody's gradients (shares), or all coordinates of its own, as the sorter needs.

    Gradients may be accumulated before they are reduced, or after it.
    """

    def __init__(
        self, modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter], ledger: Ledger, group: WorkerGroup
    ) -> None:
        self._modules, self._parameters, self._ledger, self._group = modules, parameters, ledger, group
        self._sharded = [parameter for parameter in parameters if is_sharded(parameter)]
        self._others = [parameter for parameter in parameters if not is_sharded(parameter)]
        refuse_other_shards(group, self._sharded)
        self._pass, self._in_pass, self._wanted = -1, False, False
        self._found: set[int] | None = None  # ids of parameters with a gradient in this unit; None: it has not begun
        self._which, self._counts = (-1, -1), False  # this unit, and whether the sorter wants it
        self._sums: dict[int, Tensor] = {}  # gradients of the others in this unit, if shares are observed

    def hook(self) -> list:
        self._shares, every = self._ledger.takes_shards, division(self._parameters, self._group)
        if self._shares:
            refuse_replicas(self._sharded)
            self._ledger.sorter.divide(every)
        sizes = every.sizes() if self._shares else [parameter.numel() for parameter in self._parameters]
        places = (slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True))
        self._places = {id(parameter): place for parameter, place in zip(self._parameters, places, strict=True)}
        dtype = torch.promote_types(common_dtype(self._parameters), torch.float32)
        mesh = self._sharded[0].device_mesh if self._sharded else None
        device = mesh.device_type if mesh else self._others[0].device  # sharded parameters may be offloaded
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._unit = self._ledger if self._shares else WholeGradient(self._ledger, sum(sizes))
        self._hook = ShardHook(self._modules, self._sharded, self._group, self._take, whole=not self._shares)
        self._hook.register()
        handles = [at_outputs(module, self._begin) for module in self._modules]
        return [self._hook, *handles, *(each.register_hook(partial(self._note, each)) for each in self._others)]

    def skip(self) -> None:
        self._begin_unit()
        if self._ledger.unit_complete():
            self._end_unit()

    # -- a backward pass ----------------------------------------------------------------------------------------------

    def _begin(self, gradient: Tensor | None = None) -> None:
        """A backward pass begins with the gradient of an output."""
        this_pass = torch._C._current_graph_task_id()
        if this_pass != self._pass:
            self._pass, self._in_pass = this_pass, True
            self._hook.begin()
            trained = any(parameter.requires_grad for parameter in self._parameters)
            self._wanted = trained and self._ledger.start_backward()
            if self._wanted:
                self._begin_unit()
            after_backward(self._end)  # some modules are reduced in FSDP's own last step

    def _note(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """The gradient of a parameter that FSDP leaves alone."""
        self._begin()
        if self._shares and self._wanted:
            before = self._sums.get(id(parameter))
            self._sums[id(parameter)] = gradient.detach().clone() if before is None else before + gradient
        elif self._wanted:
            self._add([parameter], gradient.detach().to_dense().view(1, -1))

    def _take(self, rows: Tensor, parts: Sequence[tuple[nn.Parameter, slice]]) -> None:
        """The gradients of parameters that FSDP has reduced; see `ShardHook`."""
        if not self._in_pass:  # none of the outputs was a tensor
            self._begin()
        if not self._wanted:
            return
        if self._shares or len(rows) == 1:
            for parameters, columns in self._neighbours(parts):
                self._add(parameters, rows[:, columns])
            return
        for parameter, columns in parts:
            self._add([parameter], rows[:, columns].flatten()[None, : parameter.numel()])

    def _neighbours(self, parts: Sequence[tuple[nn.Parameter, slice]]) -> Iterator[tuple[list[nn.Parameter], slice]]:
        """Parameters whose columns lie side by side here and where they go, and all of these columns."""
        some, start, end, there, again = [], 0, 0, 0, False
        for parameter, columns in parts:
            place, found = self._places[id(parameter)], id(parameter) in self._found
            if some and (columns.start, place.start, found) != (end, there, again):
                yield some, slice(start, end)
                some = []
            start = start if some else columns.start
            some.append(parameter)
            end, there, again = columns.start + place.stop - place.start, place.stop, found
        yield some, slice(start, end)

    def _end(self) -> None:
        self._in_pass = False
        if not self._wanted:
            return
        self._hook.refuse_changes()
        self._hook.wait()
        if self._ledger.unit_complete():
            if not self._hook.synchronises():
                raise CdgrabError(
                    "FSDP has not reduced the gradients of this batch: make the sampler with accumulation_steps=…, and "
                    "call set_requires_gradient_sync(True) before the last backward pass of each unit"
                )
            self._end_unit()

    # -- a unit -------------------------------------------------------------------------------------------------------

    def _begin_unit(self) -> None:
        if self._found is None or self._which != self._ledger.current_unit():  # one may not have been completed
            self._found, self._sums, self._which = set(), {}, self._ledger.current_unit()
            self._counts = self._ledger.its_turn()
            if self._counts:
                self._unit.begin_shares(self._like)
        else:  # the next epoch may have begun meanwhile
            self._counts = self._counts and self._ledger.its_turn()

    def _add(self, parameters: Sequence[nn.Parameter], rows: Tensor) -> None:
        """parameters: one, or neighbours."""
        if self._counts:
            names = [id(parameter) for parameter in parameters]
            place = slice(self._places[names[0]].start, self._places[names[-1]].stop)
            self._unit.take_share(place, rows, add=names[0] in self._found)
            self._found.update(names)

    def _end_unit(self) -> None:
        if self._counts:
            self._complete()
            self._unit.end_shares()
        self._found, self._sums = None, {}

    def _complete(self) -> None:
        """Add the gradients of parameters that FSDP leaves alone, and zeros for those that took no part."""
        if self._shares and self._others:
            own = division(self._others, self._group)
            mine = flat(self._others, [self._sums.get(id(other)) for other in self._others])
            for parameter, rows in zip(self._others, own.shard(mine).split(own.sizes(), dim=1), strict=True):
                self._add([parameter], rows)
        for name, place in self._places.items():
            if name not in self._found:
                self._unit.take_share(place, self._like.new_zeros(1, 1))


class WholeGradient:
    """Collects this process's gradient of a unit."""

    def __init__(self, ledger: Ledger, dim: int) -> None:
        self._ledger, self._dim = ledger, dim
        self._gradient: Tensor | None = None

    def begin_shares(self, like: Tensor) -> None:
        self._gradient = like.new_empty(1, self._dim) if self._gradient is None else self._gradient

    def take_share(self, place: slice, share: Tensor, add: bool = False) -> None:
        if add:
            self._gradient[:, place] += share
        else:
            self._gradient[:, place] = share

    def end_shares(self) -> None:
        self._ledger.observe(self._gradient)
