"""ExDyna and MiCRO of several runs together. See `cdgrab.sparsify.exdyna` for what they do.

Partitions are disjoint, so that what the workers look at is one vector per run: every coordinate as its owner has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from cdgrab.sparsify import threshold as thresholds
from cdgrab.sparsify.compressor import summed_bytes
from cdgrab.sparsify.exdyna import AIM_GAIN, COUNTED, KEPT_LOAD, MOST, MOST_AIM, MOST_SLACK, ExDyna
from cdgrab.sparsify.partitions import TOLERANCE
from cdgrab.sparsify.threshold import CLOSER, COARSE, FINE, LARGEST, MANY, NEAR, SMALLEST
from experiments.training.on_device.base import INDEX, Selection, Sparse
from experiments.training.on_device.counting import Groups, counts_between
from experiments.training.on_device.partitions import Partitions

RULES, THRESHOLDS = ("balanced", "paper", "static"), ("counted", "paper")  # that are known here
LEVELS = CLOSER + 1  # grids, each finer than the last, in which a threshold is looked for


class ExDynas(Sparse):
    """All with the same of these RULES and THRESHOLDS, and as many blocks."""

    def __init__(self, sparsifiers: Sequence[ExDyna], device: torch.device) -> None:
        super().__init__(sparsifiers, device)
        first = sparsifiers[0]
        self._rule, self._counts, self._blocks = first.rule, first.threshold == "counted", first.blocks
        self._value = self._each([each._value for each in sparsifiers], torch.float64)
        self._aim = torch.ones_like(self._value)
        self._edges = torch.tensor(first._edges, device=device).repeat(self.runs, 1)  # of the blocks
        self._lengths = torch.tensor(first._runs, device=device).repeat(self.runs, 1)  # blocks of each partition
        self._loads = torch.zeros(self.runs, self._blocks, dtype=torch.float64, device=device)
        self._samples = bool((self._targets // COUNTED > 1).any())
        coarse = torch.tensor(thresholds.grid(SMALLEST, LARGEST, COARSE), dtype=torch.float64, device=device)
        self._coarse = coarse.repeat(self.runs, 1)
        self._rows = self.dim * torch.arange(self.runs, device=device)  # where each run's begins

    def select(self, accumulated: Tensor) -> Selection:
        first = pad(self._lengths.cumsum(1), (1, 0))  # block of each partition
        cuts = self._edges.gather(1, first)  # of the partitions [runs, workers + 1]
        partitions = Partitions(cuts, self.dim, self.iteration)
        magnitudes = partitions.seen_by_owners(accumulated)
        sent = 0
        if self._counts:
            counted = partitions.sampled(magnitudes, self._every) if self._samples else magnitudes
            value, sent = self._counted(Groups(counted, self._rows, self._rows + self.dim).reaching)
            self._value.copy_(value)
        union = magnitudes >= self._value.float()[:, None]
        in_blocks = counts_between(union, self._edges)  # short pieces, which many programs of a GPU count
        counts = pad(in_blocks.cumsum(1), (1, 0)).gather(1, first).diff(dim=1)
        most = self._most() if self._rule == "balanced" else None
        if most is not None:
            limits = most[:, None].expand_as(counts)
            union &= partitions.largest(magnitudes, limits, counts <= limits, self._value.float())
            counts = counts.minimum(limits)
        sizes = cuts.diff(dim=1)
        empty = (counts == 0) & (sizes > 0)  # such a worker sends one in turn
        turn = (cuts[:, :-1] + self.iteration % sizes.clamp(min=1)).masked_fill(~empty, self.dim)
        union = pad(union, (0, 1)).scatter_(1, turn, True)[:, :-1]
        own = (self.iteration + torch.arange(self.workers, device=self.device)) % self.workers
        return Selection(union, (counts + empty.long()).index_select(1, own), sent, self._value, most)

    def _most(self) -> Tensor:
        """How many coordinates a worker may send, [runs]."""
        fair, slack = self.targets.double() / self.workers, (self._aim / MOST_AIM).clamp(min=1.0)
        return fair.ceil().maximum((MOST * slack * fair).round()).long()

    # -- threshold ----------------------------------------------------------------------------------------------------

    @property
    def _every(self) -> Tensor:
        """Of so many coordinates, one is counted; [runs]."""
        return (self.targets // COUNTED).clamp(min=1) | 1

    def _counted(self, count: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        """The values that the wanted numbers of coordinates reach, [runs], and the bytes sent to find them; as
        `cdgrab.sparsify.threshold.counted_threshold`, with all its cases computed. count: how many reach each of some
        values [runs, values], where a run's are wanted."""
        wanted = (self._aim.clamp(max=MOST_AIM) * self.targets / self._every)[:, None]
        last = self._value[:, None]
        fine, coarse = (summed_bytes(self.workers, INDEX * size) for size in (FINE, COARSE))
        near, began = _grid((last / NEAR).clamp(min=SMALLEST), last * NEAR), self.iteration > 0
        reached = count(near.float())
        low_enough = (reached[:, :1] >= wanted) | (near[:, :1] == SMALLEST)
        close = began & low_enough & (reached[:, -1:] < wanted)
        low, high, _, _, somewhere = _bracket(self._coarse, count(self._coarse.float(), close[:, 0]), wanted)
        far = _grid(low, high)
        values, reached = torch.where(close, near, far), torch.where(close, reached, count(far.float(), close[:, 0]))
        looked = began * fine + ~close * (coarse + somewhere * fine)
        done, found = ~(close | somewhere), torch.full_like(last, SMALLEST)
        for level in range(LEVELS):
            low, high, reach_low, reach_high, inside = _bracket(values, reached, wanted)
            few = reach_low - reach_high <= (MANY * wanted).clamp(min=1)
            between = low * (high / low) ** ((reach_low - wanted) / (reach_low - reach_high))
            found = torch.where(done, found, torch.where(inside, torch.where(few, between, low), values[:, :1]))
            done = done | ~inside | few
            if level + 1 < LEVELS:
                values = _grid(low, high)
                reached = count(values.float(), done[:, 0])
                looked = looked + ~done * fine
        return found[:, 0], looked[:, 0]

    # -- adaptation ---------------------------------------------------------------------------------------------------

    def learn(self, found: Selection, sent: Tensor) -> None:
        ratio = found.counts.sum(1) / self.targets.double()
        if not self._counts:
            self._value.mul_(paper_factor(ratio)).clamp_(min=SMALLEST)
        if self._rule == "balanced":
            held_back = found.counts.amax(1) >= found.most
            highest = self._aim.clamp(min=MOST_AIM).masked_fill(held_back, MOST_AIM * MOST_SLACK)
            self._aim.copy_((self._aim * ratio**-AIM_GAIN).clamp(min=1.0).minimum(highest))
            now = counts_between(found.union, self._edges).double()
            self._loads.copy_(torch.where(self.iteration > 0, KEPT_LOAD * self._loads + (1 - KEPT_LOAD) * now, now))
            self._lengths.copy_(balanced(self._loads, self.workers))
        elif self._rule == "paper":
            partitions = (torch.arange(self.workers, device=self.device) - self.iteration) % self.workers
            self._lengths.copy_(rebalanced(self._lengths, found.counts.index_select(1, partitions), self._blocks))


