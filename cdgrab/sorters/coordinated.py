"""CD-GraB: all workers balance against one running sum, on one process or between several."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from cdgrab.balance import kernels
from cdgrab.errors import CdgrabError
from cdgrab.sorters.balancing import BLOCK_BYTES, PairBalance


class CoordinatedPairBalance(PairBalance):
    """CD-GraB: the same pair differences, balanced against ONE running sum, workers in rank order at each position.

    With several processes, short rows (row length × processes <= `workers.WHOLE`, 65,536) are collected on the first
    one, which decides all signs and hands them out at the epoch's end: it holds all workers' rows, of as many positions
    as fill `buffer_mb`, at least of one (of 64 workers on 4 processes at most 64 × 16,384 numbers). Long ones are
    divided by coordinates: a process keeps its share of everybody's rows and of the running sum, and the shares' inner
    products are added up. No process then holds the rows of all workers.
    """

    label = "CD-GraB"
    per_worker = ("_order", "_signs", "_unpaired")
    shared = ("_running",)

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.divided = self.group.divides(self.row_dim)
        self.takes_shards = self.divided and self.sketch is None
        self._first_share: Tensor | None = None  # of a pair that is still incomplete
        if self.divided:
            self._running = self._running[:, self.group.coordinates(self.row_dim)].clone()

    def _sums(self) -> int:
        return 1

    def _block_bytes(self) -> float:
        """Rows travel together: what arrives fills the buffer, or half of it where it replaces what was sent."""
        if self.group.world_size == 1:
            return super()._block_bytes()
        return self._buffer_bytes / (2 if self.divided else self.group.world_size)

    def observe_shard(self, share: Tensor) -> None:
        """Like `observe` for the next position, with gradients that have been divided already: this process's
        coordinates of those of all workers, [workers, width]. They belong to the sorter from now on, and whether they
        are finite is for the caller to see."""
        if not self.takes_shards:
            raise CdgrabError("this sorter takes whole gradients: they are not divided between processes")
        if self._unpaired.shape[1]:  # whole gradients were observed before, or loaded
            self._first_share = self.group.shard(self._unpaired[:, 0]).flatten(0, 1).to(share)
            self._unpaired = self._unpaired[:, :0]
        if self._first_share is None:
            self._first_share = share
        else:
            rows, self._first_share = self._first_share.sub_(share)[None], None
            self._submit(rows)
        self._move_on(1)

    def _move_on(self, units: int) -> None:
        super()._move_on(units)
        if self.position == self.units:
            self._first_share = None

    def _decide(self, first: int, rows: Tensor) -> Tensor:
        """Signs of all workers, [n, workers]; where another process decides, zeros in their place."""
        if self.group.world_size == 1:
            return super()._decide(first, rows)
        blocks = rows.split(_in_bytes(rows, self._block_bytes()))
        starts = accumulate(map(len, blocks[:-1]), initial=first)
        return torch.cat([self._decide_block(start, block) for start, block in zip(starts, blocks, strict=True)])

    def _decide_block(self, first: int, rows: Tensor) -> Tensor:
        """Of rows that may travel at once."""
        limits = (self.walk_width * self._uniforms[first : first + len(rows)]).to(rows.device)
        running = self._running_on(rows.device)
        if self.divided:
            if rows.shape[1] != self.workers:  # not divided yet
                rows = self.group.shard(rows).transpose(0, 1).flatten(1, 2)
            return kernels.balance_divided(rows, running, limits, self.group.small_all_reduce)
        everybody = self.group.collect(rows.transpose(0, 1))
        if everybody is None:
            return torch.zeros(limits.shape, dtype=torch.int8)
        at_once = _in_bytes(everybody.transpose(0, 1), BLOCK_BYTES)  # the kernel wants copies, by positions
        parts = zip(everybody.split(at_once, 1), limits.split(at_once), strict=True)
        return torch.cat([kernels.balance(some.transpose(0, 1), running, its) for some, its in parts])

    def _local(self, signs: Tensor) -> Tensor:
        return (signs if self.divided else self.group.from_worker(0, signs))[:, self.group.local]

    def state_dict(self) -> dict:
        """See `Sorter.state_dict`. With several processes all must call it: pending rows are exchanged first."""
        state = super().state_dict()
        if self._first_share is not None:
            whole = self.group.unshard_rows(self._first_share, self.row_dim).double()
            state["per_worker"]["_unpaired"] = whole[:, None]
        running = state["shared"]["_running"]
        state["shared"]["_running"] = (
            self.group.unshard(running[0], self.row_dim)[None] if self.divided else self.group.from_worker(0, running)
        )
        return state

    def _restore(self) -> None:
        self._first_share = None
        if self.divided and self._running.shape[1] == self.row_dim:
            self._running = self._running[:, self.group.coordinates(self.row_dim)].clone()
        super()._restore()


def _in_bytes(rows: Tensor, size: float) -> int:
    """How many of the rows take this much memory; at least one."""
    return max(1, int(size * len(rows) / (rows.numel() * rows.element_size())))
