"""Sorters that balance gradients, each worker on its own: GraB, ID-GraB and KH-SGD.

Running sums and inner products are float64 whatever the gradients are, so that orders do not hang on rounding. Signs
are decided by an order server, beside the training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cdgrab import streams
from cdgrab.balance import kernels
from cdgrab.balance.rules import kh_penalties, reorder, reorder_pairs
from cdgrab.balance.sketch import make_sketch
from cdgrab.checks import count, number
from cdgrab.errors import CdgrabError
from cdgrab.sorters.base import Sorter
from cdgrab.sorters.server import BACKGROUND, LOST, OrderServer, in_background

RULES = ("greedy", "walk")
BLOCK_BYTES = 2**20  # of rows: much less at a time is a matter of calls rather than of numbers
GPU_BLOCK_BYTES = 2**26  # a GPU is only busy with many at once


class BalancingSorter(Sorter):
    """Shared by all: running sums that start at zero every epoch, and the signs of this epoch so far."""

    needs_gradients = True
    options = ("initial", "rule", "walk_width", "sketch", "sketch_size", "buffer_mb", "background")
    per_worker = ("_order", "_signs", "_running")
    units_per_row = 1

    def __init__(
        self,
        *,
        rule: str = "greedy",
        walk_width: float = 30.0,
        sketch: str = "none",
        sketch_size: int = 1024,
        buffer_mb: float = 8.0,
        background: str | bool = "auto",
        **common,
    ) -> None:
        super().__init__(**common)
        if rule not in RULES:
            raise CdgrabError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
        if background not in BACKGROUND:
            raise CdgrabError(f"background must be auto, true or false, got {background!r}")
        self.rule, self.walk_width = rule, number("walk_width", walk_width, above=0)
        self.sketch = make_sketch(sketch, count("sketch_size", sketch_size, 1), self.dim, self.seed)
        self.row_dim = self.sketch.size if self.sketch else self.dim  # length of what is balanced
        self._buffer_bytes, self._wants_background = number("buffer_mb", buffer_mb, above=0) * 2**20, background
        self._running = torch.zeros(self._sums(), self.row_dim, dtype=torch.float64)
        self._signs = torch.zeros(self.local_workers, self._decisions(), dtype=torch.int8)
        self._server: OrderServer | None = None  # made with the first gradients: they tell the device

    # -- for subclasses -----------------------------------------------------------------------------------------------

    def _sums(self) -> int:
        """How many running sums this process keeps."""
        return self.local_workers

    def _decisions(self) -> int:
        """Signs per worker and epoch."""
        return self.units

    def _decided(self) -> int:
        """How many of them are known once everything observed has been settled."""
        return self.position

    def _reordered(self) -> Tensor:
        return reorder(self._order, self._signs)

    def _block_bytes(self) -> float:
        """Rows that come together before they are decided."""
        return min(BLOCK_BYTES, self._buffer_bytes / 2)

    def _units_at_once(self, gradients: Tensor) -> int:
        """As many as make a block. A GPU gets blocks of up to 64 MiB whatever `buffer_mb` is: smaller ones are a
        matter of launches."""
        block = max(GPU_BLOCK_BYTES, self._block_bytes()) if gradients.is_cuda else self._block_bytes()
        row = self.local_workers * self.row_dim * max(4, gradients.element_size())
        return max(1, int(block / row)) * self.units_per_row

    def _move_on(self, units: int) -> None:
        super()._move_on(units)
        if self._server:
            self._server.advance()

    def _decide(self, first: int, rows: Tensor) -> Tensor:
        """Signs [n, local workers] of the epoch's rows first, first + 1, …; rows [n, local workers, row_dim]."""
        raise NotImplementedError

    # -- the epoch ----------------------------------------------------------------------------------------------------

    def _next_order(self, epoch: int) -> Tensor:
        if epoch == 0:
            return self._first_order()
        self.drain()
        return self._reordered()

    def _start_epoch(self) -> None:
        self._running.zero_()
        self._signs.zero_()
        self._restore()

    def _restore(self) -> None:
        self._draw()
        if self._server:
            self._server.start(self._decided())

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

    def _draws(self, first: int, rows: Tensor) -> Tensor:
        """Draws that belong to rows [n, ...], for this process's workers, [n, local workers]."""
        self._uniforms = self._uniforms.to(rows.device)  # all at once: a copy to a GPU waits for what it does
        return self._uniforms[first : first + len(rows), self.group.local]

    def _submit(self, rows: Tensor) -> None:
        if self._server is None:
            self._server = self._make_server(rows.is_cuda)
            self._server.start(self._decided())  # rows got before the units now being observed
        self._server.submit(rows)

    def _make_server(self, on_gpu: bool) -> OrderServer:
        wanted, alone = self._wants_background, self.group.world_size == 1
        # A thread's collectives need a channel of their own, for which all processes must agree: only when asked.
        background = in_background(wanted, on_gpu) if alone or wanted != "auto" else False
        if background and not alone:
            self.group = self.group.new_channel()
        return OrderServer(self._decide, self._block_bytes(), self._buffer_bytes, background)

    def drain(self) -> None:
        """See `Sorter.drain`: the signs of everything observed."""
        signs, end = self._server.result() if self._server else None, self._decided()
        if signs is not None:
            self._signs[:, end - len(signs) : end] = self._local(signs).T
        if (self._server and self._server.taken != end) or not self._signs[:, :end].all():
            raise CdgrabError(LOST)

    def _local(self, signs: Tensor) -> Tensor:
        """What `_decide` found for this process's workers, [n, local workers]."""
        return signs

    def _running_on(self, device: torch.device) -> Tensor:
        """The running sums, where the gradients are."""
        self._running = self._running.to(device)
        return self._running

    # -- state --------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state: dict) -> None:
        """See `Sorter.load_state_dict`."""
        if self._server:
            self._server.drain()  # who decides now adds to the sums that are about to be replaced
        super().load_state_dict(state)

    def state_dict(self) -> dict:
        """See `Sorter.state_dict`. With several processes all must call it: pending rows are exchanged first."""
        self.drain()
        return super().state_dict()

    def _options(self) -> dict:
        walk = {"walk_width": self.walk_width} if self.rule == "walk" else {}
        sketch = {"sketch": self.sketch.name, "sketch_size": self.sketch.size} if self.sketch else {}
        return {"rule": self.rule, **walk, **sketch}

    def _sketched(self, gradients: Tensor) -> Tensor:
        """What is balanced instead of the gradients, in float32 at least."""
        gradients = gradients.float() if gradients.element_size() < 4 else gradients
        return self.sketch(gradients) if self.sketch else gradients


