"""What somebody who watches the exchange of a model's gradients has to offer."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from cdgrab.runtime.division import Division
from cdgrab.runtime.group import WorkerGroup


class Observer(Protocol):
    """What becomes of the gradients besides their mean. All methods but those for single shares are called by all
    processes together, and all but those, `decide_due` and `make_room` in the thread of the backward pass. `division`
    may be asked for in another thread."""

    def begin(self, like: Tensor) -> str:
        """A step begins. Returns what is wanted of its gradients: shares, whole (of this process), a look at them in
        .grad, or nothing."""

    def decide_late(self, group: WorkerGroup) -> None:
        """Before the first step: `decide_due` and `make_room` are called in every step in which shares are wanted,
        while gradients are on their way, in the thread of this channel; see `Sorter.decide_late`."""

    def decide_due(self) -> None:
        """What has waited for it."""

    def make_room(self) -> None:
        """For this step's shares."""

    def take_share(self, place: slice, share: Tensor, *, mean: Tensor | None = None) -> None:
        """This process's coordinates of everybody's gradients, [processes, width], and their mean, if it is there; see
        `Sorter.take_share`."""

    def kept_shares(self) -> tuple[Tensor, bool] | None:
        """For who writes there himself, instead of calling `take_share`; see `Sorter.kept_shares`."""

    def took_shares(self, finite: bool) -> None:
        """Some were written there; finite: whether all numbers were. Others have been replaced by zeros."""

    def look(self) -> None:
        """This process's gradients are in .grad. Then DDP puts the mean there."""

    @property
    def division(self) -> Division | None:
        """How shares are divided; None: nobody wants any."""

    @property
    def amid_pair(self) -> bool:
        """Whether shares are kept, which would have to move if they were divided in another way."""

    def divide(self, division: Division) -> None:
        """Shares are divided in this way from now on; see `Sorter.divide`."""

    def end(self, whole: Tensor | None) -> None:
        """The step is complete; whole [dim]: this process's gradient, if it was wanted."""
