"""Running sums, and the rules that decide the signs of rows against them. Sums and inner products are float64 whatever
the rows are, so that orders do not depend on rounding."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from cdgrab import streams
from cdgrab.balance import kernels
from cdgrab.balance.rules import kh_penalties
from cdgrab.runtime.fields import FLOAT64, Field
from cdgrab.runtime.group import WorkerGroup

BLOCK_BYTES = 2**20  # of rows; smaller blocks spend more time on calls than on arithmetic
BRIEF = 3 * 2**24  # bytes of a row: with 23 and 45 MB on an H200, another stream takes the host more time than it saves


class Balancer:
    """Every worker balances its own rows (PairBal of GraB and ID-GraB): one running sum each, zero at an epoch's start.

    decisions: rows per worker and epoch. A row's limit is 0 (greedy), or `width` times a draw from Unif[−1, 1] that
    depends on seed, worker, epoch and row alone, and is drawn again instead of stored.
    """

    tensors: tuple[str, ...] = ("running",)  # attributes that are the state
    common: bool = False  # whether all workers share the state; otherwise each local worker has its own
    plain: bool = True  # whether rows are balanced as they are, against limits that are known before

    def __init__(
        self, *, group: WorkerGroup, dim: int, decisions: int, seed: int, rule: str, width: float, buffer_bytes: float
    ) -> None:
        self.group, self.dim, self.decisions = group, dim, decisions
        self._alone = self.plain and group.workers == 1
        self._seed, self._width = seed, width if rule == "walk" else None
        self.block_bytes = min(BLOCK_BYTES, buffer_bytes / 2)  # rows that are worth a call of `decide`
        self.running = torch.zeros(self.sums(), self.coordinates(), dtype=torch.float64)
        self._limits = torch.zeros(decisions, group.workers, dtype=torch.float64)
        self._kernels: ModuleType | None = None
        self._found: Tensor | None = None  # signs of rows that were decided alone, [decisions, 1], on a GPU
        self._row_by_row = None  # what decides these: a `RowByRow`, for the sum and the limits of now

    def sums(self) -> int:
        """How many running sums this process keeps."""
        return self.group.local_workers

    def coordinates(self) -> int:
        """How many coordinates of them."""
        return self.dim

    def start(self, epoch: int, observed: int) -> None:
        """Start an epoch. observed: how many units of the last one were observed."""
        self.running.zero_()
        self.draw(epoch)

    def draw(self, epoch: int) -> None:
        """This epoch's limits, [decisions, all workers]."""
        if self._width is not None and epoch >= 0:
            every = range(self.group.workers)
            draws = [streams.symmetric_uniform(self.decisions, self._seed, "walk", w, epoch) for w in every]
            self._limits = self._width * torch.stack(draws, dim=1)

    def size(self, rows: Tensor) -> int:
        """Bytes of these rows, the same on every process: all of them must cut the epoch into the same blocks."""
        return rows.nbytes

    def decide(self, first: int, rows: Tensor) -> Tensor:
        """Signs [n, local workers] of the epoch's rows first, first + 1, …; rows [n, local workers, dim]."""
        if self.is_quick(rows):
            self.decide_row(first, rows)
            return self.found(first, first + 1)
        limits = self.prepare(first, rows)[:, self.group.local]
        return self._kernels.balance(rows, self.running, limits)

    def decide_row(self, first: int, row: Tensor) -> None:
        """`decide` for a single row on a GPU, with little to do for the host: in small models that takes longer than
        what the GPU has to do. `found` tells the sign."""
        self._move_to(row.device)
        decide = self._row_by_row
        if decide is None or decide.running is not self.running or decide.limits is not self._limits:
            self._found = torch.empty(self.decisions, 1, dtype=torch.int8) if self._found is None else self._found
            self._found = self._found.to(row.device)
            self._row_by_row = decide = self._kernels.RowByRow(self.running, self._limits, self._found)
        decide(row, first)

    def found(self, first: int, end: int) -> Tensor:
        """Signs [n, 1] of the epoch's rows from `first` to `end`, which `decide_row` has decided."""
        return self._found[first:end]

    def is_brief(self, row: Tensor) -> bool:
        """Whether this row, on a GPU, is not worth another stream."""
        return row.nbytes <= BRIEF

    def cleaned(self, rows: Tensor) -> Tensor:
        """On a GPU, these rows with zeros for what is not finite; if they are decided by themselves, that is left to
        the kernel."""
        left = not rows.is_cuda or (self.is_quick(rows) and 2 * self.size(rows) > self.block_bytes)
        return rows if left else rows.nan_to_num_(0.0, 0.0, 0.0)

    def is_quick(self, rows: Tensor) -> bool:
        """Whether this is a single row, and there is a kernel for one: blocks of rows need larger matrices and more
        launches."""
        alone = self._alone and rows.is_cuda and rows.shape[0] == 1
        return alone and hasattr(kernels.for_device(rows.device), "RowByRow")

    def prepare(self, first: int, rows: Tensor) -> Tensor:
        """The limits of rows first, first + 1, …, [n, all workers], on the device of the rows, as is the state then."""
        self._move_to(rows.device)
        return self._limits[first : first + len(rows)]

    def _move_to(self, device: torch.device) -> None:
        """The state and all limits at once: every copy to a GPU waits until it is idle."""
        if self._kernels is None or self.running.device != device:
            self._kernels = kernels.for_device(device)
            for name in self.tensors:
                setattr(self, name, getattr(self, name).to(device))
        if self._limits.device != device:
            self._limits = self._limits.to(device)

    def local(self, signs: Tensor) -> Tensor:
        """The signs that `decide` returned, of this process's workers: [n, local workers]."""
        return signs

    def values(self) -> dict[str, Tensor]:
        """The state."""
        return {name: getattr(self, name) for name in self.tensors}

    def fields(self) -> dict[str, Field]:
        """What the state must look like; see `WorkerState.fields`."""
        return {name: Field(FLOAT64, (1, self.dim) if self.common else (self.dim,)) for name in self.tensors}

    def load(self, values: dict[str, Tensor], epoch: int) -> None:
        for name, value in values.items():
            setattr(self, name, value)
        self._kernels = self._row_by_row = None
        self.draw(epoch)


