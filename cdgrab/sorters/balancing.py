"""Sorters that balance gradients: GraB, ID-GraB, CD-GraB and KH-SGD.

Differences and running sums are float64 whatever the gradients are, so that orders do not hang on rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import kernels, streams
from ..balance import kh_penalties, reorder, reorder_pairs
from ..errors import CdgrabError
from .base import Sorter, count, number

RULES = ("greedy", "walk")


class BalancingSorter(Sorter):
    """Shared by all: a running sum that starts at zero every epoch, and the signs of this epoch so far."""

    needs_gradients = True
    options = ("initial", "rule", "walk_width")
    per_worker = ("_order", "_signs", "_running")

    def __init__(self, *, rule: str = "greedy", walk_width: float = 30.0, **common) -> None:
        super().__init__(**common)
        if rule not in RULES:
            raise CdgrabError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
        self.rule, self.walk_width = rule, number("walk_width", walk_width, above=0)
        self._running = torch.zeros(self._sums(), self.dim, dtype=torch.float64)
        self._signs = torch.zeros(self.local_workers, self._decisions(), dtype=torch.int8)

    def _sums(self) -> int:
        """How many running sums this process keeps."""
        return self.local_workers

    def _decisions(self) -> int:
        """Signs per worker and epoch."""
        return self.units

    def _options(self) -> dict:
        return {"rule": self.rule, **({"walk_width": self.walk_width} if self.rule == "walk" else {})}

    def _start_epoch(self) -> None:
        self._running.zero_()
        self._signs.zero_()
        self._draw()

    def _restore(self) -> None:
        self._draw()

    def _draw(self) -> None:
        """This epoch's uniform draws, [decisions, all workers]; redrawn, not stored, since streams are reproducible."""
        if self.rule == "walk" and self.epoch >= 0:
            draws = [
                streams.symmetric_uniform(self._decisions(), self.seed, "walk", w, self.epoch)
                for w in range(self.workers)
            ]
            self._uniforms = torch.stack(draws, dim=1)
        else:
            self._uniforms = torch.zeros(self._decisions(), self.workers, dtype=torch.float64)

    def _draws(self, start: int, end: int) -> Tensor:
        """Draws of decisions start … end−1 for this process's workers, [end − start, local workers]."""
        return self._uniforms[start:end, self.group.local]

    def _running_on(self, device: torch.device) -> Tensor:
        """The running sums, where the gradients are."""
        self._running = self._running.to(device)
        return self._running


class MeanBalance(BalancingSorter):
    """GraB / ID-GraB (Bal): balances g − mean gradient of the previous epoch (0 in the first), every worker alone."""

    label = "ID-GraB (Bal)"
    per_worker = (*BalancingSorter.per_worker, "_stale_mean", "_fresh_sum")

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self._stale_mean = torch.zeros_like(self._running)
        self._fresh_sum = torch.zeros_like(self._running)

    def _next_order(self, epoch: int) -> Tensor:
        return self._first_order() if epoch == 0 else reorder(self._order, self._signs)

    def _start_epoch(self) -> None:
        self._stale_mean = self._fresh_sum / self.units
        self._fresh_sum = torch.zeros_like(self._stale_mean)
        super()._start_epoch()

    def _take(self, gradients: Tensor) -> None:
        start, end = self.position, self.position + gradients.shape[1]
        device = gradients.device
        self._stale_mean, self._fresh_sum = self._stale_mean.to(device), self._fresh_sum.to(device)
        limits = (self.walk_width * self._draws(start, end)).to(device)
        signs = kernels.balance_centred(
            gradients.transpose(0, 1).double(), self._running_on(device), self._stale_mean, self._fresh_sum, limits
        )
        self._signs[:, start:end] = signs.T.cpu()


