"""What a sparsifier is: the workers' gradients in, one averaged update with few non-zero coordinates out.

Every worker adds its gradient to what it has not sent yet (error feedback), and selects coordinates. All workers send
their values at every coordinate that anyone selected (the union), and set what they sent to zero. The exchange lives
here; which coordinates a worker selects is up to the subclasses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cdgrab.checks import count, number
from cdgrab.errors import CdgrabError
from cdgrab.runtime.mean import Averager, tree_sum
from cdgrab.sparsify.compressor import UNSAID, Compressor, Parts, Stats, rounded, summed_bytes


def wanted(density: float, dim: int) -> int:
    """Coordinates to send: density · dim rounded down, at least one."""
    return max(1, int(round(density * dim, 6)))  # in binary, 0.29 · 100 is a little less than 29


def warming_up(first: float, density: float, steps: int, iteration: int) -> float:
    """The density that is wanted in an iteration: exponentially from `first` to `density` in so many steps."""
    return density if iteration >= steps else first * (density / first) ** (iteration / steps)


class Sparsifier(Compressor):
    """A subclass implements `select` and, if it adapts, `prepare` and `learn`.

    Tensors, numbers and lists that it keeps in attributes are saved and restored automatically; tensors with a row for
    each worker are listed in `per_worker`. Its own options are listed in `options` and kept in attributes of the same
    names. To use it by name, register it: `SPARSIFIERS["mine"] = Mine`.
    """

    options: tuple[str, ...] = (*Compressor.options, *UNSAID)
    exclusive: bool = False  # workers never select the same coordinate

    def __init__(self, *, warm_up_steps: int = 0, warm_up_density: float = 0.25, **settings) -> None:
        """warm_up_steps: in so many steps the wanted density falls from `warm_up_density` to `density`."""
        self.warm_up_steps = count("warm_up_steps", warm_up_steps, 0)
        self.warm_up_density = number("warm_up_density", warm_up_density, above=0, at_most=1)
        super().__init__(**settings)
        if self.warm_up_steps and self.warm_up_density < self.density:
            raise CdgrabError(
                f"warm_up_density must be at least density = {self.density:g}, got {self.warm_up_density:g}"
            )

    # -- the interface ------------------------------------------------------------------------------------------------

    def reduce(self, gradients: Tensor) -> Tensor:
        """gradients [local workers, dim] -> the update [dim]: the average over all workers at the union, 0 elsewhere.

        All processes call this together. A refused call changes nothing, on any process.
        """
        gradients = self._checked(gradients)
        union, sent = self._exchange([(slice(0, self.dim), gradients)], gradients.dtype)
        return gradients.new_zeros(self.dim).index_copy_(0, union, sent)

    def reduce_parts(self, parts: Parts, dtype: torch.dtype) -> None:
        """`reduce` for a process with one worker, in place: its gradient is in parts, and the update is written over
        them. dtype: of the whole. Reads and writes memory half as often as `reduce`."""
        self._refuse_not_finite([part for _, part in parts])
        union, sent = self._exchange(parts, dtype)
        union, order = union.sort()
        sent, edges = sent[order], [edge for place, _ in parts for edge in (place.start, place.stop)]
        edges = iter(torch.searchsorted(union, torch.tensor(edges, device=union.device)).tolist())
        for (place, part), first, last in zip(parts, edges, edges, strict=False):
            flat = part.view(-1).zero_() if part.is_contiguous() else part.new_zeros(part.numel())
            flat.index_copy_(0, union[first:last] - place.start, sent[first:last].to(part.dtype))
            if not part.is_contiguous():
                part.copy_(flat.view_as(part))

    def density_at(self, iteration: int) -> float:
        """The density that is wanted then."""
        return warming_up(self.warm_up_density, self.density, self.warm_up_steps, iteration)

    def mean_density(self, steps: int) -> float:
        warm = range(max(0, self.iteration - steps), min(self.iteration, self.warm_up_steps))
        return self.density + sum(self.density_at(iteration) - self.density for iteration in warm) / max(1, steps)

    @property
    def target(self) -> int:
        """How many coordinates are wanted in this iteration."""
        return wanted(self.density_at(self.iteration), self.dim)

    def _exchange(self, parts: Parts, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The coordinates that are sent, and their averages as the types of these parts can hold them."""
        accumulated = self._accumulate(parts, dtype)
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
        if self.momentum_correction and self.momentum_masking:
            self._momentum.index_fill_(1, union, 0)
        counts = [len(indices) for indices in selected]
        value_bytes = self.summed_bytes(len(union) * sums.element_size())
        self._record(counts, len(union), self._checking_bytes() + extra_bytes + index_bytes + value_bytes)
        self.selected = selected
        self.learn(counts)
        self.iteration += 1
        return union, sent

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

    @property
    def _index_type(self) -> torch.dtype:
        return torch.int32 if self.dim < 2**31 else torch.int64

    def summed_bytes(self, size: int) -> int:
        """The bytes that a worker sends when all workers sum `size` bytes."""
        return summed_bytes(self.workers, size)

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


def _as_held(average: Tensor, union: Tensor, parts: Parts) -> Tensor:
    """Averages at these coordinates, each rounded to the type of the part that it belongs to."""
    kinds = {part.dtype for _, part in parts}
    if len(kinds) == 1:
        return rounded(average, *kinds)
    parts = sorted(parts, key=lambda part: (part[0].start, part[0].stop))
    which = torch.bucketize(union, torch.tensor([place.start for place, _ in parts], device=union.device), right=True)
    for kind in kinds:
        here = torch.tensor([False, *(part.dtype == kind for _, part in parts)], device=union.device)
        average = torch.where(here[which], rounded(average, kind).to(average.dtype), average)
    return average
