"""The training loop: one for all tasks, sorters, worker counts and process counts, and for runs that train together.

    orders ──▶ batches ──▶ unit gradients ──▶ (sparsified) mean over workers ──▶ optimiser ──▶ parameters
       ▲                        │
       └──────── sorter ◀───────┘

An epoch runs in blocks of steps. A block's data is fetched at once, and its unit gradients are passed to the sorters at
once: orders are needed only at the end of the epoch, and small models would spend most of their time on Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from cdgrab.errors import CdgrabError, DivergedError, NotFiniteError, Stopped
from cdgrab.runtime.fields import Field, refuse_others
from cdgrab.runtime.group import WorkerGroup
from cdgrab.runtime.mean import Averager
from cdgrab.runtime.state import copied
from experiments import early
from experiments.tasks.base import DTYPES, Task, joined
from experiments.training import snapshot
from experiments.training.clock import PHASES, Clock
from experiments.training.compiled import Compiled
from experiments.training.config import Run
from experiments.training.evaluation import plainly
from experiments.training.gradients import gradient_function, summed, together, written_at_once
from experiments.training.member import Member, evaluated
from experiments.training.on_device import OnDevice, supported
from experiments.training.optimisers import Optimiser
from experiments.training.parts import (
    MOST_STEPS_PER_BLOCK,
    blocks,
    products,
    steps_per_block,
    warm_up_shards,
    warm_up_sorters,
)
from experiments.training.progress import Watch
from experiments.training.replay import Replay
from experiments.training.signals import Agreement
from experiments.training.steps import CapturedSteps, SparseMeans, Steps, stacked, unstacked


class Trainer:
    """Runs that train together, most often one, on one process that hosts some of their workers.

    They share model, data and shapes, and are at the same step. With several runs, the first dimension of all tensors
    is the replicas. On several processes runs train alone.
    """

    def __init__(self, members: Sequence[Member], saved: bool = True) -> None:
        """saved: whether there may be checkpoints. Without them, sparsifiers may stay on the device."""
        # those whose sorters look at gradients come first
        self.members = sorted(members, key=lambda member: not member.sorter.needs_gradients)
        first = self.members[0]
        self.config, self.group, self.device, self.flat = first.config, first.group, first.device, first.flat
        self.replicas, self.sparse, self._saves = len(members), first.sparse_mean is not None, saved
        for member in self.members:
            member.unit_gradients = first.unit_gradients
        self.task, offsets = joined([member.task for member in self.members])
        self.owned = stacked([member.owned + offset for member, offset in zip(self.members, offsets, strict=True)])
        self.units, self.microbatch = first.units, self.task.units_per_step
        self.steps = -(-self.units // self.microbatch)
        self.shards = first.sorter.by_shards(self.microbatch, self.sparse)
        self.per_unit = first.sorter.needs_gradients and not self.shards
        self.gradients = self._gradients()
        unit_bytes = sum(tensor.nbytes for tensor in self.task.fetch("train", first.owned[:1, :1]))
        unit_bytes += self.flat.dim * DTYPES[self.config.task.dtype].itemsize * self.per_unit
        step_bytes = unit_bytes * self.microbatch * self.group.local_workers
        self.block_steps = steps_per_block(step_bytes, self.replicas, self.device)
        self.loop = self._steps()
        self.blocks = blocks(self.units, self.microbatch, self.block_steps, self.config.checkpoint.every_steps)
        self.replay = Replay(self.loop, self.config.workers, self.replicas, self.config.task.herding_replays)
        self.epochs_done, self.position, self.clock = 0, 0, Clock()  # position: units visited in the current epoch
        self._agreement: Agreement | None = None  # nobody is asked before `fit`
        self._warm_up()

    def _gradients(self) -> Compiled:
        """The gradient function: the sum over the workers, or their mean if there is only this process; each worker's
        for a sparsifier."""
        how = self.config.task.gradients
        function = gradient_function(self.task, self.flat, self.per_unit, how)
        if not self.sparse:
            function = summed(function, self.config.workers if self.group.world_size == 1 else None)
        by_kernels = self.replicas > 1 and written_at_once(self.task, self.device)
        if self.replicas > 1:
            lookers = sum(member.sorter.needs_gradients for member in self.members)
            function = together(self.task, self.flat, function, how, self.owned, lookers, self.sparse)
        return Compiled(function, self.config.compile == "auto" and how == "vmap" and not by_kernels)

    def _steps(self) -> Steps:
        group, config, compiled = self.group, self.config, self.config.compile == "auto"
        parameters = stacked([member.initial_parameters() for member in self.members])
        tasks = [member.config.task for member in self.members]
        optimiser = Optimiser(tasks, self.steps, config.epochs, parameters, compiled)
        carries = zip(*(member.task.first_carry(group.local_workers) for member in self.members), strict=True)
        captured = compiled and self._can_capture()
        sparse = self._sparse_means(captured) if self.sparse else None
        plain = Averager(group, self.flat.dim) if group.world_size > 1 else None
        first_carry = [stacked(part) for part in carries]
        parts = (self.task, self.gradients, optimiser, parameters, first_carry, sparse or plain)
        if not captured:
            return Steps(*parts, self.members[0].sorter.observe_shard if self.shards else None)
        observe = partial(self._observe, unseen=True)
        kept = {"kept_steps": max(2, self.block_steps), "observe": observe} if self.per_unit else {}
        # captured steps fetch their own data: here a block is what runs between two checks of the losses
        self.block_steps = min(MOST_STEPS_PER_BLOCK, 32 * self.block_steps)
        return CapturedSteps(*parts, block_steps=self.block_steps, **kept)

    def _can_capture(self) -> bool:
        return self.device.type == "cuda" and self.group.world_size == 1

    def _sparse_means(self, captured: bool) -> SparseMeans | OnDevice:
        averagers = [member.sparse_mean for member in self.members]
        if captured and not self._saves and supported(averagers, DTYPES[self.config.task.dtype], self.device):
            return OnDevice(averagers, self.device)
        return SparseMeans(averagers)

    @torch.no_grad()
    def _warm_up(self) -> None:
        """Trace and compile before any clock runs. TorchScript optimises until its third call; else one is enough."""
        calls = 3 if self.gradients.enabled else 1
        for units in {self.units % self.microbatch, min(self.microbatch, self.units)} - {0}:  # the short last step too
            inputs = (self.loop.parameters, *self.loop.carry, *self.task.fetch("train", self.owned[..., :units]))
            for _ in range(calls):
                unit_gradients, *_ = self.gradients(*inputs)
        if self.per_unit:
            warm_up_sorters([member.config.sorter for member in self.members], unstacked(unit_gradients, self.replicas))
        elif self.shards:
            warm_up_shards(self.loop.parameters)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dicts(self) -> list[dict]:
        """For every member everything needed to continue from here, alone or with others, on any number of processes.
        Called by all ranks; what belongs to workers is collected on rank 0, whose states are the ones to keep."""
        self._refuse_unsaved()
        common = {"epochs_done": self.epochs_done, "position": self.position, "seconds": self.clock.seconds}
        parts = snapshot.split(self.loop, self.replicas, self.group), self.replay.state_dicts()
        return [
            copied({**common, **steps, "replay": replay})  # a view would be saved with the tensors of all members
            | member.state_dict()
            for member, steps, replay in zip(self.members, *parts, strict=True)
        ]

    def load_state_dicts(self, states: Sequence[dict]) -> None:
        """Continue where the members' states were taken, all at the same step. Called by all ranks. States that do not
        fit are refused before anything changes."""
        self._refuse_unsaved()
        epochs_done, position = snapshot.progress(states[0])
        right = epochs_done <= self.config.epochs and position <= self.units
        if not right or any(snapshot.progress(state) != (epochs_done, position) for state in states):
            raise TypeError("not the state of such a run")
        seconds = states[0]["seconds"]
        if position:
            refuse_others("the clock in the checkpoint", seconds, dict.fromkeys(PHASES, Field((float,), least=0.0)))
        for member, state in zip(self.members, states, strict=True):
            member.check_state_dict(state)
        replayed = self.replay.joined([state["replay"] for state in states])
        self.loop.load(*snapshot.joined(self.loop, states, self.group))
        self.replay.begin(*replayed)
        for member, state in zip(self.members, states, strict=True):
            member.load_state_dict(state)
        self.epochs_done, self.position = epochs_done, position
        if position:
            self.clock = Clock({phase: seconds[phase] for phase in PHASES})

    def _refuse_unsaved(self) -> None:
        if not self._saves:
            raise CdgrabError("these runs were started without checkpoints: they have no state to save or to load")

    def save(self) -> None:
        """Save a checkpoint of every run that has not ended. Called by all ranks; rank 0 writes."""
        if not self._saves:
            return
        for member, state in zip(self.members, self.state_dicts(), strict=True):
            if self.group.rank == 0 and not member.error:
                snapshot.save(member.run, state)

    # -- training -----------------------------------------------------------------------------------------------------

    def fit(self, watch: Watch | None = None, stop: Callable[[], int] = lambda: 0) -> None:
        """Train the remaining epochs; write metrics and a checkpoint after each, and checkpoints in between.

        stop: returns the number of a signal, or 0; asked about twice a second. If any rank has received a signal, all
        of them save and raise `Stopped` after the same step, or amid an evaluation. A run that cannot continue ends
        alone; its error is raised when no other run is left.
        """
        self._agreement = Agreement(stop, self.group)
        with torch.no_grad(), products(self.replicas, self.device, self.config.task.gradients):
            while self.epochs_done < self.config.epochs:
                self._epoch(watch)

    @property
    def part_done(self) -> float:
        """Of all steps."""
        return (self.epochs_done + -(-self.position // self.microbatch) / self.steps) / self.config.epochs

    def _epoch(self, watch: Watch | None) -> None:
        clock = self.clock = Clock(self.clock.seconds if self.position else None)
        if not self.position:
            for member, parameters in self.going():
                member.start_epoch(self.epochs_done, parameters)
            self.replay.start_epoch(self.epochs_done + 1)
        orders = [member.order(self.epochs_done) for member in self.members]
        clock.lap("ordering")
        self.train_epoch(stacked(orders), clock, watch)
        if self.sparse:
            self.loop.averager.collect()
        for member, _ in self.going():
            member.order_ahead(self.epochs_done)
        clock.lap("ordering")
        # a herding bound is not begun anew after every stop: it might never end
        judged = self.replay.is_due or any(member.herding_is_due(self.epochs_done) for member in self.members)
        replayed = self._replayed()
        found = evaluated(self.going(), plainly if judged else self._attempt)
        lines = {member: self._checked(member, its) | replayed.get(member, {}) for member, its in found}
        clock.lap("evaluation")
        self.epochs_done, self.position = self.epochs_done + 1, 0
        for member, metrics in lines.items():
            if not member.error:
                member.record(self.epochs_done, metrics, clock, self.replicas)
        if self.epochs_done % self.config.checkpoint.every_epochs == 0 or self.epochs_done == self.config.epochs:
            self.save()

    def going(self) -> list[tuple[Member, Tensor]]:
        """The members that have not ended, and their parameters."""
        all_members = zip(self.members, unstacked(self.loop.parameters, self.replicas), strict=True)
        return [(member, parameters) for member, parameters in all_members if not member.error]

    def _replayed(self) -> dict[Member, dict]:
        """Figure 9's metric, if it is due: the epoch once more, in the next order."""
        if not self.replay.is_due:
            return {}
        order = stacked([member.next_order(self.epochs_done) for member in self.members])
        visits = self.owned.gather(-1, order.to(self.device))
        bounds = self.replay.bounds([visits[..., start:end].unflatten(-1, (-1, n)) for start, end, n in self.blocks])
        found = zip(self.members, bounds, strict=True)
        return {member: {"herding_replayed": bound} for member, bound in found if math.isfinite(bound)}

    def _checked(self, member: Member, metrics: dict) -> dict:
        if not all(map(math.isfinite, metrics.values())):
            self._end(member, member.diverged(self.epochs_done, "at its end"))
            return {}
        return metrics | member.more_metrics(self.epochs_done)

    def train_epoch(self, order: Tensor, clock: Clock, watch: Watch | None = None) -> None:
        """The remaining steps of an epoch, in which workers visit their units in this order [..., local workers,
        units]. `position` counts the units visited; the caller sets it to zero before the next epoch."""
        visits = self.owned.gather(-1, order.to(self.device))
        every = self.config.checkpoint.every_steps
        for first, end, microbatch in self.blocks:
            if (start := max(first, self.position)) >= end:  # a run that is resumed may have been stopped with others
                continue
            self._stop_if(self._train_block(visits[..., start:end], start, microbatch, clock, watch))
            if every and -(-end // self.microbatch) % every == 0 and end < self.units:
                self.save()
                clock.lap("evaluation")

    def _attempt(self, action: Callable) -> dict:
        """What it returns. A signal ends it at once, and with it the run."""
        found, signal = self._agreement.attempt(action)
        self._stop_if(signal)
        return found

    def _stop_if(self, signal: int) -> None:
        if signal:
            self.save()
            steps = -(-self.position // self.microbatch)
            where = f"after {self.epochs_done} of {self.config.epochs} epochs and {steps} of {self.steps} steps"
            raise Stopped(signal, f"{early.NAMES[signal]} {where}")

    def _train_block(self, visits: Tensor, start: int, microbatch: int, clock: Clock, watch: Watch | None) -> int:
        """Some steps of equal shape; visits [..., local workers, steps × microbatch], the first at position `start`.
        Moves `position` on. Returns the number of the signal that some rank has received, or 0."""
        visits = visits.unflatten(-1, (-1, microbatch))
        seen, losses = self.loop.run(visits, clock, first=start == 0, agreement=self._agreement)
        self.position = start + losses.shape[-1] * microbatch
        signal = self._agreement.own() if self._agreement else 0
        stop_requests = losses.new_full((*losses.shape[:-1], 1), float(signal))  # sent with the losses
        everybodys = self.group.gather(torch.cat([losses, stop_requests], dim=-1))
        mean_losses = everybodys[..., :-1].mean(-2)  # the same on all ranks, so that all of them stop together
        clock.append(("communication", perf_counter()))
        self._refuse_divergence(mean_losses, first_step=start // self.microbatch)
        clock.append(("gradients", perf_counter()))  # by now a GPU has computed the block
        if seen:
            self._observe(seen)
            clock.append(("ordering", perf_counter()))
        if watch:
            lowest, highest = (f"{float(loss):.4f}" for loss in mean_losses.mean(-1).aminmax())
            losses = lowest if lowest == highest else f"{lowest}–{highest}"
            watch(self.part_done, self.epochs_done + 1, losses)
        return int(everybodys[..., -1].max())

    def _observe(self, seen: Sequence[Tensor], unseen: bool = False) -> None:
        """Unit gradients [local workers, units, dim] of the members that look at them, which are the first ones.
        `unseen`: in the middle of a block; at its end they are checked for being finite."""
        for member, its in zip(self.members, seen, strict=False):
            start = member.sorter.position
            try:
                if not member.error:
                    member.sorter.observe(range(start, start + its.shape[1]), its, unseen=unseen)
            except NotFiniteError:
                self._end(member, member.diverged(self.epochs_done, f"after position {start} of {self.units}"))

    def _refuse_divergence(self, losses: Tensor, first_step: int) -> None:
        """losses [..., steps]"""
        if torch.isfinite(losses).all() and torch.isfinite(self.loop.parameters).all():
            return
        vectors = unstacked(self.loop.parameters, self.replicas)
        for member, its, parameters in zip(self.members, unstacked(losses, self.replicas), vectors, strict=True):
            bad = (~torch.isfinite(its)).nonzero()
            if not member.error and (len(bad) or not torch.isfinite(parameters).all()):
                step = first_step + (int(bad[0]) if len(bad) else len(its) - 1) + 1
                self._end(member, member.diverged(self.epochs_done, f"at step {step} of {self.steps}"))

    def _end(self, member: Member, error: DivergedError) -> None:
        """End this run. The others continue, if there are any."""
        member.end(error)
        if all(other.error for other in self.members):
            raise error


def alone(run: Run, task: Task, group: WorkerGroup, device: torch.device) -> Trainer:
    """A trainer of one run."""
    return Trainer([Member(run, task, group, device)])