def _grid(low: Tensor, high: Tensor) -> Tensor:
    """As `cdgrab.sparsify.threshold.grid`, for each run: [runs, 1] -> [runs, FINE]."""
    return low * (high / low) ** (torch.arange(FINE, dtype=torch.float64, device=low.device) / (FINE - 1))


def _bracket(values: Tensor, reached: Tensor, wanted: Tensor) -> tuple[Tensor, ...]:
    """The two neighbouring values between which the wanted number is reached, how many reach each of them, and whether
    there are such; all [runs, 1]."""
    place = (reached >= wanted).sum(1, keepdim=True) - 1
    inside = (place >= 0) & (place < values.shape[1] - 1)
    place = place.clamp(0, values.shape[1] - 2)
    return *(some.gather(1, at) for some in (values, reached) for at in (place, place + 1)), inside


def paper_factor(ratio: Tensor) -> Tensor:
    """By which `cdgrab.sparsify.threshold.paper_rule` multiplies."""
    factor = torch.full_like(ratio, 0.9987).masked_fill(ratio > 1, 1.00125)
    return factor.masked_fill(ratio > 1.1, 1.005).masked_fill(ratio <= 1 / 1.1, 0.995)


def balanced(loads: Tensor, workers: int) -> Tensor:
    """As `cdgrab.sparsify.partitions.balanced`, for each run: [runs, blocks] -> [runs, workers]."""
    blocks, number = loads.shape[1], torch.arange(1, workers, device=loads.device)
    before = pad(loads.cumsum(1), (1, 0))
    shares = before[:, -1:] * number / workers
    cuts = torch.searchsorted(before, shares)
    nearer = shares - before.gather(1, (cuts - 1).clamp(min=0)) < before.gather(1, cuts) - shares
    spare = (cuts - (nearer & (cuts > 0)).long() - number).clamp(min=0)  # beyond one block for each partition before
    cuts = spare.cummax(1).values.clamp(max=blocks - workers) + number
    return pad(pad(cuts, (0, 1), value=blocks), (1, 0)).diff(dim=1)


def rebalanced(lengths: Tensor, loads: Tensor, blocks: int) -> Tensor:
    """As `cdgrab.sparsify.partitions.rebalance` with the paper's rule, for each run: [runs, workers] both."""
    partitions, total = lengths.shape[1], loads.sum(1)
    average, load = total.double() / partitions, total // blocks
    least = max(1, blocks // (4 * partitions))
    lengths, loads = list(lengths.unbind(1)), list(loads.unbind(1))
    for left in range(partitions - 1):
        right = left + 1
        shares = loads[left] / average, loads[right] / average
        (left_above, right_above), (left_below, right_below) = (
            [share > TOLERANCE for share in shares],
            [share < 1 / TOLERANCE for share in shares],
        )
        to_right = left_above & right_below & (lengths[left] > least)
        to_left = right_above & left_below & (lengths[right] > least)
        moved = to_right.long() - to_left.long()
        lengths[left], lengths[right] = lengths[left] - moved, lengths[right] + moved
        loads[left], loads[right] = loads[left] - load * moved, loads[right] + load * moved
    return torch.stack(lengths, dim=1)
