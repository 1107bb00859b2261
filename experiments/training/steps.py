"""Training steps: gradients of all workers, their mean, one step of the optimiser, block after block.

For one run, or for several at once: then the first dimension of every tensor is the replicas, before the workers.

`Steps` runs anywhere. `CapturedSteps` does the same on a GPU without Python: a step is captured once as a CUDA graph,
which finds its data by a counter on the device, and is then replayed. Otherwise small models would wait for launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from cdgrab.errors import NotFiniteError
from cdgrab.runtime.mean import Averager
from cdgrab.sparsify import SparseAverager
from experiments.tasks.base import Task
from experiments.training.clock import Clock
from experiments.training.compiled import Compiled, captured
from experiments.training.on_device import OnDevice
from experiments.training.optimisers import Optimiser
from experiments.training.signals import Agreement


class Steps:
    """Holds `parameters`, the workers' carry and the optimiser's state, which every block of steps updates."""

    def __init__(
        self,
        task: Task,
        gradients: Compiled,
        optimiser: Optimiser,
        parameters: Tensor,
        first_carry: Sequence[Tensor],
        averager: Averager | SparseMeans | OnDevice | None = None,
        observe_shard: Callable[[Tensor], None] | None = None,
    ) -> None:
        """parameters [dim] or [replicas, dim].
        gradients: a function of such parameters; `averager` averages its result, unless that is the mean already.
        observe_shard: gets the shard from the exchange of every step (see `cdgrab.runtime.mean`)."""
        self.task, self.gradients, self.optimiser, self.parameters = task, gradients, optimiser, parameters
        self.averager, self.observe_shard = averager, observe_shard
        self.carry = self.first_carry = first_carry
        self.sums: PartialSums | None = None  # of the mean gradients, if somebody wants them
        self._functions: dict[int, Callable] = {}  # by microbatch: the last step of an epoch may be shorter

    def load(self, parameters: Tensor, optimiser_state: list[Tensor], carry: Sequence[Tensor] | None = None) -> None:
        """Continue from these; in the middle of an epoch, also from this carry."""
        self.parameters, self.optimiser.state = parameters, optimiser_state
        self.carry = self.first_carry if carry is None else carry

    def run(
        self,
        visits: Tensor,
        clock: Clock,
        first: bool = False,
        observed: bool = True,
        agreement: Agreement | None = None,
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Run steps of equal shape, visits [..., workers, steps, microbatch]; `first`: they start an epoch;
        `observed`: sorters see the gradients; `agreement`: whether to stop, asked twice a second.

        Returns the unit gradients of every run whose sorter needs them, [workers, steps × microbatch, dim] each, and
        the losses [..., workers, steps].
        """
        if first:
            self.carry = self.first_carry
        data = self.task.fetch("train", visits.movedim(-2, 0).contiguous())
        batches = list(zip(*(tensor.unbind(0) for tensor in data), strict=True))
        if (microbatch := visits.shape[-1]) not in self._functions:
            self._functions[microbatch] = self.gradients.for_inputs(self.parameters, *self.carry, *batches[0])
        compute, optimiser, seen = self._functions[microbatch], self.optimiser, []
        observe_shard = self.observe_shard if observed else None
        losses = self.parameters.new_empty(visits.shape[:-1])  # one tensor: small ones would fragment the memory
        clock.append(("data", perf_counter()))
        for step, batch in enumerate(batches):
            unit_gradients, mean, worker_losses, *self.carry = compute(self.parameters, *self.carry, *batch)
            clock.append(("gradients", perf_counter()))
            if self.averager:
                mean, shard = self.averager.average(mean, want_shard=bool(observe_shard))
                clock.append(("communication", perf_counter()))
            if observe_shard:
                observe_shard(shard)
                shard = None  # else it would stay while the next gradients are computed, which takes most memory
                clock.append(("ordering", perf_counter()))
            if self.sums:
                self.sums.add(mean, microbatch)
            self.parameters, *optimiser.state = optimiser.update(self.parameters, mean, *optimiser.state)
            losses[..., step] = worker_losses
            if unit_gradients.numel() and observed:
                seen.append(unit_gradients)
            clock.append(("optimiser", perf_counter()))
            if agreement:
                agreement.steps += 1
                if agreement.steps >= agreement.wanted and agreement.after_steps():
                    break
        return self._by_run(torch.cat(seen, dim=-2)) if seen else (), losses[..., : step + 1]

    def _by_run(self, tensor: Tensor) -> Sequence[Tensor]:
        return unstacked(tensor, self.parameters.shape[:-1].numel())