class CentredBalancer(Balancer):
    """GraB (Lu et al. 2022, arXiv 2205.10733, Algorithm 4) in every worker: rows are gradients, from which the mean of
    the last epoch (0 in the first) is subtracted before they are balanced."""

    tensors = ("running", "stale_mean", "fresh_sum")
    plain = False

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.stale_mean, self.fresh_sum = torch.zeros_like(self.running), torch.zeros_like(self.running)

    def start(self, epoch: int, observed: int) -> None:
        if observed:  # otherwise keep the older mean
            self.stale_mean, self.fresh_sum = self.fresh_sum / observed, torch.zeros_like(self.fresh_sum)
        super().start(epoch, observed)

    def decide(self, first: int, rows: Tensor) -> Tensor:
        limits = self.prepare(first, rows)[:, self.group.local]
        return self._kernels.balance_centred(rows, self.running, self.stale_mean, self.fresh_sum, limits)


class HalvingBalancer(Balancer):
    """KH-SGD (Carrell et al. 2025, arXiv 2502.12063) in every worker: a random threshold that adapts to the rows seen.

    `epochs` is the length of the run: the failure probability `delta` is spread over all of it.
    """

    tensors = ("running", "q")
    plain = False

    def __init__(self, *, epochs: int, delta: float, **settings) -> None:
        super().__init__(**settings | {"rule": "walk", "width": 1.0})  # limits are then the draws themselves
        self._epochs, self._delta = epochs, delta
        self.q = torch.zeros(self.group.local_workers, dtype=torch.float64)

    def start(self, epoch: int, observed: int) -> None:
        self.q.zero_()
        super().start(epoch, observed)

    def draw(self, epoch: int) -> None:
        super().draw(epoch)
        self._penalties = kh_penalties(self.decisions, epoch + 1, self._epochs, self._delta)

    def fields(self) -> dict[str, Field]:
        return super().fields() | {"q": Field(FLOAT64, (), least=0.0)}

    def decide(self, first: int, rows: Tensor) -> Tensor:
        draws = self.prepare(first, rows)[:, self.group.local]
        self._penalties = self._penalties.to(rows.device)
        penalties = self._penalties[first : first + len(rows)]
        return self._kernels.balance_kh(rows, self.running, self.q, penalties, draws)
