"""What a sorter is: gradients in, orders out. Checks, epochs and state live here, the rules in subclasses.

Your own sorter is a subclass with one method, or two if it looks at gradients; see `Sorter`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from cdgrab import streams
from cdgrab.checks import count, is_whole, observed, one_of, random_seed, shown
from cdgrab.errors import CdgrabError, NotFiniteError
from cdgrab.runtime.division import Division
from cdgrab.runtime.fields import INT64, Field
from cdgrab.runtime.group import WorkerGroup
from cdgrab.runtime.state import WorkerState

INITIAL = ("random", "identity")


class Parts(Protocol):
    """A gradient [dim] that may lie in many places. like: a tensor of its type on its device."""

    like: Tensor
    scale: Tensor | float

    def write(self, row: Tensor, subtract: bool = False) -> None:
        """Write it to a row of dim numbers, or subtract it from what is there."""

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Some coordinates after others, as vectors, each with the number of the first; the rest are zero. They are
        multiplied by `scale`."""


class Sorter(WorkerState):
    """Chooses, epoch by epoch, the order in which each worker visits its units.

    A subclass implements `next_order` and, if it looks at gradients, `look`. Tensors, numbers and lists that it keeps
    in attributes are saved and restored automatically; tensors with a row for each worker are listed in `per_worker`.
    Its own options are listed in `options` and kept in attributes of the same names. To use it by name, register it:
    `SORTERS["mine"] = Mine`.
    """

    kind = "sorter"
    decisive = ("workers", "units", "dim", "seed", "initial")
    progress = ("epoch", "position")  # mid-epoch too
    base_per_worker = ("current",)
    label: str = ""  # in figures and tables
    options: tuple[str, ...] = ()  # what `make_sorter` takes for it beyond workers, units, dim, seed and group
    needs_gradients: bool = False  # set to True for every subclass that defines `look`
    takes_shards: bool = False  # whether gradients may come divided by coordinates: see `observe_shard`
    takes_parts: bool = False  # whether a gradient may come in parts: see `observe_parts`
    amid_pair: bool = False  # whether shards are kept that wait for those of the next position

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.needs_gradients = cls.look is not Sorter.look

    def __init__(
        self,
        *,
        workers: int,
        units: int,
        dim: int,
        seed: int = 0,
        initial: str = "random",
        group: WorkerGroup | None = None,
    ) -> None:
        one_of("initial", initial, INITIAL)
        self._join(workers, group)
        self.units, self.dim = count("units", units, 1), count("dim", dim, 1)
        self.seed, self.initial = random_seed("seed", seed), initial
        self._remember_settings()
        self.epoch = -1
        self.position = 0  # units observed in this epoch
        self.current = torch.empty(self.local_workers, 0, dtype=torch.long)  # this epoch's order

    # -- for users ----------------------------------------------------------------------------------------------------

    def order(self, epoch: int, *, cut_short: bool = False) -> Tensor:
        """This epoch's order, LongTensor [local workers, units]. Epochs come in sequence: 0, 1, 2, … Asking again for
        the current epoch returns the same order.

        cut_short: the last epoch may have ended early. Units that were not observed in it keep their order, in the
        middle of this one.
        """
        if is_whole(epoch) and epoch == self.epoch + 1:
            if self.needs_gradients and self.epoch >= 0 and self.position < self.units and not cut_short:
                unseen = f"{self.units - self.position} of {self.units} units have not been observed"
                raise CdgrabError(f"order({epoch}) needs all gradients of epoch {self.epoch}: {unseen}")
            self.current = self.next_order(self.epoch + 1)
            self.epoch, self.position = self.epoch + 1, 0
        elif not is_whole(epoch) or epoch != self.epoch or self.epoch < 0:
            raise CdgrabError(f"epochs come in sequence: expected order({self.epoch + 1}), got order({shown(epoch)})")
        return self.current.clone()

    def observe(self, positions: Tensor | Sequence[int], gradients: Tensor, *, unseen: bool = False) -> None:
        """Tell the sorter the gradients of the next units of this epoch.

        positions [k]: consecutive positions of this epoch's order, starting where the last call ended;
        gradients [local workers, k, dim], which are copied. A refused call changes nothing; after an interrupted one
        `position` tells how much was taken.
        Any split of the epoch into calls gives the same result: to the last bit on a CPU with numba. On a GPU, or
        without numba if coordinates are divided between processes, rows are decided in blocks, and inner products are
        summed in an order that depends on where the blocks are split. An inner product within rounding error of its
        limit (some 1e-13 of |r|·|v|) may then fall on the other side.
        unseen: skip the finiteness check, which would wait for the GPU; the caller checks later.
        """
        positions, gradients, finite = observed(positions, gradients, unseen)
        self._check(positions, gradients, finite)
        if not len(positions):
            return
        end = self.position + len(positions)
        if self.needs_gradients:
            self.look(gradients)
        self.position = end

    def observe_parts(self, gradient: Parts) -> None:
        """Like `observe` for the next unit of the only worker here, with a gradient that is written where the sorter
        wants it; only if `takes_parts`. On a CPU the caller checks whether it is finite; on a GPU, where that would
        take too long, what is not finite counts as zero, in the difference of a pair too."""
        raise NotImplementedError

    def observe_shard(self, shard: Tensor) -> None:
        """Like `observe` for the next position, with gradients that are already divided: this process's coordinates of
        all workers' gradients, [workers, width]; only if `takes_shards`. The caller checks whether they are finite."""
        self.begin_shares(shard)
        self.take_share(slice(0, shard.shape[1]), shard)
        self.end_shares()

    def begin_shares(self, like: Tensor) -> None:
        """The next position's shard follows in pieces, as they come out of a backward pass. All processes call this
        together. like: a tensor of a type that can hold them, on their device."""
        raise CdgrabError("this sorter takes whole gradients: they are not divided between processes")

    def decide_late(self, group: WorkerGroup) -> None:
        """Before the first gradients: after `begin_shares` all processes call `decide_due` and then `make_room`, when
        they have time to wait. group: the channel of the thread in which they do that."""

    def decide_due(self) -> None:
        """What has waited for it since `decide_late`. If it fails on one process, others wait for it."""

    def make_room(self) -> None:
        """For the shares that follow; see `decide_late`."""

    def kept_shares(self) -> tuple[Tensor, bool] | None:
        """What is kept of the shard, [workers, width], and whether pieces are subtracted from it instead of taking its
        place: whoever does that himself need not call `take_share`. None: he has to."""
        return None

    def take_share(self, place: slice, share: Tensor, add: bool = False) -> None:
        """A piece of the shard, [workers, length of place]; place: where among the coordinates of this process. Any
        order will do, but every coordinate must come; if it comes again, `add` it. Another thread may call this."""
        raise NotImplementedError

    def end_shares(self) -> None:
        """All pieces have been taken. All processes call this together."""
        raise NotImplementedError

    def divide(self, division: Division) -> None:
        """Take shards that are divided in another way, from now on. All processes call this together, between two
        positions. What is kept of shards moves along, which takes memory if `amid_pair`."""
        raise NotImplementedError

    def by_shards(self, units_per_mean: int, sparse: bool) -> bool:
        """Shards or whole gradients: whether the shards that processes exchange to compute the mean gradient are all
        that the sorter needs. They are if each process contributes one unit to the mean and nothing is left out."""
        return self.takes_shards and self.local_workers * units_per_mean == 1 and not sparse

    def drain(self) -> None:
        """Wait until all signs are decided; the next order then needs no other process. All processes call this."""

    # -- for subclasses -----------------------------------------------------------------------------------------------

    def next_order(self, epoch: int) -> Tensor:
        """The order [local workers, units] of `epoch`. The last epoch's order is `self.current`, empty in epoch 0."""
        raise NotImplementedError

    def look(self, gradients: Tensor) -> None:
        """Gradients [local workers, k, dim], of any floating-point type, of the k positions from `self.position` on.
        They belong to the caller: copy what you want to keep."""
        raise NotImplementedError

    def random_order(self, epoch: int) -> Tensor:
        """A fresh independent permutation for each worker, [local workers, units]."""
        return torch.stack([streams.permutation(self.units, self.seed, "order", w, epoch) for w in self.worker_ids()])

    def first_order(self) -> Tensor:
        """As `initial` says: random, or 0, 1, 2, …"""
        if self.initial == "identity":
            return torch.arange(self.units).repeat(self.local_workers, 1)
        return self.random_order(0)

    # -- checks -------------------------------------------------------------------------------------------------------

    def fields(self, *, epoch: int, position: int) -> dict[str, Field]:
        units = self.units if epoch >= 0 else 0
        every = Field(INT64, (units,), 0, max(0, units - 1), _are_permutations, "every unit once")
        return {"position": Field((int,), least=0, most=units), "current": every}

    def _check(self, positions: Tensor, gradients: Tensor, finite: bool) -> None:
        if self.epoch < 0:
            raise CdgrabError("observe() comes after order(0): no epoch has been started")
        if positions.dim() != 1 or (positions.is_floating_point() and len(positions)):
            raise CdgrabError(f"positions must be a list of whole numbers, got {_brief(positions.flatten())}")
        shape, got = [self.local_workers, len(positions), self.dim], list(gradients.shape)
        if got != shape:
            raise CdgrabError(f"gradients must have shape [workers, positions, dim] = {shape}, got {got}")
        end = self.position + len(positions)
        if not torch.equal(positions.cpu().long(), torch.arange(self.position, end)) or end > self.units:
            expected = f"go on from {self.position} and end before {self.units}"
            raise CdgrabError(f"positions must {expected}, got {_brief(positions)}")
        if not finite:
            raise NotFiniteError(f"gradients at positions {_brief(positions)} are not finite floating-point numbers")


def _are_permutations(rows: Tensor) -> bool:
    every = torch.arange(rows.shape[1], device=rows.device)
    return torch.equal(rows.sort(1).values, every.expand_as(rows))


def _brief(positions: Tensor) -> str:
    values = positions.tolist()
    return str(values) if len(values) <= 4 else f"[{values[0]}, {values[1]}, …, {values[-1]}]"