class CapturedSteps(Steps):
    """For one process on a GPU. Captured tensors keep their addresses, so everything is changed in place.

    The next call of `run` overwrites what the last one returned.
    """

    def __init__(
        self,
        *parts,
        block_steps: int,
        kept_steps: int = 1,
        observe: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        """block_steps: steps per call of `run`, at most.
        observe: gets the unit gradients of every `kept_steps` steps, run by run, which the next steps
        overwrite; then `run` returns none. Nothing waits for the GPU, and few gradients are in memory."""
        super().__init__(*parts)
        self.block_steps, self.kept_steps, self.observe = block_steps, kept_steps, observe
        self.parameters = self.parameters.clone()
        self.carry = [state.clone() for state in self.carry]
        self.optimiser.state = [state.clone() for state in self.optimiser.state]
        self._captured: dict[tuple[int, bool], _Block] = {}

    def load(self, parameters: Tensor, optimiser_state: list[Tensor], carry: Sequence[Tensor] | None = None) -> None:
        carry = self.first_carry if carry is None else carry
        _overwrite(self._state(), [parameters, *carry, *optimiser_state])

    def run(
        self,
        visits: Tensor,
        clock: Clock,
        first: bool = False,
        observed: bool = True,
        agreement: Agreement | None = None,
    ) -> tuple[Sequence[Tensor], Tensor]:
        """`agreement` is not asked: the GPU is still computing when the last step has been handed to it."""
        if first:
            _overwrite(self.carry, self.first_carry)
        microbatch = visits.shape[-1]
        kind = microbatch, self.sums is None  # a graph that sums is another one
        if kind not in self._captured:
            parts = (part for part in (self.sums, self.averager) if part)
            changed = [*self._state(), *(tensor for part in parts for tensor in part.tensors())]
            before = [tensor.clone() for tensor in changed]
            self._captured[kind] = _Block(self, visits[..., 0, :])
            _overwrite(changed, before)
        block = self._captured[kind]
        block.begin(visits.movedim(-2, 0))
        clock.lap("data")
        steps = visits.shape[-2]
        for step in range(1, steps + 1):
            block.replay()
            if self.observe and observed and (step % self.kept_steps == 0 or step == steps):
                clock.lap("gradients")
                self.observe(self._by_run(block.unit_gradients(1 + (step - 1) % self.kept_steps)))
                clock.lap("ordering")
        clock.lap("gradients")
        return (), block.losses[:steps].movedim(0, -1)

    def _state(self) -> list[Tensor]:
        return [self.parameters, *self.carry, *self.optimiser.state]


class _Block:
    """One step and the buffers it reads and writes."""

    def __init__(self, steps: CapturedSteps, sample: Tensor) -> None:
        device, workers = sample.device, sample.shape[:-1]
        self._steps = steps
        self.visits = sample.expand(steps.block_steps, *sample.shape).clone()
        self.step = torch.zeros(2, dtype=torch.long, device=device)  # of the block, and of those whose gradients stay
        self.steps = torch.tensor([steps.block_steps, steps.kept_steps], device=device)
        dim, dtype = steps.parameters.shape[-1], steps.parameters.dtype
        self.losses = torch.empty(steps.block_steps, *workers, dtype=dtype, device=device)
        if steps.observe:
            batch = steps.task.fetch("train", sample)
            some = steps.gradients(steps.parameters, *steps.carry, *batch)[0]  # [..., workers, microbatch, dim]
            self.kept = torch.empty(steps.kept_steps, *some.shape, dtype=dtype, device=device)
            self._wide = _widest(self.kept)
        self._in_halves = steps.averager is not None and steps.averager.asks
        if self._in_halves:  # the averager runs in Python, between the two halves of a step
            self._means = torch.empty(*workers, dim, dtype=dtype, device=device)
            self._mean = torch.zeros_like(steps.parameters)
            self._halves = captured(self._first_half, device), captured(lambda: self._update(self._mean), device)
        else:
            self._whole = captured(lambda: self._update(self._averaged()), device)

    def replay(self) -> None:
        if not self._in_halves:
            return self._whole()
        first_half, second_half = self._halves
        first_half()
        self._mean.copy_(self._steps.averager.average(self._means)[0])
        second_half()

    def _first_half(self) -> None:
        self._means.copy_(self._gradients())

    def _averaged(self) -> Tensor:
        averager, found = self._steps.averager, self._gradients()
        return averager.average(found)[0] if averager else found

    def _gradients(self) -> Tensor:
        """Returns the mean [..., dim], or the workers' means [..., workers, dim] for a sparsifier."""
        steps, (step, place) = self._steps, self.step.split(1)
        batch = steps.task.fetch("train", self.visits.index_select(0, step)[0])
        unit_gradients, mean, worker_losses, *carry = steps.gradients(steps.parameters, *steps.carry, *batch)
        if steps.observe:
            _as(self._wide, self.kept).index_copy_(0, place, _as(self._wide, unit_gradients[None]))
        self.losses.index_copy_(0, step, worker_losses[None].to(self.losses.dtype))
        _overwrite(steps.carry, carry)
        return mean

    def _update(self, mean: Tensor) -> None:
        steps = self._steps
        state = steps.optimiser.state
        if steps.sums:
            steps.sums.add(mean, self.visits.shape[-1])
        _overwrite([steps.parameters, *state], steps.optimiser.update(steps.parameters, mean, *state))
        self.step.copy_((self.step + 1) % self.steps)

    def begin(self, visits: Tensor) -> None:
        """visits [steps, ..., workers, microbatch]"""
        self.visits[: len(visits)].copy_(visits)
        self.step.zero_()

    def unit_gradients(self, steps: int) -> Tensor:
        """The unit gradients of the first steps that are kept, [..., workers, units, dim]."""
        return self.kept[:steps].movedim(0, -3).flatten(-3, -2)


class PartialSums:
    """Of the steps' mean gradients less `centre`, times the units that a worker visits in a step. All in float64 and
    changed in place. `largest`: the largest absolute entry of any partial sum."""

    def __init__(self, parameters: Tensor) -> None:
        """parameters [..., dim]"""
        self.total = torch.zeros_like(parameters, dtype=torch.float64)
        self.centre, self.largest = torch.zeros_like(self.total), self.total.new_zeros(parameters.shape[:-1])

    def restart(self, total: Tensor | float = 0.0, centre: Tensor | float = 0.0) -> None:
        for tensor, value in ((self.total, total), (self.centre, centre), (self.largest, 0.0)):
            tensor.copy_(torch.as_tensor(value))

    def add(self, mean: Tensor, microbatch: int) -> None:
        self.total.add_(mean - self.centre, alpha=microbatch)
        torch.maximum(self.largest, self.total.abs().amax(-1), out=self.largest)

    def tensors(self) -> list[Tensor]:
        return [self.total, self.largest]


class SparseMeans:
    """Averages like `cdgrab.runtime.mean.Averager`, but the gradients of each run with its own sparsifier."""

    asks = True  # the device, during a step

    def __init__(self, averagers: Sequence[SparseAverager]) -> None:
        self._averagers = averagers

    def average(self, worker_means: Tensor, want_shard: bool = False) -> tuple[Tensor, None]:
        """The updates [..., dim] from the workers' mean gradients [..., local workers, dim]. There is no shard."""
        each = zip(self._averagers, unstacked(worker_means, len(self._averagers)), strict=True)
        return stacked([self._update(averager, means) for averager, means in each]), None

    def tensors(self) -> list[Tensor]:
        """Captured steps change none of its own."""
        return []

    def collect(self) -> None:
        """Each run's averager has its own statistics already."""

    def _update(self, averager: SparseAverager, worker_means: Tensor) -> Tensor:
        try:
            return averager.average(worker_means)[0]
        except NotFiniteError:  # its parameters are not finite from now on, which ends this run and no other
            return torch.full_like(worker_means[0], torch.nan)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """[replicas, ...]; the tensor itself if there is only one run."""
    return torch.stack(list(tensors)) if len(tensors) > 1 else tensors[0]


def unstacked(tensor: Tensor, replicas: int) -> Sequence[Tensor]:
    """The part of every run. A run alone has no dimension of replicas."""
    return tensor.unbind(0) if replicas > 1 else (tensor,)


def _widest(steps: Tensor) -> torch.dtype:
    """The widest type of which a whole number fills one of `steps`: copying fewer, wider numbers is faster."""
    size = steps[:1].numel() * steps.element_size()
    return next((wide for wide in (torch.complex128, torch.float64) if size % wide.itemsize == 0), steps.dtype)


def _as(dtype: torch.dtype, steps: Tensor) -> Tensor:
    """The same bits, [steps, numbers]."""
    return steps.flatten(1).view(dtype)


def _overwrite(targets: list[Tensor], values: list[Tensor] | tuple[Tensor, ...]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)