class MeanBalance(BalancingSorter):
    """GraB / ID-GraB (Bal): balances g − mean gradient of the previous epoch (0 in the first), every worker alone."""

    label = "ID-GraB (Bal)"
    per_worker = (*BalancingSorter.per_worker, "_stale_mean", "_fresh_sum")

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self._stale_mean = torch.zeros_like(self._running)
        self._fresh_sum = torch.zeros_like(self._running)

    def _next_order(self, epoch: int) -> Tensor:
        order = super()._next_order(epoch)
        if self.position:  # else nothing is known that is fresher
            self._stale_mean, self._fresh_sum = self._fresh_sum / self.position, torch.zeros_like(self._fresh_sum)
        return order

    def _take(self, gradients: Tensor) -> None:
        self._submit(self._sketched(gradients).transpose(0, 1).clone(memory_format=torch.contiguous_format))

    def _decide(self, first: int, rows: Tensor) -> Tensor:
        device = rows.device
        self._stale_mean, self._fresh_sum = self._stale_mean.to(device), self._fresh_sum.to(device)
        limits = self.walk_width * self._draws(first, rows)
        return kernels.balance_centred(rows, self._running_on(device), self._stale_mean, self._fresh_sum, limits)


class PairBalance(BalancingSorter):
    """GraB / ID-GraB (PairBal): balances g_{2k} − g_{2k+1}; the pair gets (s, −s). Every worker alone."""

    label = "ID-GraB (PairBal)"
    per_worker = (*BalancingSorter.per_worker, "_unpaired")
    units_per_row = 2

    def __init__(self, **options) -> None:
        super().__init__(**options)
        # the first gradient of a pair that is still incomplete
        self._unpaired = torch.empty(self.local_workers, 0, self.row_dim, dtype=torch.float64)

    def _decisions(self) -> int:
        return self.units // 2

    def _decided(self) -> int:
        return self.position // 2

    def _reordered(self) -> Tensor:
        return reorder_pairs(self._order, self._signs)

    def _start_epoch(self) -> None:
        self._unpaired = self._unpaired[:, :0]
        super()._start_epoch()

    def _move_on(self, units: int) -> None:
        super()._move_on(units)
        if self.position == self.units:  # an odd last unit has no pair: at an epoch's end nothing is kept of it
            self._unpaired = self._unpaired[:, :0]

    def _take(self, gradients: Tensor) -> None:
        gradients = self._sketched(gradients)
        if self._unpaired.shape[1]:
            gradients = torch.cat([self._unpaired.to(gradients), gradients], dim=1)
        pairs = gradients.shape[1] // 2
        self._unpaired = gradients[:, 2 * pairs :].to(torch.float64, copy=True)
        if pairs:
            by_position = gradients[:, : 2 * pairs].transpose(0, 1)
            self._submit(by_position[0::2] - by_position[1::2])

    def _decide(self, first: int, rows: Tensor) -> Tensor:
        limits = self.walk_width * self._draws(first, rows)
        return kernels.balance(rows, self._running_on(rows.device), limits)


class KernelHalving(PairBalance):
    """KH-SGD (Low-Rank Thinning, 2025): pair differences with a randomised threshold, every worker alone.

    `epochs` is the length of the run: the rule's confidence is spread over all of it.
    """

    label = "KH-SGD"
    options = ("initial", "epochs", "delta", "sketch", "sketch_size", "buffer_mb", "background")
    per_worker = (*PairBalance.per_worker, "_q")

    def __init__(self, *, epochs: int = 100, delta: float = 0.5, **common) -> None:
        super().__init__(rule="walk", **common)  # same uniform draws as the walk
        self.epochs, self.delta = count("epochs", epochs, 1), number("delta", delta, above=0, below=1)
        self._q = torch.zeros(self.local_workers, dtype=torch.float64)

    def _options(self) -> dict:
        options = {"epochs": self.epochs, "delta": self.delta, **super()._options()}
        return {name: value for name, value in options.items() if name not in ("rule", "walk_width")}

    def _start_epoch(self) -> None:
        self._q.zero_()
        super()._start_epoch()

    def _decide(self, first: int, rows: Tensor) -> Tensor:
        self._q = self._q.to(rows.device)
        penalties = kh_penalties(self._decisions(), self.epoch + 1, self.epochs, self.delta)[first : first + len(rows)]
        return kernels.balance_kh(
            rows, self._running_on(rows.device), self._q, penalties.to(rows.device), self._draws(first, rows)
        )
