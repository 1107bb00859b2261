"""Figure 9's herding bound as it was published: along a replay of the epoch, in the next order.

Equation 8 is about fixed vectors. The published code goes back to the parameters and the optimiser's state of the
epoch's start and visits the units in the next order, with the optimiser's steps on the way. The bound is the largest
absolute entry of any partial sum of unit gradients less the mean gradient of the epoch that was trained. The published
code looks at the partial sum after every unit; here it is after every step.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cdgrab.runtime.state import copied
from experiments.training.clock import Clock
from experiments.training.snapshot import alike
from experiments.training.steps import PartialSums, Steps, stacked, unstacked


class Replay:
    """Of an epoch, for all runs that train together. Training continues as if there had been none."""

    def __init__(self, loop: Steps, workers: int, replicas: int, epochs: Sequence[int]) -> None:
        """epochs: after which the bound is measured; the first is 1."""
        self._loop, self._workers, self._replicas, self._epochs = loop, workers, replicas, epochs
        self._start: list[Tensor] = []  # parameters and optimiser state at the epoch's start; empty: no replay is due
        self._sums = PartialSums(loop.parameters) if epochs else None

    @property
    def is_due(self) -> bool:
        """After the current epoch."""
        return bool(self._start)

    def start_epoch(self, epoch: int) -> None:
        due = epoch in self._epochs
        self.begin(copied([self._loop.parameters, *self._loop.optimiser.state]) if due else [])

    def begin(self, start: list[Tensor], total: Tensor | float = 0.0) -> None:
        """Of an epoch, or the rest of one. Steps add up their gradients only if a replay is due.

        start: parameters and optimiser state at the epoch's start; total: the sum of its gradients so far.
        """
        self._start, self._loop.sums = start, self._sums if start else None
        if start:
            self._sums.restart(total)

    def bounds(self, blocks: Sequence[Tensor]) -> list[float]:
        """The bound of each run. blocks: the visits of the whole next order, as for `Steps.run`."""
        loop, sums, (parameters, *optimiser) = self._loop, self._sums, self._start
        before = copied((loop.parameters, loop.optimiser.state, list(loop.carry)))
        sums.restart(centre=sums.total / sum(visits.shape[-2:].numel() for visits in blocks))
        loop.load(parameters, optimiser)
        for number, visits in enumerate(blocks):
            loop.run(visits, Clock(), first=number == 0, observed=False)
        loop.load(*before)
        self._start = []  # not to be saved at the epoch's end
        return (self._workers * sums.largest).view(-1).tolist()  # over workers we add up, the steps have their means

    def state_dicts(self) -> list[dict | None]:
        """Of every run, in the middle of an epoch: its start and the sum of its gradients so far."""
        if not self.is_due:
            return [None] * self._replicas
        loop, (parameters, *optimiser) = self._loop, self._start
        parameters, totals = (unstacked(tensor, self._replicas) for tensor in (parameters, self._sums.total))
        states = zip(parameters, loop.optimiser.split(optimiser), totals, strict=True)
        return [dict(zip(("parameters", "optimiser", "total"), state, strict=True)) for state in states]

    def joined(self, states: Sequence[dict | None]) -> tuple[list[Tensor], Tensor | float]:
        """From the states of the runs: what `begin` takes to continue there."""
        if states[0] is None:
            return [], 0.0
        if not all(isinstance(state, dict) for state in states):  # a tensor would take a name for an index
            raise TypeError("not the state of such a run")
        device = self._loop.parameters.device
        optimiser = self._loop.optimiser.join([state["optimiser"] for state in states])
        start = [stacked([state["parameters"] for state in states]), *optimiser]
        total = stacked([state["total"] for state in states])
        if not alike([*start, total], [self._loop.parameters, *self._loop.optimiser.state, self._sums.total]):
            raise TypeError("not the state of such a run")
        return [tensor.to(device) for tensor in start], total.to(device)
