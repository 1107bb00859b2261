"""What a sorter is: orders out, gradients in. Checks, epochs and state live here, the rules in subclasses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cdgrab import streams
from cdgrab.checks import all_finite, count, is_whole, random_seed
from cdgrab.errors import CdgrabError
from cdgrab.runtime.group import WorkerGroup
from cdgrab.runtime.state import WorkerState

STATE_VERSION = 1


class Sorter(WorkerState):
    """Chooses, epoch by epoch, the order in which each worker visits its units.

    A subclass sets `needs_gradients`, implements `_next_order` and, when it looks at gradients, `_take`. Tensors that
    belong to a worker are listed in `per_worker` (first dimension: this process's workers), tensors that all workers
    share in `shared`; both are attribute names and make up the state.
    """

    kind = "sorter"
    progress = ("epoch", "position")  # mid-epoch too
    label: str = ""
    options: tuple[str, ...] = ()  # what `make_sorter` takes for it beyond workers, units, dim, seed and group
    needs_gradients: bool = False
    takes_shards: bool = False  # whether there is an `observe_shard` to give it gradients divided by coordinates
    per_worker: tuple[str, ...] = ("_order",)

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
        if initial not in ("random", "identity"):
            raise CdgrabError(f"initial must be random or identity, got {initial!r}")
        self.initial = initial
        self.workers, self.units = count("workers", workers, 1), count("units", units, 1)
        self.dim, self.seed = count("dim", dim, 1), random_seed("seed", seed)
        self.group = group or WorkerGroup(workers)
        if self.group.workers != workers:
            raise CdgrabError(f"the worker group has {self.group.workers} workers, the sorter {workers}")
        self.local_workers = self.group.local_workers
        self.epoch = -1
        self.position = 0  # units observed in this epoch
        self._order = torch.empty(self.local_workers, 0, dtype=torch.long)

    # -- the interface ------------------------------------------------------------------------------------------------

    def order(self, epoch: int, *, cut_short: bool = False) -> Tensor:
        """This epoch's order, LongTensor [local workers, units]. Epochs 0, 1, 2, … in sequence; asking again for the
        current epoch gives the same order again.

        cut_short: the epoch before may have ended early. Units that were not observed in it keep their order, in the
        middle of this one.
        """
        if is_whole(epoch) and epoch == self.epoch + 1:
            if self.needs_gradients and self.epoch >= 0 and self.position < self.units and not cut_short:
                raise CdgrabError(
                    f"order({epoch}) needs all gradients of epoch {self.epoch}: "
                    f"{self.units - self.position} of {self.units} units have not been observed"
                )
            self._order = self._next_order(self.epoch + 1)
            self.epoch, self.position = self.epoch + 1, 0
            self._start_epoch()
        elif not is_whole(epoch) or epoch != self.epoch or self.epoch < 0:
            raise CdgrabError(f"epochs come in sequence: expected order({self.epoch + 1}), got order({epoch})")
        return self._order.clone()

    def observe(self, positions: Tensor | Sequence[int], gradients: Tensor, *, unseen: bool = False) -> None:
        """Tell the sorter the gradients of the next units of this epoch.

        positions [k]: consecutive positions of this epoch's order, starting where the last call ended;
        gradients [local workers, k, dim], a copy is taken of whatever has to be kept. A refused call changes nothing;
        after an interrupted one `position` says what was taken.
        Any split of the epoch into calls gives the same result: to the last bit on a CPU, where this process holds all
        coordinates. On a GPU, or divided between processes, rows are decided in blocks whose inner products are added
        up in another order when they are split elsewhere: inner products within rounding (some 1e-13 of |r|·|v|) of
        their limit may then fall on its other side.
        unseen: whether they are finite is for the caller to see, later maybe: to look at them is to wait for a GPU.
        """
        positions, gradients = _tensor(positions, "positions"), _tensor(gradients, "gradients").detach()
        self._check(positions, gradients, unseen)
        if not len(positions):
            return
        if not self.needs_gradients:
            self.position += len(positions)
            return
        for some in gradients.split(self._units_at_once(gradients), dim=1):
            self._take(some)
            self._move_on(some.shape[1])

    def drain(self) -> None:
        """Wait for what is still being decided, so that the next order concerns this process alone. All call this."""

    # -- for subclasses -----------------------------------------------------------------------------------------------

    def _next_order(self, epoch: int) -> Tensor:
        """The order of `epoch`, the last one being `self._order` (empty before the first)."""
        raise NotImplementedError

    def _take(self, gradients: Tensor) -> None:
        """Use gradients [local workers, k, dim], of any floating-point type, of positions `self.position` onwards."""
        raise NotImplementedError

    def _units_at_once(self, gradients: Tensor) -> int:
        """How many units `_take` is given at a time."""
        return gradients.shape[1]

    def _move_on(self, units: int) -> None:
        """These many have been taken. Whatever may be interrupted comes after `position` has moved on."""
        self.position += units

    def _start_epoch(self) -> None:
        """Called when a new epoch's order has been made."""

    def _options(self) -> dict:
        """Settings that change the orders, beyond those of every sorter."""
        return {}

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _worker_ids(self) -> range:
        return range(self.workers)[self.group.local]

    def _random_order(self, epoch: int) -> Tensor:
        """A fresh independent permutation per worker."""
        return torch.stack([streams.permutation(self.units, self.seed, "order", w, epoch) for w in self._worker_ids()])

    def _first_order(self) -> Tensor:
        if self.initial == "identity":
            return torch.arange(self.units).repeat(self.local_workers, 1)
        return self._random_order(0)

    def _identity(self) -> dict:
        return {
            "version": STATE_VERSION,
            "sorter": type(self).__name__,
            "workers": self.workers,
            "units": self.units,
            "dim": self.dim,
            "seed": self.seed,
            "initial": self.initial,
            **self._options(),
        }

    def _check(self, positions: Tensor, gradients: Tensor, unseen: bool) -> None:
        if self.epoch < 0:
            raise CdgrabError("observe() comes after order(0): no epoch has been started")
        if positions.dim() != 1 or (positions.is_floating_point() and len(positions)):
            raise CdgrabError(f"positions must be a list of whole numbers, got {_brief(positions.flatten())}")
        k = len(positions)
        if tuple(gradients.shape) != (self.local_workers, k, self.dim):
            raise CdgrabError(
                f"gradients must have shape [workers, positions, dim] = {[self.local_workers, k, self.dim]}, "
                f"got {list(gradients.shape)}"
            )
        end = self.position + k
        if not torch.equal(positions.cpu().long(), torch.arange(self.position, end)) or end > self.units:
            raise CdgrabError(
                f"positions must go on from {self.position} and end before {self.units}, got {_brief(positions)}"
            )
        if not gradients.is_floating_point() or not (unseen or all_finite(gradients)):
            raise CdgrabError(
                f"gradients must be finite floating-point numbers; those at positions {_brief(positions)} are not"
            )


def _tensor(value: Tensor | Sequence[int], name: str) -> Tensor:
    try:
        return torch.as_tensor(list(value) if isinstance(value, range) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CdgrabError(
            f"{name} must be a tensor or something that becomes one, got {type(value).__name__}"
        ) from error


def _brief(positions: Tensor) -> str:
    values = positions.tolist()
    return str(values) if len(values) <= 4 else f"[{values[0]}, {values[1]}, …, {values[-1]}]"
