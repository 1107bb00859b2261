"""Training steps: gradients of all workers, their mean, one step of the optimiser, block after block.

`Steps` runs anywhere. `CapturedSteps` does the same on a GPU without Python: a step is captured once as a CUDA graph
that finds its data by a counter on the device, and is then replayed. Small models would otherwise wait for launches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cdgrab.runtime.group import WorkerGroup
from cdgrab.runtime.mean import Averager
from cdgrab.sparsify import SparseAverager
from experiments.tasks.base import Task
from experiments.training.clock import Clock
from experiments.training.compiled import Compiled, captured
from experiments.training.optimisers import Optimiser


class Steps:
    """`parameters`, the workers' carry and the optimiser's state move along as blocks of steps are run."""

    def __init__(
        self,
        task: Task,
        gradients: Compiled,
        optimiser: Optimiser,
        group: WorkerGroup,
        parameters: Tensor,
        observe_shard: Callable[[Tensor], None] | None = None,
        sparse_mean: SparseAverager | None = None,
    ) -> None:
        """gradients: a gradient function with the workers `summed`, to their mean where this is the only process; not
        summed where a sparsifier takes the mean.
        observe_shard: is given what the exchange of every step leaves here (see `exchange`)."""
        self.task, self.gradients, self.optimiser, self.group = task, gradients, optimiser, group
        self.parameters = parameters
        self.observe_shard = observe_shard
        self.mean = sparse_mean
        if not sparse_mean and group.world_size > 1:
            self.mean = Averager(group, len(parameters))
        self.carry = task.first_carry(group.local_workers)

    def start_epoch(self) -> None:
        self.carry = self.task.first_carry(self.group.local_workers)

    def load(self, parameters: Tensor, optimiser_state: list[Tensor]) -> None:
        """Go on from these instead."""
        self.parameters, self.optimiser.state = parameters, optimiser_state

    def load_carry(self, carry: list[Tensor]) -> None:
        """Go on in the middle of an epoch."""
        self.carry = carry

    def run(self, visits: Tensor, clock: Clock) -> tuple[Tensor, Tensor]:
        """Steps of equal shape: visits [local workers, steps, microbatch], indices of units.

        Returns the unit gradients [local workers, steps × microbatch, dim], empty where nobody looks at them, and the
        losses [local workers, steps].
        """
        stacked = visits.transpose(0, 1).contiguous()
        batches = list(zip(*(data.unbind(0) for data in self.task.fetch("train", stacked)), strict=True))
        compute = self.gradients.for_inputs(self.parameters, *self.carry, *batches[0])
        seen = []
        losses = self.parameters.new_empty(visits.shape[:2])  # small tensors that stay would leave holes in the memory
        clock.lap("data")
        for step, batch in enumerate(batches):
            unit_gradients, mean, worker_losses, *self.carry = compute(self.parameters, *self.carry, *batch)
            clock.lap("gradients")
            if self.mean:
                mean, shard = self.mean.average(mean, want_shard=bool(self.observe_shard))
                clock.lap("communication")
            if self.observe_shard:
                self.observe_shard(shard)
                clock.lap("ordering")
            self.parameters = self.optimiser.step(self.parameters, mean)
            losses[:, step] = worker_losses
            if unit_gradients.numel():
                seen.append(unit_gradients)
            clock.lap("optimiser")
        return torch.cat(seen, dim=1) if seen else self.parameters.new_empty(0), losses


class CapturedSteps(Steps):
    """For one process on a GPU. Captured tensors keep their addresses: everything here is changed in place.

    What `run` returns is overwritten by the next call.
    """

    def __init__(
        self,
        *parts,
        block_steps: int,
        kept_steps: int = 1,
        observe: Callable[[Tensor], None] | None = None,
    ) -> None:
        """block_steps: at most, per call of `run`.
        observe: is given the unit gradients of every `kept_steps` steps, [local workers, units, dim], which the next
        steps overwrite; `run` returns none. Nothing waits for the GPU, and few gradients are held."""
        super().__init__(*parts)
        self.block_steps, self.kept_steps, self.observe = block_steps, kept_steps, observe
        self.parameters = self.parameters.clone()
        self.carry = [state.clone() for state in self.carry]
        self.optimiser.state = [state.clone() for state in self.optimiser.state]
        self._captured: dict[int, _Block] = {}  # by microbatch: the last step of an epoch may be shorter

    def start_epoch(self) -> None:
        _overwrite(self.carry, self.task.first_carry(self.group.local_workers))

    def load(self, parameters: Tensor, optimiser_state: list[Tensor]) -> None:
        _overwrite(self._state(), [parameters, *self.carry, *optimiser_state])

    def load_carry(self, carry: list[Tensor]) -> None:
        _overwrite(self.carry, carry)

    def run(self, visits: Tensor, clock: Clock) -> tuple[Tensor, Tensor]:
        microbatch = visits.shape[2]
        if microbatch not in self._captured:
            before = [state.clone() for state in self._state()]
            self._captured[microbatch] = _Block(self, visits[:, 0])
            _overwrite(self._state(), before)
        block = self._captured[microbatch]
        block.begin(visits.transpose(0, 1))
        clock.lap("data")
        steps = visits.shape[1]
        for step in range(1, steps + 1):
            block.replay()
            if self.observe and (step % self.kept_steps == 0 or step == steps):
                clock.lap("gradients")
                self.observe(block.unit_gradients(1 + (step - 1) % self.kept_steps))
                clock.lap("ordering")
        clock.lap("gradients")
        return self.parameters.new_empty(0), block.losses[:steps].T

    def _state(self) -> list[Tensor]:
        return [self.parameters, *self.carry, *self.optimiser.state]


class _Block:
    """One step and the buffers it reads and writes."""

    def __init__(self, steps: CapturedSteps, sample: Tensor) -> None:
        device, (workers, microbatch) = sample.device, sample.shape
        self._steps = steps
        self.visits = sample.expand(steps.block_steps, workers, microbatch).clone()
        self.step = torch.zeros(2, dtype=torch.long, device=device)  # of the block, and of those whose gradients stay
        self.steps = torch.tensor([steps.block_steps, steps.kept_steps], device=device)
        dim, dtype = len(steps.parameters), steps.parameters.dtype
        kept = steps.kept_steps if steps.observe else 0
        self.kept = torch.empty(kept, workers, microbatch, dim, dtype=dtype, device=device)
        self._wide = _widest(self.kept)
        self.losses = torch.empty(steps.block_steps, workers, dtype=dtype, device=device)
        if steps.mean:  # by Python, between the step's two halves
            self._means = torch.empty(workers, dim, dtype=dtype, device=device)
            self._mean = torch.zeros(dim, dtype=dtype, device=device)
            self._halves = captured(self._first_half, device), captured(lambda: self._update(self._mean), device)
        else:
            self._whole = captured(lambda: self._update(self._gradients()), device)

    def replay(self) -> None:
        if not self._steps.mean:
            return self._whole()
        first_half, second_half = self._halves
        first_half()
        self._mean.copy_(self._steps.mean.average(self._means)[0])
        second_half()

    def _first_half(self) -> None:
        self._means.copy_(self._gradients())

    def _gradients(self) -> Tensor:
        """Returns the mean [dim], or means [workers, dim] where a sparsifier takes theirs."""
        steps, (step, place) = self._steps, self.step.split(1)
        batch = steps.task.fetch("train", self.visits.index_select(0, step)[0])
        inputs = (steps.parameters, *steps.carry, *batch)
        unit_gradients, mean, worker_losses, *carry = steps.gradients.for_inputs(*inputs)(*inputs)
        if steps.observe:
            _as(self._wide, self.kept).index_copy_(0, place, _as(self._wide, unit_gradients[None]))
        self.losses.index_copy_(0, step, worker_losses[None].to(self.losses.dtype))
        _overwrite(steps.carry, carry)
        return mean

    def _update(self, mean: Tensor) -> None:
        steps = self._steps
        parameters, optimiser_state = steps.optimiser.updated(steps.parameters, mean)
        _overwrite([steps.parameters, *steps.optimiser.state], [parameters, *optimiser_state])
        self.step.copy_((self.step + 1) % self.steps)

    def begin(self, visits: Tensor) -> None:
        """visits [steps, workers, microbatch]"""
        self.visits[: len(visits)].copy_(visits)
        self.step.zero_()

    def unit_gradients(self, steps: int) -> Tensor:
        """Of the first that are kept, [workers, units, dim]."""
        return self.kept[:steps].transpose(0, 1).flatten(1, 2)


def _widest(steps: Tensor) -> torch.dtype:
    """The type of the fewest numbers that take the memory of one of `steps`: fewer are copied faster."""
    size = steps[:1].numel() * steps.element_size()
    return next((wide for wide in (torch.complex128, torch.float64) if size % wide.itemsize == 0), steps.dtype)


def _as(dtype: torch.dtype, steps: Tensor) -> Tensor:
    """The same bits, [steps, numbers]."""
    return steps.flatten(1).view(dtype)


def _overwrite(targets: list[Tensor], values: list[Tensor] | tuple[Tensor, ...]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)
