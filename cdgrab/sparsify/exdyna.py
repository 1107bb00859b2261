"""ExDyna (arXiv 2402.13781) and MiCRO: every worker selects in a partition of its own, by one threshold for all.

A worker reads 1/workers of the vector only, workers never select the same coordinate, and the sizes of the partitions
follow the loads. Partitions go round: worker w has partition (t + w) mod workers in iteration t.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from cdgrab.checks import count, one_of
from cdgrab.sparsify import threshold as thresholds
from cdgrab.sparsify.base import Sparsifier
from cdgrab.sparsify.partitions import RULES, balanced, block_edges, equal_runs, partition_edges, rebalance
from cdgrab.sparsify.threshold import SMALLEST, largest, reaching

THRESHOLDS = ("counted", "proportional", "paper", "fixed")
COUNTED = 4096  # passing coordinates that are counted, about; of more, a sample does as well
COUNT_AGAIN = 2.0  # a density off by this factor is corrected at once instead of step by step
COUNT_APART = 8  # iterations between two such corrections
MOST = 1.1  # times its fair share that a worker may send: with few coordinates each, chance alone gives more to some
AIM_GAIN, MOST_AIM = 0.5, 2.0  # with which all make up for workers that hold back
KEPT_LOAD = 0.8  # of the running mean of the blocks' loads, from one iteration to the next


def shuffled(indices: Tensor, seed: int) -> Tensor:
    """In an order that any process would give them. Of equal magnitudes the first ones would be taken, all from one end
    of the partition: it would soon have none left there, while the loads let it shrink to just that end."""
    order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(seed))
    return indices[order.to(indices.device)]


class ExDyna(Sparsifier):
    """Options beyond those of every sparsifier:

    threshold: how it follows the gradients.
      counted: before selecting, all count what would pass at some values near the last threshold, and take the value
        that lets the wanted number pass. Costs a sum of a few hundred bytes over the workers, and cannot oscillate.
        Equal magnitudes pass together; only `rule: balanced` then holds the density.
      proportional: multiplied by (selected / wanted) ** 0.1 afterwards; counted at the start and when far off.
        Residuals that reach the threshold together make it oscillate at low densities.
      paper: starts from 1 / (2 √k) and is multiplied by 1.005 or 0.995. fixed: stays there.
    rule: how partitions follow the loads.
      balanced: cut where the blocks' recent loads say, and no worker sends more than 1.1 times its fair share.
      paper, relative: neighbours exchange single blocks. static: never.
    blocks: what partitions are made of.
    """

    label = "ExDyna"
    options = (*Sparsifier.options, "rule", "threshold", "blocks")
    exclusive = True
    saved = ("_residual", "_value", "_runs", "_loads", "_aim", "_counted_at", "_off")

    def __init__(self, *, rule: str = "balanced", threshold: str = "counted", blocks: int = 1024, **settings) -> None:
        super().__init__(**settings)
        one_of("rule", rule, RULES)
        one_of("threshold", threshold, THRESHOLDS)
        self.rule, self.threshold = rule, threshold
        self.blocks = min(max(count("blocks", blocks, 1), self.workers), self.dim)
        self._edges = block_edges(self.dim, self.blocks)
        self._runs = equal_runs(self.blocks, self.workers)  # blocks of each partition
        self._loads: list[float] = []  # running mean of what is selected in each block
        fair = self.target / self.workers
        self._most = max(math.ceil(fair), round(MOST * fair)) if rule == "balanced" else 0  # 0: no limit
        self._aim = 1.0  # times the target that has to reach the threshold so that the target is sent
        self._value = thresholds.first_guess(self.target)
        self._counted_at = -1  # never
        self._off = False  # the density, so much that counting is due

    def partitions(self) -> list[int]:
        """Where they begin and end in the next iteration, [workers + 1]."""
        return partition_edges(self._edges, self._runs)

    def _own(self, accumulated: Tensor) -> Iterator[tuple[Tensor, int, int]]:
        """Each local worker's row, and where its partition begins and ends now."""
        edges = self.partitions()
        for worker, row in zip(self.worker_ids(), accumulated, strict=True):
            partition = (self.iteration + worker) % self.workers
            yield row, edges[partition], edges[partition + 1]

    def select(self, accumulated: Tensor) -> list[Tensor]:
        found = []
        for row, start, end in self._own(accumulated):
            indices = start + reaching(row[start:end], self._value)
            if self._most and len(indices) > self._most:  # the others wait for a later turn
                indices = shuffled(indices, self.iteration)
                indices = indices[largest(row[indices], self._most)]
            if not len(indices) and end > start:
                indices = torch.tensor([start + self.iteration % (end - start)], device=row.device)
            found.append(indices)
        return found

    # -- threshold ----------------------------------------------------------------------------------------------------

    def prepare(self, accumulated: Tensor) -> int:
        sent = 0
        if self._counts_now():
            self._value, sent = self._counted(accumulated)
            self._counted_at = self.iteration
        return sent

    def _counts_now(self) -> bool:
        if self.threshold == "proportional":
            corrected = self._off and self.iteration - self._counted_at >= COUNT_APART
            return self._counted_at < 0 or corrected
        return self.threshold == "counted"

    def _counted(self, accumulated: Tensor) -> tuple[float, int]:
        """The threshold that the wanted number of coordinates reaches now, and the bytes sent to find it."""
        every = max(1, self.target // COUNTED) | 1  # odd, so that it does not keep time with the rows of a matrix
        own = [row[start:end][self.iteration % every :: every] for row, start, end in self._own(accumulated)]
        sent = 0

        def counts(values: list[float]) -> list[int]:
            nonlocal sent
            sent += self.summed_bytes(self._index_type.itemsize * len(values))
            return self.group.all_reduce(thresholds.count_reaching(own, values).to(self._index_type)).tolist()

        last = None if self._counted_at < 0 else self._value
        return thresholds.counted_threshold(counts, self._aim * self.target / every, last), sent

    def _threshold(self) -> float:
        return self._value

    # -- adaptation ---------------------------------------------------------------------------------------------------

    def learn(self, counts: list[int]) -> None:
        ratio = sum(counts) / self.target
        self._off = max(ratio, 1 / max(ratio, SMALLEST)) > COUNT_AGAIN
        if self.threshold == "paper":
            self._value = thresholds.paper_rule(self._value, ratio)
        elif self.threshold == "proportional":
            self._value = thresholds.proportional_rule(self._value, ratio)
        self._value = max(self._value, SMALLEST)
        if self.rule == "balanced":
            self._aim = min(max(self._aim * ratio**-AIM_GAIN, 1.0), MOST_AIM)
            self._runs = balanced(self._running_loads(), self.workers)
        else:
            by_partition = [counts[(partition - self.iteration) % self.workers] for partition in range(self.workers)]
            self._runs = rebalance(self._runs, by_partition, self.rule)

    def _running_loads(self) -> list[float]:
        """All know what was selected where: the indices have been exchanged."""
        chosen = torch.cat(self.selected)
        blocks = torch.bucketize(chosen, torch.tensor(self._edges[1:-1], device=chosen.device), right=True)
        now = torch.bincount(blocks, minlength=self.blocks).double().cpu()
        if self._loads:
            now = KEPT_LOAD * torch.tensor(self._loads, dtype=torch.float64) + (1 - KEPT_LOAD) * now
        self._loads = now.tolist()
        return self._loads


class MiCRO(ExDyna):
    """MiCRO (arXiv 2310.00967): ExDyna with equal partitions that never change."""

    label = "MiCRO"
    options = tuple(option for option in ExDyna.options if option not in ("rule", "blocks"))

    def __init__(self, *, workers: int, **settings) -> None:
        super().__init__(workers=workers, rule="static", blocks=workers, **settings)
