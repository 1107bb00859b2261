"""ExDyna (Yoon, Oh 2024, arXiv 2402.13781) and MiCRO (Yoon, Oh 2023, arXiv 2310.00967): every worker selects in its own
partition, with one threshold for all.

A worker reads only 1/workers of the vector, workers never select the same coordinate, and partitions are resized
according to their loads. Partitions rotate: in iteration t worker w has partition (t + w) mod workers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from cdgrab.checks import count, one_of
from cdgrab.errors import CdgrabError
from cdgrab.runtime.fields import Field
from cdgrab.sparsify import threshold as thresholds
from cdgrab.sparsify.base import Sparsifier
from cdgrab.sparsify.partitions import (
    ALIGNMENT,
    RULES,
    balanced,
    block_edges,
    equal_runs,
    partition_edges,
    published_edges,
    published_rebalance,
    rebalance,
)
from cdgrab.sparsify.threshold import SMALLEST, largest, reaching_each

THRESHOLDS = ("counted", "proportional", "paper", "fixed")
COUNTED = 4096  # about how many coordinates above the threshold are counted; if there are more, a sample is enough
COUNT_AGAIN = 2.0  # if the density is off by this factor, the threshold is counted again instead of adapted in steps
COUNT_APART = 8  # iterations between two such corrections
MOST = 1.1  # how many times its fair share a worker may send at first: with few, some get more by chance alone
AIM_GAIN, MOST_AIM = 0.5, 2.0  # how fast, and how far, the aim is raised to compensate for workers held back by that
MOST_SLACK = 4.0  # how far that limit is raised if the aim is not enough: what a block holds cannot be shared
KEPT_LOAD = 0.8  # weight of the past in the running mean of the blocks' loads


def shuffled(indices: Tensor, seed: int) -> Tensor:
    """The indices in random order, the same on every process. Otherwise ties would always be taken from one end of the
    partition, which would run empty while rebalancing shrinks the partition to that end."""
    order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(seed))
    return indices[order.to(indices.device)]


class ExDyna(Sparsifier):
    """Options beyond those of every sparsifier:

    threshold: how it adapts to the gradients.
      counted: before selecting, all workers count how many coordinates reach each of some values near the last
        threshold, and take the value that the wanted number reaches. Costs a sum of a few hundred bytes over the
        workers, and cannot oscillate. Equal magnitudes pass together; then only `rule: balanced` limits the density.
      proportional: multiplied by (selected / wanted) ** 0.1 afterwards; counted at the start and when far off.
        At low densities it oscillates, because many residuals reach the threshold together.
      paper: starts at 1 / (2 √k) and is multiplied by 1.005 or 0.995. fixed: is that of k.
    rule: how partitions adapt to the loads.
      balanced: cut so that the blocks' recent loads are shared evenly; no worker sends more than 1.1 times its share,
        unless too little would be sent otherwise.
      paper, relative: neighbours exchange single blocks. static: they don't.
    blocks: how many blocks the partitions are made of.
    faithful: as the published code does, to the letter, in place of the default threshold and rule. It differs from
      `paper` in four details: near the wanted number the threshold always rises; the mean load is rounded down; no
      partition keeps fewer than blocks / (4 · workers) blocks, not rounded down; blocks are equally long, and what is
      left over belongs to the last partition.
    """

    label = "ExDyna"
    options = (*Sparsifier.options, "rule", "threshold", "blocks", "faithful")
    exclusive = True
    saved = ("_residual", "_value", "_runs", "_loads", "_aim", "_counted_at", "_off")

    def __init__(
        self,
        *,
        rule: str = "balanced",
        threshold: str = "counted",
        blocks: int = 1024,
        faithful: bool = False,
        **settings,
    ) -> None:
        super().__init__(**settings)
        one_of("rule", rule, RULES)
        one_of("threshold", threshold, THRESHOLDS)
        one_of("faithful", faithful, (True, False))
        self.blocks = min(max(count("blocks", blocks, 1), self.workers), self.dim)
        if faithful:
            self._refuse_unfaithful(rule, threshold)
            rule = threshold = "paper"
        self.rule, self.threshold, self.faithful = rule, threshold, faithful
        self._edges = (published_edges if faithful else block_edges)(self.dim, self.blocks)
        self._cuts = torch.tensor(self._edges[1:-1], dtype=torch.long)  # the same, where the gradients are
        self._runs = equal_runs(self.blocks, self.workers)  # blocks of each partition
        self._loads: list[float] = []  # running mean of what is selected in each block
        # how many times the target must reach the threshold so that the target is sent; what exceeds MOST_AIM is slack
        self._aim = 1.0
        self._value = thresholds.first_guess(self.target)
        self._counted_at = -1  # never
        self._off = False  # whether the density is so far off that the threshold must be counted again

    def _refuse_unfaithful(self, rule: str, threshold: str) -> None:
        if rule not in ("balanced", "paper") or threshold not in ("counted", "paper"):
            raise CdgrabError(
                f"faithful=true is rule=paper and threshold=paper; got rule={rule}, threshold={threshold}"
            )
        if self.dim < ALIGNMENT * self.blocks:
            raise CdgrabError(
                f"faithful=true needs {ALIGNMENT} coordinates for each of {self.blocks} blocks, dim is {self.dim}; "
                "give fewer blocks"
            )

    def fields(self, *, iteration: int) -> dict[str, Field]:
        blocks, shared = self.blocks, self.rule == "balanced" and iteration
        runs = Field((int,), (self.workers,), 0, blocks, lambda r: sum(r) == blocks, f"{blocks} together")
        return super().fields(iteration=iteration) | {
            "_value": Field((float,), least=sys.float_info.min),
            "_runs": runs,
            "_loads": Field((float,), (blocks if shared else 0,), least=0.0),
            "_aim": Field((float,), least=1.0, most=MOST_AIM * MOST_SLACK),
            "_counted_at": Field((int,), least=-1, most=iteration - 1),
            "_off": Field((bool,)),
        }

    def partitions(self) -> list[int]:
        """The edges of the partitions in the next iteration, [workers + 1]."""
        return partition_edges(self._edges, self._runs)

    def _own(self, accumulated: Tensor) -> Iterator[tuple[Tensor, int, int]]:
        """Each local worker's row, and where its partition starts and ends."""
        edges = self.partitions()
        for worker, row in zip(self.worker_ids(), accumulated, strict=True):
            partition = (self.iteration + worker) % self.workers
            yield row, edges[partition], edges[partition + 1]

    def most(self) -> int:
        """How many coordinates a worker may send; 0: no limit."""
        fair, slack = self.target / self.workers, max(1.0, self._aim / MOST_AIM)
        return max(math.ceil(fair), round(MOST * slack * fair)) if self.rule == "balanced" else 0

    def select(self, accumulated: Tensor) -> list[Tensor]:
        own, found, most = list(self._own(accumulated)), [], self.most()
        each = reaching_each([row[start:end] for row, start, end in own], self._value)
        for (row, start, end), places in zip(own, each, strict=True):
            indices = start + places
            if most and len(indices) > most:  # the rest waits for a later iteration
                indices = shuffled(indices, self.iteration)
                indices = indices[largest(row[indices], most)]
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
        elif self.threshold == "fixed":
            self._value = thresholds.first_guess(self.target)
        return sent

    def _counts_now(self) -> bool:
        if self.threshold == "proportional":
            corrected = self._off and self.iteration - self._counted_at >= COUNT_APART
            return self._counted_at < 0 or corrected
        return self.threshold == "counted"

    def _counted(self, accumulated: Tensor) -> tuple[float, int]:
        """The threshold that the wanted number of coordinates reaches, and the bytes sent to find it."""
        every = max(1, self.target // COUNTED) | 1  # odd, so that sampling does not align with the rows of a matrix
        own = [row[start:end][self.iteration % every :: every] for row, start, end in self._own(accumulated)]
        sent = 0

        def counts(values: list[float]) -> list[int]:
            nonlocal sent
            sent += self.summed_bytes(self._index_type.itemsize * len(values))
            return self.group.all_reduce(thresholds.count_reaching(own, values).to(self._index_type)).tolist()

        last = None if self._counted_at < 0 else self._value
        return thresholds.counted_threshold(counts, min(self._aim, MOST_AIM) * self.target / every, last), sent

    def _threshold(self) -> float:
        return self._value

    # -- adaptation ---------------------------------------------------------------------------------------------------

    def learn(self, counts: list[int]) -> None:
        ratio = sum(counts) / self.target
        self._off = max(ratio, 1 / max(ratio, SMALLEST)) > COUNT_AGAIN
        if self.threshold == "paper":
            self._value = thresholds.paper_rule(self._value, ratio, self.faithful)
        elif self.threshold == "proportional":
            self._value = thresholds.proportional_rule(self._value, ratio)
        self._value = max(self._value, SMALLEST)
        if self.rule == "balanced":
            # Too little may be sent for other reasons: the limit is raised only if it holds somebody back.
            highest = MOST_AIM * MOST_SLACK if max(counts) >= self.most() else max(self._aim, MOST_AIM)
            self._aim = min(max(self._aim * ratio**-AIM_GAIN, 1.0), highest)
            self._runs = balanced(self._running_loads(), self.workers)
        else:
            by_partition = [counts[(partition - self.iteration) % self.workers] for partition in range(self.workers)]
            if self.faithful:
                self._runs = published_rebalance(self._runs, by_partition, self._edges)
            else:
                self._runs = rebalance(self._runs, by_partition, self.rule)

    def _running_loads(self) -> list[float]:
        """Running means of what is selected in each block. All workers know them, since indices are exchanged."""
        chosen = torch.cat(self.selected)
        self._cuts = self._cuts.to(chosen.device)
        blocks = torch.bucketize(chosen, self._cuts, right=True)
        now = torch.bincount(blocks, minlength=self.blocks).double().cpu()
        if self._loads:
            now = KEPT_LOAD * torch.tensor(self._loads, dtype=torch.float64) + (1 - KEPT_LOAD) * now
        self._loads = now.tolist()
        return self._loads


class MiCRO(ExDyna):
    """MiCRO: ExDyna with equal partitions that never change."""

    label = "MiCRO"
    options = tuple(option for option in ExDyna.options if option not in ("rule", "blocks", "faithful"))

    def __init__(self, *, workers: int, **settings) -> None:
        super().__init__(workers=workers, rule="static", blocks=workers, **settings)
