"""What all share that average gradients and send less: checks, what is still owed, statistics and state.

Every worker adds its gradient to what it has not sent yet (error feedback). With momentum correction, as in Deep
Gradient Compression (Lin et al. 2018, arXiv 1712.01887), it adds its own momentum instead, so that no optimiser has to
apply momentum to values that come late. With momentum masking, as there, the momentum of what is sent starts anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from cdgrab.checks import MOST, all_finite, count, is_dense, number, one_of, shape
from cdgrab.errors import CdgrabError, NotFiniteError
from cdgrab.runtime.fields import Field
from cdgrab.runtime.group import WorkerGroup
from cdgrab.runtime.state import Values, WorkerState

Parts = Sequence[tuple[slice, Tensor]]  # pieces of gradients, each with its place in the whole
# options that came later, and the values that change nothing
UNSAID = {"momentum_correction": 0.0, "momentum_masking": True, "warm_up_steps": 0, "warm_up_density": 0.25}


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


def summed_bytes(workers: int, size: int) -> int:
    """The bytes that a worker sends when all workers sum `size` bytes in a ring."""
    return 2 * (workers - 1) * size // workers


class Compressor(WorkerState):
    """A subclass implements `reduce` and `reduce_parts`."""

    kind = "sparsifier"
    decisive = ("workers", "dim", "density")
    progress = ("iteration",)
    base_per_worker = ("_residual", "_momentum")
    label: str = ""
    options: tuple[str, ...] = ("error_feedback",)  # what `make_sparsifier` takes beyond workers, dim, density, group

    def __init__(
        self,
        *,
        workers: int,
        dim: int,
        density: float = 0.01,
        error_feedback: bool = True,
        momentum_correction: float = 0.0,
        momentum_masking: bool = True,
        group: WorkerGroup | None = None,
    ) -> None:
        self._join(workers, group)
        self.dim = count("dim", dim, 1)
        one_of("error_feedback", error_feedback, (True, False))
        self.density, self.error_feedback = number("density", density, above=0, at_most=1), error_feedback
        self.momentum_correction = number("momentum_correction", momentum_correction, at_least=0, below=1)
        one_of("momentum_masking", momentum_masking, (True, False))
        self.momentum_masking = momentum_masking
        if self.momentum_correction and not error_feedback:
            raise CdgrabError("momentum_correction needs error_feedback=true: momentum that is not sent must wait")
        if not self.momentum_correction and not momentum_masking:
            raise CdgrabError("momentum_masking=false needs momentum_correction: there is no momentum to mask")
        self.stats = Stats()
        self.selected: list[Tensor] = []  # the coordinates that each of all workers selected in the last call
        self._momentum = torch.empty(self.local_workers, 0)
        self._remember_settings()
        self.iteration = 0
        self._residual = torch.empty(self.local_workers, 0)  # allocated when the first gradients arrive

    def reduce(self, gradients: Tensor) -> Tensor:
        """gradients [local workers, dim] -> the update [dim]. All processes call this together. A refused call changes
        nothing, on any process."""
        raise NotImplementedError

    def reduce_parts(self, parts: Parts, dtype: torch.dtype) -> None:
        """`reduce` for a process with one worker, in place: its gradient is in parts, and the update is written over
        them. dtype: of the whole."""
        raise NotImplementedError

    def mean_density(self, steps: int) -> float:
        """The mean of what was wanted in the last steps."""
        return self.density

    @contextmanager
    def holding_back(self, places: Sequence[slice]) -> Iterator[None]:
        """What is owed to these coordinates waits: whatever is sent to them in this context is lost."""
        kept = [name for name in self.base_per_worker if getattr(self, name).numel()]
        owed = [(name, place, getattr(self, name)[:, place].clone()) for name in kept for place in places]
        for name, place, _ in owed:
            getattr(self, name)[:, place] = 0
        try:
            yield
        finally:
            for name, place, values in owed:
                now = getattr(self, name)
                now[:, place] += values.to(now)

    # -- what is owed -------------------------------------------------------------------------------------------------

    def _accumulate(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """[local workers, dim]: residuals plus gradients, or plus momentum. With error feedback this is the tensor of
        the residuals itself. parts: pieces of the gradient of one worker, or the gradients of all [local workers, dim].
        """
        first = parts[0][1]
        if not self.error_feedback and first.numel() == self.local_workers * self.dim:
            return first.to(_wide(dtype)).reshape(self.local_workers, self.dim)  # nobody changes it
        device = first.device
        if self.error_feedback:
            self._residual = self._kept(self._residual, dtype, device)
        if self.momentum_correction:
            self._momentum = self._kept(self._momentum, dtype, device).mul_(self.momentum_correction)
            return self._residual.add_(_added(self._momentum, parts))
        return _added(self._residual if self.error_feedback else self._zeros(dtype, device), parts)

    def _kept(self, values: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Where, and in the type in which, gradients of this type are accumulated."""
        return values.to(device, _wide(dtype)) if values.numel() else self._zeros(dtype, device)

    def _zeros(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(self.local_workers, self.dim, dtype=_wide(dtype), device=device)

    # -- state --------------------------------------------------------------------------------------------------------

    def fields(self, *, iteration: int) -> dict[str, Field]:
        kept = self.dim if iteration and self.error_feedback else 0
        values = Field((torch.float32, torch.float64), (kept,))
        momentum = {"_momentum": values} if self.momentum_correction else {}
        return {"iteration": Field((int,), least=0, most=MOST), "_residual": values} | momentum

    def _values(self) -> tuple[dict[str, Tensor], Values]:
        per_worker, common = super()._values()
        return per_worker | ({"_momentum": self._momentum} if self.momentum_correction else {}), common

    def _identity(self) -> dict:
        """States from before there were these options are still good where they are off."""
        return {name: value for name, value in super()._identity().items() if UNSAID.get(name) != value}

    # -- checks -------------------------------------------------------------------------------------------------------

    def _checked(self, gradients: Tensor) -> Tensor:
        if not is_dense(gradients) or not gradients.is_floating_point():
            raise CdgrabError("gradients must be a dense tensor of floating-point numbers, which are in memory")
        shape("gradients", gradients, {"workers": self.local_workers, "dim": self.dim})
        gradients = gradients.detach()
        self._refuse_not_finite([gradients])
        return gradients

    def _refuse_not_finite(self, parts: Sequence[Tensor]) -> None:
        finite = _all_finite(parts)
        if self.group.world_size > 1:  # all processes refuse together
            mine = torch.tensor([finite], dtype=torch.uint8, device=parts[0].device)
            finite = bool(self.group.gather(mine).all())
        if not finite:
            raise NotFiniteError(f"gradients must be finite; those of iteration {self.iteration} are not")

    def _checking_bytes(self) -> int:
        """Sent for that check: one byte to every other worker."""
        return self.workers - 1


def _added(whole: Tensor, parts: Parts) -> Tensor:
    for place, part in parts:
        whole[:, place].view_as(part).add_(part)
    return whole


def _all_finite(parts: Sequence[Tensor]) -> bool:
    """As `all_finite`; a GPU is asked only once."""
    return all_finite(torch.stack([part.sum().double() for part in parts])) or all(map(all_finite, parts))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In 16 bits small residuals would be lost."""
    return torch.promote_types(dtype, torch.float32)


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """In this type; a number beyond its range becomes the largest, not infinity."""
    most = torch.finfo(dtype).max
    return values if values.dtype == dtype else values.clamp(-most, most).to(dtype)
