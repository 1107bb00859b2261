"""The training loop: one for all tasks, sorters, worker counts and process counts.

    orders ──▶ batches ──▶ unit gradients ──▶ (sparsified) mean over workers ──▶ optimiser ──▶ parameters
       ▲                        │
       └──────── sorter ◀───────┘

An epoch runs in blocks of steps. A block's data is fetched at once and its unit gradients are handed to the sorter at
once: orders are needed at the end of the epoch only, and per-step Python is what small models spend their time on.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import NoReturn

import torch
from torch import Tensor
from tqdm import tqdm

from cdgrab import streams
from cdgrab.errors import DivergedError, NotFiniteError, Stopped, warn
from cdgrab.runtime.group import WorkerGroup
from cdgrab.runtime.mean import Averager
from cdgrab.runtime.state import collected
from cdgrab.sorters import make_sorter
from experiments.tasks.base import DTYPES, Task
from experiments.training import signals, snapshot
from experiments.training.clock import Clock
from experiments.training.compiled import Compiled
from experiments.training.config import Run
from experiments.training.evaluation import evaluate, replayed_herding
from experiments.training.gradients import FlatParameters, gradient_function, summed
from experiments.training.optimisers import Optimiser
from experiments.training.parts import (
    BLOCK_BYTES,
    MOST_STEPS_PER_BLOCK,
    make_sparse_mean,
    progress_bar,
    steps_per_block,
    warm_up_shards,
    warm_up_sorter,
)
from experiments.training.runlog import RunLog
from experiments.training.steps import CapturedSteps, Steps


class Trainer:
    """One run on one process, hosting some of the workers."""

    def __init__(self, run: Run, task: Task, group: WorkerGroup, device: torch.device) -> None:
        config = run.config
        self.run, self.config, self.task, self.group, self.device = run, config, task, group, device
        owned = task.partition(streams.permutation(task.train_units, config.seed, "partition"), config.seed)
        self.owned = owned[group.local].to(device)  # [local workers, units]
        self.units, self.microbatch = owned.shape[1], task.units_per_step
        self.steps = -(-self.units // self.microbatch)
        self.flat = FlatParameters(task.model)
        self.sorter = make_sorter(
            workers=config.workers, units=self.units, dim=self.flat.dim, seed=config.seed, group=group, **config.sorter
        )
        self.sparse_mean = make_sparse_mean(config, self.flat, group)
        self.shards = self.sorter.by_shards(self.microbatch, self.sparse_mean is not None)
        self.per_unit = self.sorter.needs_gradients and not self.shards
        self.gradients = self._gradients(self.per_unit)
        # for the herding bound; traced on first use
        self.unit_gradients = self.gradients if self.per_unit else self._gradients(True)
        unit_bytes = sum(tensor.nbytes for tensor in task.fetch("train", self.owned[:1, :1]))
        unit_bytes += self.flat.dim * DTYPES[config.task.dtype].itemsize * self.per_unit
        self.block_steps = steps_per_block(unit_bytes, self.microbatch * group.local_workers, device)
        self.loop = self._steps()
        self.epochs_done, self.position = 0, 0  # units visited of the epoch that is under way
        self.clock, self.first_parameters = Clock(), None
        self.metrics: dict | None = None  # as measured when the checkpoint was made from which this goes on
        self._stop: Callable[[], int] = lambda: 0
        self._warm_up()

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "workers": self.config.workers,
            "units": self.units,
            "microbatch": self.microbatch,
            "steps_per_epoch": self.steps,
            "parameters": self.flat.dim,
        }

    def _gradients(self, per_unit: bool) -> Compiled:
        """With the workers summed, to their mean where this is the only process; a sparsifier wants each worker's."""
        function = gradient_function(self.task, self.flat, per_unit, self.config.task.gradients)
        if not self.sparse_mean:
            function = summed(function, self.config.workers if self.group.world_size == 1 else None)
        return Compiled(function, self.config.compile == "auto" and self.config.task.gradients == "vmap")

    def _steps(self) -> Steps:
        group, config, compiled = self.group, self.config, self.config.compile == "auto"
        parameters = self.flat.flatten({name: p.detach() for name, p in self.task.model.named_parameters()})
        optimiser = Optimiser(config.task, self.steps, config.epochs, parameters, compiled)
        plain = Averager(group, self.flat.dim) if group.world_size > 1 else None
        parts = (self.task, self.gradients, optimiser, parameters, group.local_workers, self.sparse_mean or plain)
        if not (compiled and self.device.type == "cuda" and group.world_size == 1):
            return Steps(*parts, self.sorter.observe_shard if self.shards else None)
        kept = {"kept_steps": max(2, self.block_steps), "observe": self._observe} if self.per_unit else {}
        # data is fetched step by step: a block is what runs between two looks at the losses
        self.block_steps = min(MOST_STEPS_PER_BLOCK, 32 * self.block_steps)
        return CapturedSteps(*parts, block_steps=self.block_steps, **kept)

    def _warm_up(self) -> None:
        """Trace and compile before any clock runs. The TorchScript interpreter settles on its third call."""
        for units in {self.units % self.microbatch, min(self.microbatch, self.units)} - {0}:  # the short last step too
            inputs = (self.loop.parameters, *self.loop.carry, *self.task.fetch("train", self.owned[:, :units]))
            with torch.no_grad():
                for _ in range(3):
                    unit_gradients, *_ = self.gradients(*inputs)
        if self.per_unit:
            warm_up_sorter(self.config.sorter, unit_gradients)
        elif self.shards:
            warm_up_shards(self.loop.parameters)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """Everything needed to go on from here on any number of processes. Called by all ranks; what belongs to
        workers comes together on rank 0, whose state is the one to keep."""
        return {
            "epochs_done": self.epochs_done,
            "position": self.position,
            "parameters": self.loop.parameters,
            "optimiser": list(self.loop.optimiser.state),
            "carry": [self.group.collect(state) for state in self.loop.carry],
            "first_parameters": self.first_parameters if self.position else None,
            "seconds": self.clock.seconds,
            "sparsified": self.sparse_mean.running_sums() if self.sparse_mean else None,
            **{name: collected(part.state_dict(), self.group) for name, part in self._parts().items()},
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on where rank 0's `state_dict` was taken. Called by all ranks. What does not fit is refused."""
        loop, position = self.loop, state["position"]
        carry = [part[self.group.local] for part in state["carry"]] if position else list(loop.first_carry)
        right = snapshot.is_count(state["epochs_done"], self.config.epochs) and snapshot.is_count(position, self.units)
        right = right and snapshot.alike(
            [state["parameters"], *state["optimiser"], *carry],
            [loop.parameters, *loop.optimiser.state, *loop.first_carry],
        )
        if not right:
            raise TypeError("not the state of such a run")
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        parameters, *rest = (tensor.to(self.device) for tensor in (state["parameters"], *state["optimiser"], *carry))
        loop.load(parameters, rest[: len(state["optimiser"])], rest[len(state["optimiser"]) :])
        self.epochs_done, self.position = state["epochs_done"], position
        if position:
            self.clock, first = Clock(state["seconds"]), state["first_parameters"]
            self.first_parameters = None if first is None else first.to(self.device)
            if self.sparse_mean:
                self.sparse_mean.load_running_sums(state["sparsified"])

    def _parts(self) -> dict:
        """What has a state of its own, by its name in the checkpoint."""
        return {"sorter": self.sorter} | ({"sparsifier": self.sparse_mean.sparsifier} if self.sparse_mean else {})

    def save(self) -> None:
        """A checkpoint of the run. Called by all ranks; rank 0 writes."""
        state = self.state_dict()
        if self.group.rank == 0:
            snapshot.save(self.run, state)

    def load(self, say: Callable[[str], None] = warn) -> None:
        """Go on from the run's checkpoint, if there is one, in the middle of an epoch too. Called by all ranks."""
        self.metrics = snapshot.load(self.run, self.group, self.load_state_dict, say)

    # -- training -----------------------------------------------------------------------------------------------------

    def fit(self, log: RunLog, quiet: bool = False, stop: Callable[[], int] = lambda: 0) -> None:
        """Train the epochs that are still to do; metrics and a checkpoint after each, and checkpoints on the way.

        stop: asked in every block of steps for the number of a signal. When any rank has one, all of them save and
        raise `Stopped` at the end of the block.
        """
        self._stop = stop
        visible = not quiet and self.group.rank == 0
        with progress_bar(self.config, self.steps, self._steps_done(), visible) as bar, torch.no_grad():
            while self.epochs_done < self.config.epochs:
                clock = self.clock = Clock(self.clock.seconds if self.position else None)
                if not self.position:
                    self.first_parameters = self.loop.parameters.clone() if self._herding_is_due() else None
                order = self.sorter.order(self.epochs_done)
                clock.lap("ordering")
                self.train_epoch(order, clock, bar)
                if self._herding_is_due():
                    self.sorter.order(self.epochs_done + 1)  # ready before it is looked at, which is not training
                    clock.lap("ordering")
                metrics = self.evaluate() | self._herding() | self._order_hash(order)
                if self.sparse_mean:
                    metrics["sparsifier"] = self.sparse_mean.epoch_means()
                clock.lap("evaluation")
                self.epochs_done, self.position = self.epochs_done + 1, 0
                log.record(_line(self.epochs_done, metrics, clock))
                self.save()

    def _steps_done(self) -> int:
        return self.epochs_done * self.steps + self.position // self.microbatch

    def train_epoch(self, order: Tensor, clock: Clock, bar: tqdm) -> None:
        """All steps of an epoch, or those left of it, in which workers visit their units in this order [local workers,
        units]. `position` is the number of units visited; who starts another epoch sets it to zero."""
        visits = self.owned.gather(1, order.to(self.device))
        every = self.config.checkpoint.every_steps
        for start, end, microbatch in _blocks(self.position, self.units, self.microbatch, self.block_steps, every):
            signal = self._train_block(visits[:, start:end], start, microbatch, clock, bar)
            self.position, steps = end, -(-end // self.microbatch)
            if signal or (every and steps % every == 0 and end < self.units):
                self.save()
                clock.lap("evaluation")
            if signal:
                where = f"after {self.epochs_done} of {self.config.epochs} epochs and {steps} of {self.steps} steps"
                raise Stopped(signal, f"{signals.NAMES[signal]} {where}")

    def _train_block(self, visits: Tensor, start: int, microbatch: int, clock: Clock, bar: tqdm) -> int:
        """Some steps of equal shape; visits [local workers, steps × microbatch], the first at position `start`.
        Returns the number of the signal that any rank has got, or 0."""
        workers, units = visits.shape
        try:
            seen, losses = self.loop.run(visits.reshape(workers, -1, microbatch), clock, first=start == 0)
        except NotFiniteError:  # what a sparsifier refuses to average
            self._diverged(f"at step {self.sparse_mean.sparsifier.iteration % self.steps + 1} of {self.steps}")
        wishes = losses.new_full((workers, 1), float(self._stop()))  # travel along with the losses
        everybodys = self.group.gather(torch.cat([losses, wishes], dim=1))
        mean_losses = everybodys[:, :-1].mean(0)
        clock.append(("communication", perf_counter()))
        self._refuse_divergence(mean_losses, first_step=start // self.microbatch)
        clock.append(("gradients", perf_counter()))  # a GPU has computed the block now; until then it was only told to
        if seen.numel():
            self.sorter.observe(range(start, start + units), seen)
            clock.append(("ordering", perf_counter()))
        bar.set_postfix(epoch=self.epochs_done + 1, loss=f"{float(mean_losses.mean()):.4f}", refresh=False)
        bar.update(len(mean_losses))
        return int(everybodys[:, -1].max())

    def _observe(self, seen: Tensor) -> None:
        """Unit gradients of the next steps, in the middle of a block: whether they are finite is found at its end."""
        start = self.sorter.position
        self.sorter.observe(range(start, start + seen.shape[1]), seen, unseen=True)

    def _refuse_divergence(self, losses: Tensor, first_step: int) -> None:
        """losses [steps], the same on all ranks, so that all of them stop together."""
        if torch.isfinite(losses).all() and torch.isfinite(self.loop.parameters).all():
            return
        bad = (~torch.isfinite(losses)).nonzero()
        step = first_step + (int(bad[0]) if len(bad) else len(losses) - 1) + 1
        self._diverged(f"at step {step} of {self.steps}")

    def _diverged(self, where: str) -> NoReturn:
        done, kept = self.epochs_done, "no epoch was finished"
        if done:
            kept = f"the checkpoint of epoch {done} and the metrics so far are kept in {self.run.directory}"
        raise DivergedError(
            f"training diverged in epoch {done + 1} {where}: the loss is no longer finite with "
            f"task.lr={self.config.task.lr:g}; {kept}"
        )

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Full train loss over all workers' units, and test metrics."""
        metrics = evaluate(self.task, self.flat.unflatten(self.loop.parameters), self.owned, self.group)
        if not all(map(math.isfinite, metrics.values())):
            self._diverged("at its end")
        return metrics

    def _herding_is_due(self) -> bool:
        every = self.config.task.herding_every
        return bool(every) and (self.epochs_done + 1) % every == 0

    def _herding(self) -> dict[str, float]:
        """How well the next order balances the unit gradients at the epoch's first parameters (paper: Figure 9)."""
        if not self._herding_is_due():
            return {}
        visits = self.owned.gather(1, self.sorter.order(self.epochs_done + 1).to(self.device))
        at_once = max(1, BLOCK_BYTES[self.device.type] // (8 * self.config.workers * self.flat.dim))  # in float64
        return replayed_herding(self.task, self.unit_gradients, self.first_parameters, visits, self.group, at_once)

    def _order_hash(self, order: Tensor) -> dict[str, str]:
        return {"order_hash": hashlib.sha256(self.group.gather(order).numpy().astype("<i8").tobytes()).hexdigest()}


def _blocks(
    position: int, units: int, microbatch: int, block_steps: int, every_steps: int | None
) -> list[tuple[int, int, int]]:
    """(first unit, end, units per step) of the steps that run together, from `position` on.

    Checkpoints are due at their ends only; but a run may go on that was stopped with other blocks.
    """
    full = units // microbatch * microbatch  # units in steps of full size
    cuts = {*range(0, full, block_steps * microbatch), full, min(position, full)}
    if every_steps:
        cuts |= set(range(0, full, every_steps * microbatch))
    left = sorted(cut for cut in cuts if cut >= position)
    blocks = [(start, end, microbatch) for start, end in pairwise(left)]
    return [*blocks, (full, units, units - full)] if position <= full < units else blocks


def _line(epoch: int, metrics: dict, clock: Clock) -> dict:
    """One line of metrics.jsonl; `seconds` are those of training."""
    phases = {phase: round(seconds, 6) for phase, seconds in clock.seconds.items()}
    rest = {"seconds": round(sum(phases.values()) - phases["evaluation"], 6), "order_hash": metrics.pop("order_hash")}
    return {"epoch": epoch, **metrics, **rest, "phases": phases}
