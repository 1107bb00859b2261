"""One of the runs that train together: its data, its order, its state, and its metrics."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from cdgrab import streams
from cdgrab.errors import DivergedError
from cdgrab.runtime.fields import Field
from cdgrab.runtime.group import WorkerGroup
from cdgrab.runtime.state import collected
from cdgrab.sorters import make_sorter
from experiments.tasks.base import Task
from experiments.training.clock import Clock
from experiments.training.compiled import Compiled
from experiments.training.config import Run
from experiments.training.evaluation import Attempt, evaluate, evaluate_together, fixed_herding, plainly
from experiments.training.gradients import FlatParameters, gradient_function
from experiments.training.parts import JUDGED_BYTES, make_sparse_mean
from experiments.training.runlog import RunLog


class Member:
    """What belongs to one run alone. Parameters, optimiser and steps belong to the trainer."""

    def __init__(self, run: Run, task: Task, group: WorkerGroup, device: torch.device) -> None:
        config = run.config
        self.run, self.config, self.task, self.group, self.device = run, config, task, group, device
        owned = task.partition(streams.permutation(task.train_units, config.seed, "partition"), config.seed)
        self.owned = owned[group.local].to(device)  # [local workers, units]
        self.flat = FlatParameters(task.model)
        self.units = owned.shape[1]
        self.sorter = make_sorter(
            workers=config.workers, units=self.units, dim=self.flat.dim, seed=config.seed, group=group, **config.sorter
        )
        self.sparse_mean = make_sparse_mean(config, self.flat, group)
        self.log: RunLog | None = None
        self.current: Tensor | None = None  # its order in this epoch
        self.first_parameters: Tensor | None = None  # at the start of the epoch, if the herding bound is due
        self.error: DivergedError | None = None  # why it ended early
        how = config.task.gradients  # for the herding bound; runs that train together share it, and what it has traced
        unit_gradients = gradient_function(task, self.flat, True, how)
        self.unit_gradients = Compiled(unit_gradients, config.compile == "auto" and how == "vmap")

    @property
    def sizes(self) -> dict[str, int]:
        """For the manifest."""
        return {
            "workers": self.config.workers,
            "units": self.units,
            "microbatch": self.task.units_per_step,
            "steps_per_epoch": -(-self.units // self.task.units_per_step),
            "parameters": self.flat.dim,
        }

    def initial_parameters(self) -> Tensor:
        """The model's initial parameters [dim]."""
        return self.flat.flatten({name: p.detach() for name, p in self.task.model.named_parameters()})

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """Its own part of a checkpoint. Called by all ranks; what belongs to workers is collected on rank 0."""
        return {
            "first_parameters": self.first_parameters,  # of the current epoch
            "sparsified": self.sparse_mean.running_sums() if self.sparse_mean else None,
            **{name: collected(part.state_dict(), self.group) for name, part in self._parts().items()},
        }

    def check_state_dict(self, state: dict) -> None:
        """Refuse what `load_state_dict` cannot continue from; changes nothing."""
        for name, part in self._parts().items():
            part.check_state_dict(state[name])
        first, epochs_done, position = state["first_parameters"], state["epochs_done"], state["position"]
        sorted_until = state["sorter"]["epoch"], state["sorter"]["position"]
        last = epochs_done - 1, self.units if epochs_done else 0
        moment = sorted_until == (epochs_done, position) or (not position and sorted_until == last)
        vector = Field((torch.float32, torch.float64), (self.flat.dim,))
        if (self.sorter.needs_gradients and not moment) or not (first is None or vector.fits(first)):
            raise TypeError("not the state of such a run")
        if position and self.sparse_mean:
            self.sparse_mean.check_running_sums(state["sparsified"])

    def load_state_dict(self, state: dict) -> None:
        """Continue where a state was taken that `check_state_dict` has accepted."""
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        first = state["first_parameters"]
        self.first_parameters = None if first is None else first.to(self.device)
        if state["position"] and self.sparse_mean:
            self.sparse_mean.load_running_sums(state["sparsified"])

    def _parts(self) -> dict:
        """The parts that have a state of their own, by their names in the checkpoint."""
        return {"sorter": self.sorter} | ({"sparsifier": self.sparse_mean.sparsifier} if self.sparse_mean else {})

    # -- training -----------------------------------------------------------------------------------------------------

    def start_epoch(self, epochs_done: int, parameters: Tensor) -> None:
        self.first_parameters = parameters.clone() if self.herding_is_due(epochs_done) else None

    def order(self, epoch: int) -> Tensor:
        """The order [local workers, units]; the last one if the run has ended."""
        self.current = self.current if self.error else self.sorter.order(epoch)
        return self.current

    def next_order(self, epochs_done: int) -> Tensor:
        """The order of the epoch after this one; the last one if the run has ended."""
        return self.current if self.error else self.sorter.order(epochs_done + 1)

    def order_ahead(self, epochs_done: int) -> None:
        """Compute the next order now if its herding bound is due, so that it counts as training, not as evaluation."""
        if self.herding_is_due(epochs_done) or epochs_done + 1 in self.config.task.herding_replays:
            self.next_order(epochs_done)

    def end(self, error: DivergedError) -> None:
        """End this run and log why; the others continue."""
        self.error = error
        if self.log:
            self.log.finish("diverged", str(error))

    def diverged(self, epochs_done: int, where: str) -> DivergedError:
        kept = "no epoch was finished"
        if epochs_done:
            kept = f"the metrics so far and the last checkpoint, if there is one, are kept in {self.run.directory}"
        return DivergedError(
            f"training diverged in epoch {epochs_done + 1} {where}: the loss is no longer finite with "
            f"task.lr={self.config.task.lr:g}; {kept}"
        )

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(self, parameters: Tensor, at_once: bool, attempt: Attempt) -> dict[str, float]:
        """Full train loss over all workers' units, and test metrics."""
        return evaluate(self.task, self.flat.unflatten(parameters), self.owned, self.group, at_once, attempt)

    def herding_is_due(self, epochs_done: int) -> bool:
        every = self.config.task.herding_every
        return bool(every) and (epochs_done + 1) % every == 0

    def herding(self, epochs_done: int) -> dict[str, float]:
        """How well the next order balances the unit gradients at the epoch's initial parameters (equation 8)."""
        if not self.herding_is_due(epochs_done):
            return {}
        visits = self.owned.gather(1, self.next_order(epochs_done).to(self.device))
        at_once = max(1, JUDGED_BYTES[self.device.type] // (8 * self.config.workers * self.flat.dim))  # in float64
        first, self.first_parameters = self.first_parameters, None  # not to be saved at the epoch's end
        return fixed_herding(self.task, self.unit_gradients, first, visits, self.group, at_once)

    def more_metrics(self, epochs_done: int) -> dict:
        """Metrics besides the task's: of its orders and of its sparsifier."""
        everybodys = self.group.gather(self.current).numpy().astype("<i8").tobytes()
        metrics = self.herding(epochs_done) | {"order_hash": hashlib.sha256(everybodys).hexdigest()}
        return metrics | ({"sparsifier": self.sparse_mean.epoch_means()} if self.sparse_mean else {})

    def record(self, epoch: int, metrics: dict, clock: Clock, replicas: int) -> None:
        """Write the metrics of a finished epoch; `seconds`: the training time of all `replicas` together."""
        phases = {phase: round(seconds, 6) for phase, seconds in clock.seconds.items()}
        seconds = round(sum(phases.values()) - phases["evaluation"], 6)
        rest = {"seconds": seconds, "order_hash": metrics.pop("order_hash"), "phases": phases}
        self.log.record({"epoch": epoch, **metrics, **rest} | ({"replicas": replicas} if replicas > 1 else {}))


def evaluated(
    members: Sequence[tuple[Member, Tensor]], attempt: Attempt = plainly
) -> list[tuple[Member, dict[str, float]]]:
    """Members and their metrics, from members and their parameters; on a GPU all at once if they share their data.
    attempt: calls what takes long, and may raise."""
    (first, *others), vectors = zip(*members, strict=True)
    on_gpu = first.device.type == "cuda"
    together = others and on_gpu and first.task.evaluated_together
    if not together or any(member.task.data is not first.task.data for member in others):
        # alone on a CPU, sums must not depend on the number of processes
        at_once = first.group.world_size == 1 and (on_gpu or bool(others))
        return [(member, member.evaluate(parameters, at_once, attempt)) for member, parameters in members]
    owned = torch.stack([member.owned for member, _ in members])
    found = attempt(partial(evaluate_together, first.task, first.flat.unflatten(torch.stack(vectors)), owned))
    return list(zip((first, *others), found, strict=True))
