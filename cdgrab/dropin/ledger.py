"""Batches given out, backward passes seen: every batch must have one, else gradients are taken for those of others."""

from __future__ import annotations

import warnings

from cdgrab.dropin.refusals import REENTRANT
from cdgrab.errors import CdgrabError


class Pace:
    """Of one epoch. Loaders read ahead, but never further than when the first gradient of the epoch came."""

    def __init__(self) -> None:
        self.backwards = 0  # passes of the unit that is under way
        self.start(0)

    def start(self, done: int) -> None:
        """An epoch start_backward, or goes on after `done` batches."""
        self.yielded = done
        self._ahead: int | None = None

    def backward(self, done: int) -> None:
        """Another pass start_backward; `done`: batches of complete units."""
        ahead = self.yielded - done - self.backwards - 1
        if ahead < 0:
            raise CdgrabError(
                f"more backward passes than the {self.yielded} batches so far: call backward once per batch, and "
                f"others inside `with sampler.paused():` ({REENTRANT})"
            )
        if self._ahead is not None and ahead > self._ahead:
            warnings.warn(
                "a batch had no backward pass, and the next one's gradient counts as its own: call sampler.skip() "
                "for batches that are left out",
                stacklevel=5,
            )
        self._ahead = ahead if self._ahead is None else max(ahead, self._ahead)
