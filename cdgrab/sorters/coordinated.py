"""CD-GraB (Cooper et al. 2023, arXiv 2302.00845, Algorithms 2 and 3): all workers balance against one running sum, on
one process or on several."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from cdgrab.balance import kernels
from cdgrab.errors import CdgrabError
from cdgrab.runtime.division import Division
from cdgrab.runtime.group import WorkerGroup
from cdgrab.sorters.balancers import BLOCK_BYTES, Balancer
from cdgrab.sorters.balancing import BalancingSorter


class CoordinatedBalancer(Balancer):
    """One running sum for all workers, whose turns come in rank order at each position.

    With several processes, short rows (row length × processes <= `group.WHOLE`, 65,536) are collected on the first
    process, which decides all signs and distributes them at the epoch's end. It holds the rows of all workers for as
    many positions as fill `buffer_bytes`, but at least one (64 workers on 4 processes: at most 64 × 16,384 numbers).
    Long rows are divided by coordinates: every process keeps its shard of all rows and of the running sum, and the
    inner products of the shards are summed over the processes. Then no process holds the rows of all workers. At
    near-ties, where rounding could change a sign, up to four rows are put together and decided by the first process.
    """

    common = True

    def __init__(self, *, buffer_bytes: float, **settings) -> None:
        super().__init__(buffer_bytes=buffer_bytes, **settings)
        self.divided = self.group.divides(self.dim)
        self.division = Division.even(self.group, self.dim)
        if self.group.world_size > 1:
            # Rows are sent in blocks: what arrives fills the buffer, or half of it if it replaces what was sent.
            self.block_bytes = buffer_bytes / (2 if self.divided else self.group.world_size)
        if self.divided:  # more rows at once would cost more in products than they save in exchanges
            self.block_bytes = min(BLOCK_BYTES, self.block_bytes)

    def sums(self) -> int:
        return 1

    def coordinates(self) -> int:
        return self.group.widths(self.dim)[self.group.rank] if self.group.divides(self.dim) else self.dim

    def size(self, rows: Tensor) -> int:
        """As if this process had the most coordinates."""
        if rows.shape[-1] == self.dim:
            return rows.nbytes
        return rows.shape[:-1].numel() * max(self.division.widths) * rows.element_size()

    def decide(self, first: int, rows: Tensor) -> Tensor:
        """Signs of all workers, [n, workers]; zeros if another process decides them."""
        if self.group.world_size == 1:
            return super().decide(first, rows)
        blocks = rows.split(_rows_in(self.block_bytes, len(rows), self.size(rows)))
        starts = accumulate(map(len, blocks[:-1]), initial=first)
        return torch.cat([self._decide_block(start, block) for start, block in zip(starts, blocks, strict=True)])

    def _decide_block(self, first: int, rows: Tensor) -> Tensor:
        """Decide one block, small enough to send at once."""
        limits = self.prepare(first, rows)
        if self.divided:
            if rows.shape[1] != self.group.workers:  # not divided yet
                rows = self._division_here().shard(rows).transpose(0, 1).flatten(1, 2)
            others = (self.group.small_all_reduce, self._settle, self.dim)
            return kernels.balance_divided(rows, self.running, limits, *others)
        everybody = self.group.collect(rows.transpose(0, 1))
        if everybody is None:
            return torch.zeros(limits.shape, dtype=torch.int8)
        at_once = _rows_in(BLOCK_BYTES, len(limits), everybody.nbytes)  # the kernel copies rows, position by position
        parts = zip(everybody.split(at_once, 1), limits.split(at_once), strict=True)
        return torch.cat([self._kernels.balance(some.transpose(0, 1), self.running, its) for some, its in parts])

    def _settle(self, rows: Tensor, running: Tensor, limits: Tensor) -> Tensor:
        """Signs [n] of a few divided rows [n, width], as one process decides them: the first one."""
        unshard = self._division_here().unshard
        whole, r = (torch.stack([unshard(row) for row in some]) for some in (rows, running))
        return self.group.from_worker(0, self._kernels.balance(whole[None], r, limits[None])[0])

    def _division_here(self) -> Division:
        """By the channel of this balancer, which may decide in a thread while others use that of the division."""
        return replace(self.division, group=self.group)

    def local(self, signs: Tensor) -> Tensor:
        return (signs if self.divided else self.group.from_worker(0, signs))[:, self.group.local]

    def values(self) -> dict[str, Tensor]:
        """The whole running sum, wherever its coordinates are; if they are divided, there may be no room on a GPU."""
        if self.divided:
            return {"running": self.division.unshard(self.running[0].cpu())[None]}
        return {"running": self.group.from_worker(0, self.running.clone())}

    def divide(self, division: Division, empty: bool) -> None:
        """Divide coordinates in another way from now on. empty: the running sum is zero, so that nothing moves."""
        if empty:
            self.running = self.running.new_zeros(1, division.width)
        else:
            self.running = self.division.moved(self.running, division)
        self.division = division

    def load(self, values: dict[str, Tensor], epoch: int) -> None:
        super().load(values, epoch)
        if self.divided:
            self.running = self.division.own(self.running)


class CoordinatedPairBalance(BalancingSorter):
    """CD-GraB: pair differences, balanced against ONE running sum; see `CoordinatedBalancer`."""

    label = "CD-GraB"
    balancer = CoordinatedBalancer

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.takes_shards = self._balancer.divided and self._sketch is None
        self._shares: Tensor | None = None  # [workers, width]: of a pair's first gradients, less those of the second
        self._like: Tensor | None = None  # of the type of those that are being taken
        self._second = False  # whether those that are being taken are a pair's second ones
        self._open = False  # whether some are being taken; still so after a step that has failed

    @property
    def division(self) -> Division:
        """Which process gets which coordinates of the shards."""
        return self._balancer.division

    @property
    def amid_pair(self) -> bool:
        return self._shares is not None

    def divide(self, division: Division) -> None:
        if division == self.division:
            return
        self.drain()
        if self._server:
            self._server.free()
        if self._shares is not None:
            self._shares = self.division.moved(self._shares, division)
        self._balancer.divide(division, empty=self.position < 2)

    def begin_shares(self, like: Tensor) -> None:
        if not self.takes_shards:
            return super().begin_shares(like)
        if self._unpaired.shape[1]:  # whole gradients were observed, or loaded, before
            self._shares = self.division.shard(self._unpaired[:, 0]).flatten(0, 1).to(like)
            self._unpaired = self._none
        self._like, self._second, self._open = like[:0], self._shares is not None, True
        if not self._late:
            self.make_room()

    def decide_late(self, group: WorkerGroup) -> None:
        if self._server is None and self._background in ("auto", False):
            self._late, self._balancer.group = True, group

    def decide_due(self) -> None:
        if self._server:
            self._server.flush_full()

    def make_room(self) -> None:
        if self._shares is None:
            like = self._like
            self._shares = self._order_server(like.is_cuda).room(like, self.workers, self.division.width)

    def kept_shares(self) -> tuple[Tensor, bool] | None:
        self.make_room()
        return self._shares, self._second

    def take_share(self, place: slice, share: Tensor, add: bool = False) -> None:
        self.make_room()
        if self._second:
            self._shares[:, place] -= share
        elif add:
            self._shares[:, place] += share
        else:
            self._shares[:, place] = share

    def end_shares(self) -> None:
        self.make_room()
        self._open = False
        rows = self._shares[None]
        if self._second or self.position + 1 == self.units:  # the last of an odd number waits for no partner
            self._shares = None
        self._take(1, rows if self._second else rows[:0])

    def _values(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        if self._open and self._second:
            raise CdgrabError("a step failed amid a pair: there is no state to save; load the last one")
        per_worker, common = super()._values()
        if self._shares is not None and not self._open:  # a pair's first ones that are not complete do not count
            whole = self.division.unshard_rows(self._shares.cpu()).double()
            per_worker["_unpaired"] = whole[:, None]
        return per_worker, common

    def _load_values(self, per_worker: dict[str, Tensor], common: dict[str, object]) -> None:
        self._shares, self._open = None, False
        super()._load_values(per_worker, common)

    def next_order(self, epoch: int) -> Tensor:
        order = super().next_order(epoch)
        self._shares, self._open = None, False
        return order


def _rows_in(block: float, rows: int, size: int) -> int:
    """How many of these rows, of this size together, fit into a block; at least one."""
    return max(1, int(block * rows / size))
