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
import sys
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from tqdm import tqdm

from cdgrab import streams
from cdgrab.balance import kernels
from cdgrab.errors import DivergedError, NotFiniteError, Stopped, warn
from cdgrab.runtime.group import WorkerGroup
from cdgrab.sorters import make_sorter
from cdgrab.sparsify import SparseAverager, make_sparsifier, sparsifier_options
from experiments.store import checkpoint
from experiments.tasks.base import DTYPES, Task
from experiments.training import signals, snapshot
from experiments.training.clock import Clock
from experiments.training.compiled import Compiled
from experiments.training.config import Run
from experiments.training.gradients import FlatParameters, gradient_function, summed
from experiments.training.herding_metric import replayed_herding
from experiments.training.optimisers import Optimiser
from experiments.training.runlog import RunLog
from experiments.training.steps import CapturedSteps, Steps

BLOCK_BYTES = {"cpu": 32 * 2**20, "cuda": 128 * 2**20}  # of data and unit gradients held at once
MOST_STEPS_PER_BLOCK = 256


class Trainer:
    """One run on one process, hosting some of the workers."""

    def __init__(self, run: Run, task: Task, group: WorkerGroup, device: torch.device) -> None:
        config = run.config
        self.run, self.config, self.task, self.group, self.device = run, config, task, group, device
        self.microbatch = task.units_per_step
        owned = task.partition(streams.permutation(task.train_units, config.seed, "partition"), config.seed)
        self.units = owned.shape[1]
        self.steps = -(-self.units // self.microbatch)
        self.owned = owned[group.local].to(device)

        flat = FlatParameters(task.model)
        self.flat = flat
        parameters = flat.flatten({name: p.detach() for name, p in task.model.named_parameters()})
        self.sorter = make_sorter(
            workers=config.workers, units=self.units, dim=flat.dim, seed=config.seed, group=group, **config.sorter
        )
        self.sparse_mean = self._sparse_mean()
        # one unit from each process: what they exchange for the mean gradient is then all that the sorter needs
        one_unit_each = group.local_workers == 1 and self.microbatch == 1
        self.shares = one_unit_each and self.sorter.takes_shards and not self.sparse_mean
        self.per_unit = self.sorter.needs_gradients and not self.shares

        def compiled(per_unit: bool) -> Compiled:
            gradients = gradient_function(task, flat, per_unit, config.task.gradients)
            if self.sparse_mean:
                return Compiled(gradients, self._traceable())
            return Compiled(summed(gradients, config.workers if group.world_size == 1 else None), self._traceable())

        self.gradients = compiled(self.per_unit)
        # for the herding metric; traced on first use
        self.unit_gradients = self.gradients if self.per_unit else compiled(True)
        optimiser = Optimiser(config.task, self.steps, config.epochs, parameters, self._compiled())
        self.block_steps = self._block_steps()
        parts = (task, self.gradients, optimiser, group, parameters)
        if self._compiled() and device.type == "cuda" and group.world_size == 1:
            kept = {"kept_steps": max(2, self.block_steps), "observe": self._observe} if self.per_unit else {}
            # data is fetched step by step: a block is what runs between two looks at the losses
            self.block_steps = min(MOST_STEPS_PER_BLOCK, 32 * self.block_steps)
            self.loop = CapturedSteps(*parts, None, self.sparse_mean, block_steps=self.block_steps, **kept)
        else:
            self.loop = Steps(*parts, self.sorter.observe_shard if self.shares else None, self.sparse_mean)
        self.epochs_done, self.position = 0, 0  # units visited of the epoch that is under way
        self.clock, self.first_parameters = Clock(), None
        self.metrics: dict | None = None  # those of the checkpoint from which this goes on
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

    def _traceable(self) -> bool:
        return self._compiled() and self.config.task.gradients == "vmap"

    def _compiled(self) -> bool:
        return self.config.compile == "auto"

    def _sparse_mean(self) -> SparseAverager | None:
        """None: the plain mean, which is what `dense` means."""
        options = dict(self.config.sparsifier)
        if options["name"] == "dense":
            return None
        if "layers" in sparsifier_options(options["name"]) and options["layers"] is None:
            options["layers"] = self.flat.sizes
        return SparseAverager(
            make_sparsifier(workers=self.config.workers, dim=self.flat.dim, group=self.group, **options)
        )

    def _block_steps(self) -> int:
        sample = self.task.fetch("train", self.owned[:1, :1])
        per_unit = sum(x.numel() * x.element_size() for x in sample)
        per_unit += self.flat.dim * DTYPES[self.config.task.dtype].itemsize * self.per_unit
        per_step = per_unit * self.microbatch * self.group.local_workers
        steps = max(1, min(MOST_STEPS_PER_BLOCK, BLOCK_BYTES[self.device.type] // per_step))
        return max(1, steps - steps % 2)  # an even number leaves no unit without its pair

    def _warm_up(self) -> None:
        """Trace and compile before any clock runs. The TorchScript interpreter settles on its third call."""
        carry = self.task.first_carry(self.group.local_workers)
        for units in {self.units % self.microbatch, min(self.microbatch, self.units)} - {0}:  # the short last step too
            inputs = (self.loop.parameters, *carry, *self.task.fetch("train", self.owned[:, :units]))
            with torch.no_grad():
                for _ in range(3):
                    unit_gradients, *_ = self.gradients.for_inputs(*inputs)(*inputs)
        if self.per_unit:
            unit_gradients = torch.cat([unit_gradients, unit_gradients], dim=1)  # at least one pair
            workers, units, dim = unit_gradients.shape
            throwaway = make_sorter(workers=workers, units=units, dim=dim, **self.config.sorter)
            throwaway.order(0)
            throwaway.observe(range(units), unit_gradients)
            throwaway.order(1)  # by now its signs have been decided: kernels are compiled
        elif self.shares:
            rows = torch.zeros(1, 1, 1, dtype=self.loop.parameters.dtype, device=self.device)
            running, limits = (torch.zeros(1, 1, dtype=torch.float64, device=self.device) for _ in range(2))
            kernels.balance_divided(rows, running, limits, lambda products: products)

    # -- state --------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Called by all ranks; rank 0 writes."""
        content = snapshot.taken(self)
        if content is not None:
            checkpoint.save(self.run.directory, content, self.config.checkpoint.keep)

    def load(self, say: Callable[[str], None] = warn) -> None:
        """Go on from the run's checkpoint, if there is one, in the middle of an epoch too. Called by all ranks."""
        first = self.group.rank == 0
        snapshot.restore(self, checkpoint.load(self.run.directory, say if first else lambda _: None, mend=first))

    # -- training -----------------------------------------------------------------------------------------------------

    def fit(self, log: RunLog, quiet: bool = False, stop: Callable[[], int] = lambda: 0) -> None:
        """Train the epochs that are still to do; metrics and a checkpoint after each, and checkpoints on the way.

        stop: asked in every block of steps for the number of a signal. When any rank has one, all of them save and
        raise `Stopped` at the end of the block.
        """
        self._stop = stop
        with _progress_bar(self, quiet) as bar, torch.no_grad():
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
                metrics = self.evaluate() | self._herding(self.first_parameters)
                order_hash = self._order_hash(order)
                sparsifier = {"sparsifier": self.sparse_mean.epoch_means()} if self.sparse_mean else {}
                clock.lap("evaluation")
                self.epochs_done, self.position = self.epochs_done + 1, 0
                phases = {phase: round(seconds, 6) for phase, seconds in clock.seconds.items()}
                training = round(sum(phases.values()) - phases["evaluation"], 6)
                rest = {"seconds": training, "order_hash": order_hash, "phases": phases}
                log.record({"epoch": self.epochs_done, **metrics, **sparsifier, **rest})
                self.save()

    def train_epoch(self, order: Tensor, clock: Clock, bar: tqdm) -> None:
        """All steps of an epoch, or those left of it, in which workers visit their units in this order [local workers,
        units]. `position` is the number of units visited; who starts another epoch sets it to zero."""
        visits = self.owned.gather(1, order.to(self.device))
        if not self.position:
            self.loop.start_epoch()
        for start, end, microbatch in self._blocks():
            signal = self._train_block(visits[:, start:end], start, microbatch, clock, bar)
            self.position = end
            self._save_if_due(signal, clock)

    def _blocks(self) -> list[tuple[int, int, int]]:
        """(first unit, end, units per step) of the steps that run together, as far as they are left.

        Checkpoints are due at their ends only; but a run may go on that was stopped with other blocks.
        """
        full = self.units // self.microbatch * self.microbatch  # units in steps of full size
        cuts = {*range(0, full, self.block_steps * self.microbatch), full, min(self.position, full)}
        if every := self.config.checkpoint.every_steps:
            cuts |= set(range(0, full, every * self.microbatch))
        left = sorted(cut for cut in cuts if cut >= self.position)
        blocks = [(start, end, self.microbatch) for start, end in pairwise(left)]
        return [*blocks, (full, self.units, self.units - full)] if self.position <= full < self.units else blocks

    def _save_if_due(self, signal: int, clock: Clock) -> None:
        every, steps = self.config.checkpoint.every_steps, -(-self.position // self.microbatch)
        if signal or (every and steps % every == 0 and self.position < self.units):
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
            seen, losses = self.loop.run(visits.reshape(workers, -1, microbatch), clock)
        except NotFiniteError:  # what a sparsifier refuses to average
            self._diverged(f"at step {self.sparse_mean.sparsifier.iteration % self.steps + 1} of {self.steps}")
        wishes = losses.new_full((workers, 1), float(self._stop()))  # travel along with the losses
        everybodys = self.group.gather(torch.cat([losses, wishes], dim=1))
        mean_losses = everybodys[:, :-1].mean(0)
        clock.lap("communication")
        self._refuse_divergence(mean_losses, first_step=start // self.microbatch)
        clock.lap("gradients")  # a GPU has computed the block now; until then it was only told to
        if seen.numel():
            self.sorter.observe(range(start, start + units), seen)
            clock.lap("ordering")
        bar.set_postfix(epoch=self.epochs_done + 1, loss=f"{float(mean_losses.mean()):.4f}", refresh=False)
        bar.update(len(mean_losses))
        return int(everybodys[:, -1].max())

    def _observe(self, seen: Tensor) -> None:
        """Unit gradients of the next steps, in the middle of a block, at whose end it turns out if they are finite."""
        start = self.sorter.position
        self.sorter.observe(range(start, start + seen.shape[1]), seen, unseen=True)

    def _refuse_divergence(self, losses: Tensor, first_step: int) -> None:
        """losses [steps], the same on all ranks, so that all of them stop together."""
        if torch.isfinite(losses).all() and torch.isfinite(self.loop.parameters).all():
            return
        bad = (~torch.isfinite(losses)).nonzero()
        step = first_step + (int(bad[0]) if len(bad) else len(losses) - 1) + 1
        self._diverged(f"at step {step} of {self.steps}")

    def _diverged(self, where: str) -> None:
        done, kept = self.epochs_done, "no epoch was finished"
        if done:
            kept = f"the checkpoint of epoch {done} and the metrics so far are kept in {self.run.directory}"
        raise DivergedError(
            f"training diverged in epoch {done + 1} {where}: the loss is no longer finite with "
            f"task.lr={self.config.task.lr:g}; {kept}"
        )

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Full train loss over all workers' units, and test metrics. Worker by worker, summed in worker order; on one
        GPU all at once, which is faster and equal up to rounding."""
        parameters = self.flat.unflatten(self.loop.parameters)
        owned, tested = self.owned, torch.arange(self.task.test_units, device=self.device)
        if self.device.type == "cuda" and self.group.world_size == 1:
            shares = {"train": [owned.flatten()], "test": [tested]}
        else:
            shares = {"train": list(owned), "test": list(tested.tensor_split(self.config.workers)[self.group.local])}
        train, test = (self._totals(split, parameters, shares[split]) for split in ("train", "test"))
        metrics = self.task.metrics(train, test)
        if not all(map(math.isfinite, metrics.values())):
            self._diverged("at its end")
        return metrics

    def _totals(self, split: str, parameters: dict[str, Tensor], shares: list[Tensor]) -> dict[str, float]:
        shards = [self.task.totals(split, parameters, share) for share in shares]
        names = sorted(shards[0])
        local = torch.stack([torch.stack([shard[name].double().to(self.device) for name in names]) for shard in shards])
        return dict(zip(names, self.group.gather(local).sum(0).tolist(), strict=True))

    def _herding(self, parameters: Tensor) -> dict[str, float]:
        """How well the next order balances the unit gradients at the epoch's first parameters (paper: Figure 9)."""
        if not self._herding_is_due():
            return {}
        return replayed_herding(
            *(self.task, lambda *inputs: self.unit_gradients.for_inputs(*inputs)(*inputs), parameters),
            *(self.owned, self.sorter.order(self.epochs_done + 1), self.group, self._herding_positions()),
        )

    def _herding_is_due(self) -> bool:
        every = self.config.task.get("herding_every", 0)
        return bool(every) and (self.epochs_done + 1) % every == 0

    def _herding_positions(self) -> int:
        """Positions whose unit gradients are held at once, in float64."""
        return max(1, BLOCK_BYTES[self.device.type] // (8 * self.config.workers * self.flat.dim))

    def _order_hash(self, order: Tensor) -> str:
        return hashlib.sha256(self.group.gather(order).numpy().astype("<i8").tobytes()).hexdigest()


def _progress_bar(trainer: Trainer, quiet: bool) -> tqdm:
    config = trainer.config
    return tqdm(
        total=config.epochs * trainer.steps,
        initial=trainer.epochs_done * trainer.steps + trainer.position // trainer.microbatch,
        desc=f"{config.task.name} {config.sorter.name} seed {config.seed}",
        unit="step",
        disable=quiet or trainer.group.rank > 0 or not sys.stderr.isatty(),
        dynamic_ncols=True,
    )