class PairBalance(BalancingSorter):
    """GraB / ID-GraB (PairBal): balances g_{2k} − g_{2k+1}; the pair gets (s, −s). Every worker alone."""

    label = "ID-GraB (PairBal)"
    per_worker = (*BalancingSorter.per_worker, "_unpaired")

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self._unpaired = torch.empty(
            self.local_workers, 0, self.dim, dtype=torch.float64
        )  # first gradient of a pair still incomplete

    def _decisions(self) -> int:
        return self.units // 2

    def _next_order(self, epoch: int) -> Tensor:
        return self._first_order() if epoch == 0 else reorder_pairs(self._order, self._signs)

    def _start_epoch(self) -> None:
        self._unpaired = self._unpaired[:, :0]
        super()._start_epoch()

    def _take(self, gradients: Tensor) -> None:
        first_pair = self.position // 2
        if self._unpaired.shape[1]:
            gradients = torch.cat([self._unpaired.to(gradients.device), gradients], dim=1)
        pairs = gradients.shape[1] // 2
        self._unpaired = gradients[:, 2 * pairs :].to(torch.float64, copy=True)
        by_position = gradients[:, : 2 * pairs].transpose(0, 1)
        # float64 before the subtraction, and laid out as the kernels read it
        differences = by_position[0::2].to(torch.float64, memory_format=torch.contiguous_format, copy=True)
        differences -= by_position[1::2]
        self._take_pairs(first_pair, differences)

    def _take_pairs(self, first: int, differences: Tensor) -> None:
        """Decide the signs of pairs first, first + 1, …; differences [pairs, local workers, dim]."""
        end = first + len(differences)
        self._signs[:, first:end] = self._decide(differences, first, end).T.cpu()

    def _decide(self, rows: Tensor, start: int, end: int) -> Tensor:
        """Signs [pairs, local workers] of rows [pairs, local workers, dim]."""
        limits = (self.walk_width * self._draws(start, end)).to(rows.device)
        return kernels.balance(rows, self._running_on(rows.device), limits)


class CoordinatedPairBalance(PairBalance):
    """CD-GraB: the same pair differences, balanced against ONE running sum, workers in rank order at each position.

    Orders are needed once per epoch, so with several processes the exchange waits until `exchange_mb` of differences
    have come together. Every process then decides the same signs of all workers and keeps those of its own.
    """

    label = "CD-GraB"
    options = (*PairBalance.options, "exchange_mb")
    per_worker = ("_order", "_signs", "_unpaired")
    shared = ("_running",)

    def __init__(self, *, exchange_mb: float = 4.0, **options) -> None:
        super().__init__(**options)
        self._exchange_bytes = number("exchange_mb", exchange_mb, above=0) * 2**20
        self._pending: list[Tensor] = []

    def _sums(self) -> int:
        return 1

    def _take_pairs(self, first: int, differences: Tensor) -> None:
        self._pending.append(differences)
        waiting = sum(d.numel() * d.element_size() for d in self._pending)
        epoch_complete = first + len(differences) == self._decisions()
        if self.group.world_size == 1 or epoch_complete or waiting >= self._exchange_bytes:
            self._exchange(end=first + len(differences))

    def _exchange(self, end: int) -> None:
        if not self._pending:
            return
        differences = self._pending[0] if len(self._pending) == 1 else torch.cat(self._pending)
        self._pending = []
        start = end - len(differences)
        rows = self.group.gather(differences.transpose(0, 1)).transpose(0, 1)
        limits = (self.walk_width * self._uniforms[start:end]).to(rows.device)
        signs = kernels.balance(rows, self._running_on(rows.device), limits)
        self._signs[:, start:end] = signs[:, self.group.local].T.cpu()

    def state_dict(self) -> dict:
        """See `Sorter.state_dict`. With several processes all must call it, since pending rows are exchanged first."""
        self._exchange(end=self.position // 2)
        return super().state_dict()

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self._pending = []


class KernelHalving(PairBalance):
    """KH-SGD (Low-Rank Thinning, 2025): pair differences with a randomised threshold, every worker alone.

    `epochs` is the length of the run: the rule's confidence is spread over all of it.
    """

    label = "KH-SGD"
    options = ("initial", "epochs", "delta")
    per_worker = (*PairBalance.per_worker, "_q")

    def __init__(self, *, epochs: int = 100, delta: float = 0.5, **common) -> None:
        super().__init__(rule="walk", **common)  # same uniform draws as the walk
        self.epochs, self.delta = count("epochs", epochs, 1), number("delta", delta, above=0, below=1)
        self._q = torch.zeros(self.local_workers, dtype=torch.float64)

    def _options(self) -> dict:
        return {"epochs": self.epochs, "delta": self.delta}

    def _start_epoch(self) -> None:
        self._q.zero_()
        super()._start_epoch()

    def _decide(self, rows: Tensor, start: int, end: int) -> Tensor:
        device = rows.device
        self._q = self._q.to(device)
        penalties = kh_penalties(self._decisions(), self.epoch + 1, self.epochs, self.delta)[start:end].to(device)
        return kernels.balance_kh(
            rows, self._running_on(device), self._q, penalties, self._draws(start, end).to(device)
        )
