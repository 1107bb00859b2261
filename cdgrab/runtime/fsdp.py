"""The gradients of modules under FSDP2 (`torch.distributed.fsdp.fully_shard`), from an exchange in place of its
reduce-scatter.

FSDP reduces the gradients of one module after the other, each cut into the parts of the processes, padded to equal
length. Here an all-to-all of the same traffic gives every process its part of everybody's gradients, and FSDP the mean
of them. Then FSDP calls the hooks of these parameters, in the order in which their gradients lie there. This tells
whose gradients they are, whichever module comes first and whichever parameters took no part. They are taken when all of
a module's are known: on a GPU every copy takes the host longer than the GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from cdgrab.errors import CdgrabError
from cdgrab.runtime.division import Division
from cdgrab.runtime.group import WorkerGroup
from cdgrab.runtime.mean import tree_sum

CHANGED = ("_reduce_scatter_comm", "gradient_divide_factor", "force_sum_reduction_for_comms")  # of FSDP's groups
Take = Callable[[Tensor, Sequence[tuple[nn.Parameter, slice]]], None]


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that `fully_shard` was called for. Those of its predecessor are refused."""
    library = sys.modules.get("torch.distributed.fsdp")  # nobody shards without importing it, and that takes long
    if library is None:
        return []
    if any(isinstance(module, library.FullyShardedDataParallel) for module in model.modules()):
        raise CdgrabError(
            "FullyShardedDataParallel shows nobody's gradients: use fully_shard of torch.distributed.fsdp instead"
        )
    return [module for module in model.modules() if isinstance(module, library.FSDPModule)]


def is_sharded(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "placements")


def part_size(parameter: nn.Parameter, processes: int) -> int:
    """How many numbers of a parameter (or of its gradient) each process gets, padding included: whole rows, if it is
    sharded."""
    by_rows = is_sharded(parameter) and parameter.placements[-1].is_shard(0)
    rows = len(parameter) if by_rows else parameter.numel()
    return -(-rows // processes) * (parameter.numel() // max(rows, 1))


def division(parameters: Sequence[nn.Parameter], group: WorkerGroup) -> Division:
    """Who gets which coordinates of the gradient of all parameters. Coordinates of a parameter that is not sharded by
    its first dimension are counted shard by shard."""
    starts = accumulate((parameter.numel() for parameter in parameters), initial=0)
    every = list(zip(parameters, starts, strict=False))

    def own(rank: int) -> tuple[slice, ...]:
        parts = ((start, parameter.numel(), part_size(parameter, group.world_size)) for parameter, start in every)
        return tuple(
            slice(start + min(rank * part, size), start + min((rank + 1) * part, size)) for start, size, part in parts
        )

    return Division(group, tuple(own(rank) for rank in range(group.world_size)))


class ShardHook:
    """Takes the place of the reduce-scatter of all sharded modules.

    take(rows, parts): called when the parameters of a module have got gradients. rows: this process's part of
    everybody's gradients, [processes, width]; with `whole`, everybody's part of this process's. parts: the columns of
    each parameter, the last of which may be padding.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parameters: Sequence[nn.Parameter],
        group: WorkerGroup,
        take: Take,
        whole: bool,
    ) -> None:
        self._modules, self._parameters, self._group = modules, parameters, group
        self._take, self._whole = take, whole
        self._rows: Tensor | None = None  # what has just been reduced, [processes, size of all parts]
        self._buffers: list[Tensor] = []  # the last two, if this process is alone: then FSDP only copies
        self._offset = 0  # where the next parameter's gradient begins in there
        self._parts: list[tuple[nn.Parameter, slice]] = []  # where those lie that are known
        self._unknown = False  # whether something was reduced that belongs to none of the parameters
        self._handles: list = []
        self._before: list[tuple[object, dict]] = []
        self._divisor = float(group.world_size)
        self._stream: torch.cuda.Stream | None = None  # in which FSDP reduces on a GPU

    @property
    def _groups(self) -> list:
        every = (module._get_fsdp_state()._fsdp_param_group for module in self._modules)
        return [group for group in every if group is not None]  # a module may have no parameters besides its children's

    def register(self) -> None:
        self._refuse()
        for group in self._groups:
            self._before.append((group, {name: getattr(group, name) for name in CHANGED}))
            self._divisor = group.gradient_divide_factor or self._divisor
        for module in self._modules:
            module.set_custom_reduce_scatter(self)
            if self._group.world_size > 1:  # gradients arrive as they are, and are divided here
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        for parameter in self._parameters:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._next))

    def _refuse(self) -> None:
        try:
            groups = self._groups
        except AssertionError as error:
            raise CdgrabError("a module with parameters on several meshes is not supported: shard its parts") from error
        if any(type(group._reduce_scatter_comm).__name__ != "DefaultReduceScatter" for group in groups):
            raise CdgrabError("the model has a reduce-scatter of its own already, and FSDP takes only one")
        if len({group.gradient_divide_factor for group in groups}) > 1:
            raise CdgrabError("the model's modules have different gradient divide factors; give all of them the same")

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for group, values in self._before:
            vars(group).update(values)
        self._handles, self._before = [], []

    def begin(self) -> None:
        """A backward pass begins."""
        self._rows, self._parts, self._unknown = None, [], False

    def refuse_changes(self) -> None:
        """At the end of a backward pass: refuse what was changed since `register`."""
        if self._unknown or self._rows is not None:
            raise CdgrabError("parameters were replaced or unfrozen after sampler.attach: attach last")
        alone = self._group.world_size == 1
        divided = any(group.gradient_divide_factor != 1 for group in self._groups) and not alone
        if divided or any(group._reduce_scatter_comm is not self for group in self._groups):
            raise CdgrabError(
                "set_custom_reduce_scatter or set_gradient_divide_factor was called after sampler.attach: attach last"
            )

    def synchronises(self) -> bool:
        """Whether gradients are reduced in backward passes, instead of being accumulated by this process."""
        return all(group.reduce_grads for group in self._groups)

    def wait(self) -> None:
        """Let the current stream wait until everything is taken."""
        if self._stream:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    # -- called by FSDP -----------------------------------------------------------------------------------------------

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """First for what is reduced, then for the result."""
        buffer = torch.empty(*size, dtype=dtype, device=device)
        if self._group.world_size == 1:
            self._buffers = [*self._buffers[-1:], buffer]
            self._rows, self._offset = self._buffers[0][None], 0
        return buffer

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: object, op: object, async_op: bool = False
    ) -> None:
        processes = WorkerGroup(group.size(), group.rank(), group.size(), self._group.traffic, group)
        rows = processes.shard(input_tensor)
        total = tree_sum(rows.float() if rows.element_size() < 4 else rows)  # better than FSDP's own sum in 16 bits
        output_tensor.copy_(total / self._divisor)
        self._unknown |= self._rows is not None
        self._rows, self._offset = input_tensor.view_as(rows) if self._whole else rows, 0

    def _next(self, parameter: nn.Parameter) -> None:
        """The gradient of this parameter is the next one, unless it comes from a loss of the shards themselves."""
        reduced = self._rows
        if reduced is None:
            return
        start, self._offset = self._offset, self._offset + part_size(parameter, len(reduced))
        self._parts.append((parameter, slice(start, self._offset)))
        if self._offset == reduced.shape[1]:
            self._stream = torch.cuda.current_stream(reduced.device) if reduced.is_cuda else None
            parts, self._parts, self._rows, self._buffers = self._parts, [], None, []
            self._take(reduced, parts)
