"""What a sparsifier is: the workers' gradients in, one averaged update with few non-zero coordinates out.

Every worker adds its gradient to what it has not sent yet (error feedback), and selects coordinates. All workers send
their values at every coordinate that anyone selected (the union), and set what they sent to zero. Checks, exchange,
residuals and state live here; which coordinates a worker selects is up to the subclasses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from cdgrab.checks import MOST, all_finite, count, number, one_of, shape
from cdgrab.errors import CdgrabError, NotFiniteError
from cdgrab.runtime.fields import Field
from cdgrab.runtime.group import WorkerGroup
from cdgrab.runtime.mean import Averager, tree_sum
from cdgrab.runtime.state import WorkerState


def wanted(density: float, dim: int) -> int:
    """Coordinates to send: density · dim rounded down, at least one."""
    return max(1, int(round(density * dim, 6)))  # in binary, 0.29 · 100 is a little less than 29


class Stats(dict):
    """Numbers of the last call, by key or as attributes.

    density: of the update; counts: coordinates selected, per worker; threshold: None if there is none;
    imbalance: workers · max(counts) / sum(counts) − 1, the overhead of padding in the exchange of indices (0 if
    nothing is selected);
    bytes: what a worker sends, on average, if every worker is a separate process and collectives are rings.
    """

    def __getattr__(self, name: str) -> object:
        if name in self:
            return self[name]
        raise AttributeError(f"no {name} in the statistics of the last call: {', '.join(self) or 'there was none'}")


class Sparsifier(WorkerState):
    """A subclass implements `select` and, if it adapts, `prepare` and `learn`.

    Tensors, numbers and lists that it keeps in attributes are saved and restored automatically; tensors with a row for
    each worker are listed in `per_worker`. Its own options are listed in `options` and kept in attributes of the same
    names. To use it by name, register it: `SPARSIFIERS["mine"] = Mine`.
    """

    kind = "sparsifier"
    decisive = ("workers", "dim", "density")
    progress = ("iteration",)
    base_per_worker = ("_residual",)
    label: str = ""
    options: tuple[str, ...] = ("error_feedback",)  # what `make_sparsifier` takes beyond workers, dim, density, group
    exclusive: bool = False  # workers never select the same coordinate

    def __init__(
        self,
        *,
        workers: int,
        dim: int,
        density: float = 0.01,
        error_feedback: bool = True,
        group: WorkerGroup | None = None,
    ) -> None:
        self._join(workers, group)
        self.dim = count("dim", dim, 1)
        one_of("error_feedback", error_feedback, (True, False))
        self.density, self.error_feedback = number("density", density, above=0, at_most=1), error_feedback
        self.target = wanted(self.density, self.dim)
        self.stats = Stats()
        self.selected: list[Tensor] = []  # the coordinates that each of all workers selected in the last call
        self._index_type = torch.int32 if self.dim < 2**31 else torch.int64
        self._remember_settings()
        self.iteration = 0
        self._residual = torch.empty(self.local_workers, 0)  # allocated when the first gradients arrive

    # -- the interface ------------------------------------------------------------------------------------------------

    def reduce(self, gradients: Tensor) -> Tensor:
        """gradients [local workers, dim] -> the update [dim]: the average over all workers at the union, 0 elsewhere.

        All processes call this together. A refused call changes nothing, on any process.
        """
        gradients = self._checked(gradients)
        union, sent = self._exchange(self._accumulate(gradients), [(slice(0, self.dim), gradients)])
        return gradients.new_zeros(self.dim).index_copy_(0, union, sent)

    def reduce_parts(self, parts: Sequence[tuple[slice, Tensor]], dtype: torch.dtype) -> None:
        """`reduce` for a process with one worker, in place: its gradient is in parts, each with its place in the whole,
        and the update is written over them. dtype: of the whole. Reads and writes memory half as often as `reduce`."""
        self._refuse_not_finite(_all_finite([part for _, part in parts]), parts[0][1].device)
        union, sent = self._exchange(self._accumulate_parts(parts, dtype), parts)
        union, order = union.sort()
        sent, edges = sent[order], [edge for place, _ in parts for edge in (place.start, place.stop)]
        edges = iter(torch.searchsorted(union, torch.tensor(edges, device=union.device)).tolist())
        for (place, part), first, last in zip(parts, edges, edges, strict=False):
            flat = part.view(-1).zero_() if part.is_contiguous() else part.new_zeros(part.numel())
            flat.index_copy_(0, union[first:last] - place.start, sent[first:last].to(part.dtype))
            if not part.is_contiguous():
                part.copy_(flat.view_as(part))

    def _exchange(self, accumulated: Tensor, parts: Sequence[tuple[slice, Tensor]]) -> tuple[Tensor, Tensor]:
        """The coordinates that are sent, and their averages as the types of these parts can hold them."""
        extra_bytes = self.prepare(accumulated)
        selected, index_bytes = self._share(self.select(accumulated))
        union = self._union(selected)
        sums = tree_sum(accumulated.index_select(1, union))
        average, _ = Averager(self.group, len(union)).average(sums)
        sent = _as_held(average, union, parts)
        if self.error_feedback:
            accumulated.index_fill_(1, union, 0)
            if sent is not average:  # what 16 bits cannot hold is sent later
                accumulated.index_add_(1, union, (average - sent).expand(len(accumulated), -1))
        counts = [len(indices) for indices in selected]
        value_bytes = self.summed_bytes(len(union) * sums.element_size())
        finite_bytes = self.workers - 1  # for the check before: one byte to every other worker
        self._record(counts, len(union), finite_bytes + extra_bytes + index_bytes + value_bytes)
        self.selected = selected
        self.learn(counts)
        self.iteration += 1
        return union, sent

    @contextmanager
    def holding_back(self, places: Sequence[slice]) -> Iterator[None]:
        """What is owed to these coordinates waits: whatever is sent to them in this context is lost."""
        owed = [self._residual[:, place].clone() for place in places if self._residual.numel()]
        for place, _ in zip(places, owed, strict=False):
            self._residual[:, place] = 0
        try:
            yield
        finally:
            for place, values in zip(places, owed, strict=False):
                self._residual[:, place] += values.to(self._residual)

    # -- for subclasses -----------------------------------------------------------------------------------------------

    def select(self, accumulated: Tensor) -> list[Tensor]:
        """accumulated [local workers, dim] -> the coordinates that each of them wants to send. Called between `prepare`
        and `learn`. It must not change what is saved: adapt in `learn`."""
        raise NotImplementedError

    def prepare(self, accumulated: Tensor) -> int:
        """Called before `select`; may communicate. Returns the bytes that a worker sends for it."""
        return 0

    def _share(self, mine: list[Tensor]) -> tuple[list[Tensor], int]:
        """Each local worker's coordinates -> those of all workers, and the bytes that a worker sends for it."""
        everybody = mine
        if self.group.world_size > 1:
            everybody = self.group.gather_uneven([indices.to(self._index_type) for indices in mine])
            everybody = [indices.long() for indices in everybody]
        longest = max(len(indices) for indices in everybody)
        sent = 4 + longest * self._index_type.itemsize  # a count, then padded indices, to each of the others
        return everybody, (self.workers - 1) * sent

    def learn(self, counts: list[int]) -> None:
        """Adapt to what was selected, in the same way on all processes. counts: of all workers."""

    def _threshold(self) -> float | None:
        """The threshold of the last `select`, read before `learn`."""
        return None

    # -- helpers ------------------------------------------------------------------------------------------------------

    def summed_bytes(self, size: int) -> int:
        """The bytes that a worker sends when all workers sum `size` bytes."""
        return 2 * (self.workers - 1) * size // self.workers

    def _record(self, counts: list[int], union: int, sent: int) -> None:
        self.stats = Stats(
            density=union / self.dim,
            counts=counts,
            threshold=self._threshold(),
            imbalance=self.workers * max(counts) / sum(counts) - 1 if any(counts) else 0.0,
            bytes=sent,
        )

    def _union(self, selected: list[Tensor]) -> Tensor:
        if self.exclusive:
            return torch.cat(selected)
        taken = torch.zeros(self.dim, dtype=torch.bool, device=selected[0].device)
        taken[torch.cat(selected)] = True
        return taken.nonzero().squeeze(1)

    def _accumulate(self, gradients: Tensor) -> Tensor:
        """Residuals plus gradients. With error feedback this is the tensor of the residuals itself."""
        if not self.error_feedback:
            return gradients.to(_wide(gradients.dtype))
        return self._residuals(gradients.dtype, gradients.device).add_(gradients)

    def _accumulate_parts(self, parts: Sequence[tuple[slice, Tensor]], dtype: torch.dtype) -> Tensor:
        device = parts[0][1].device
        if not self.error_feedback:
            whole = torch.zeros(1, self.dim, dtype=_wide(dtype), device=device)
        else:
            whole = self._residuals(dtype, device)
        for place, part in parts:
            whole[0, place].view_as(part).add_(part)
        return whole

    def _residuals(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Where, and in the type in which, gradients of this type are accumulated."""
        if not self._residual.numel():
            self._residual = torch.zeros(self.local_workers, self.dim, dtype=_wide(dtype), device=device)
        self._residual = self._residual.to(device, _wide(dtype))
        return self._residual

    def fields(self, *, iteration: int) -> dict[str, Field]:
        kept = self.dim if iteration and self.error_feedback else 0
        residual = Field((torch.float32, torch.float64), (kept,))
        return {"iteration": Field((int,), least=0, most=MOST), "_residual": residual}

    def _checked(self, gradients: Tensor) -> Tensor:
        if not isinstance(gradients, Tensor) or not gradients.is_floating_point():
            raise CdgrabError("gradients must be a tensor of floating-point numbers")
        shape("gradients", gradients, {"workers": self.local_workers, "dim": self.dim})
        gradients = gradients.detach()
        self._refuse_not_finite(all_finite(gradients), gradients.device)
        return gradients

    def _refuse_not_finite(self, finite: bool, device: torch.device) -> None:
        if self.group.world_size > 1:  # all processes refuse together
            mine = torch.tensor([finite], dtype=torch.uint8, device=device)
            finite = bool(self.group.gather(mine).all())
        if not finite:
            raise NotFiniteError(f"gradients must be finite; those of iteration {self.iteration} are not")


def _all_finite(parts: Sequence[Tensor]) -> bool:
    """As `all_finite`; a GPU is asked only once."""
    return all_finite(torch.stack([part.sum().double() for part in parts])) or all(map(all_finite, parts))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In 16 bits small residuals would be lost."""
    return torch.promote_types(dtype, torch.float32)


def _as_held(average: Tensor, union: Tensor, parts: Sequence[tuple[slice, Tensor]]) -> Tensor:
    """Averages at these coordinates, each rounded to the type of the part that it belongs to."""
    kinds = {part.dtype for _, part in parts}
    if len(kinds) == 1:
        return _rounded(average, *kinds)
    parts = sorted(parts, key=lambda part: (part[0].start, part[0].stop))
    which = torch.bucketize(union, torch.tensor([place.start for place, _ in parts], device=union.device), right=True)
    for kind in kinds:
        here = torch.tensor([False, *(part.dtype == kind for _, part in parts)], device=union.device)
        average = torch.where(here[which], _rounded(average, kind).to(average.dtype), average)
    return average


def _rounded(average: Tensor, dtype: torch.dtype) -> Tensor:
    """In this type; a number beyond its range becomes the largest, not infinity."""
    most = torch.finfo(dtype).max
    return average if average.dtype == dtype else average.clamp(-most, most).to(dtype)
