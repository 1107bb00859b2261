"""Batches that were handed out and whose gradients have not come yet: first in, first out.

A loop may hold several batches at once: loader processes and prefetchers read ahead, some loops fetch the next batch
before the backward pass of the last one, and some go on to the next epoch meanwhile. Gradients come in the order in
which batches were handed out, so each belongs to the oldest batch that the loop still holds. Only which ones it still
holds has to be found out: an epoch may be left early, batches may be looked at and never used.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from cdgrab.checks import MOST
from cdgrab.runtime.fields import INT64, Field, refuse_others
from cdgrab.runtime.group import WorkerGroup


class Batch(NamedTuple):
    """What was handed out: the `index`-th batch of the order of `epoch`; -1: of the one before that of a state."""

    epoch: int
    index: int
    examples: list[int]


class Settled(NamedTuple):
    """What was found out when a backward pass started."""

    dropped: bool = False  # batches of an earlier iteration will have no backward pass
    doubtful: bool = False  # a batch was left out, or else the loop has begun to read further ahead
    extra: bool = False  # a backward pass since the last batch was asked for was one too many


class Outstanding:
    """The batches that a loop still holds.

    What tells is that a loop asks for batches at a steady pace: at every backward pass it is the same number of batches
    ahead, until an iteration's end. How far is seen at the first backward pass of an iteration that begins with nothing
    outstanding. A loop that begins the next iteration and is then just as far ahead still holds the last batches of the
    one before; if it is further ahead by just these, it has dropped them. A loop that gets further ahead in between
    has left out a batch (`sampler.skip()` says so). Asking in vain, after the last batch, counts as asking.

    A loop that gets less far ahead uses up what it holds: batches that it asked for together, or an epoch's last ones.
    If it asks again before the epoch's end and does not get as far ahead as it was at first, it has had a backward pass
    too many.

    A loop that leaves out the first batches of all looks like one that fetches so many ahead, also over the end of an
    epoch, and is taken for one. It is `certain` that it is one if it was seen to ask for a batch between a forward pass
    and its backward pass.
    """

    def __init__(self) -> None:
        self.steady = True  # False: batches are read in a thread, and how far ahead depends on its speed
        self.forget()

    def forget(self, held: int | None = None, certain: bool = False, at_least: bool = True) -> None:
        """Start anew: whatever is outstanding is not used. The others are what `pace` had found out."""
        self.waiting: deque[Batch] = deque()
        self.counts = True  # whether it is certain which batches this iteration's gradients belong to
        self.by_loader = 0  # how many batches the loader of this iteration reads ahead by itself
        self.held = held  # how many more the loop is ahead at a backward pass; None: not known yet
        self.certain = certain  # whether it does fetch batches ahead, or has been asked about it
        self._asks, self._asks_then = 0, -1  # batches asked for in all; until the last forward pass, -1: there was none
        self._at_least = at_least  # whether it may be more in an epoch of more batches
        self._suspected: int | None = None  # how many are held if it was not a batch left out that made them more
        self._older = 0  # how many of those waiting are of earlier iterations
        self._asked = self._used = 0  # in this iteration: batches asked for; those that had a backward pass
        self._read_out = True  # whether the iteration before was read to its end
        self._reads_on = False  # whether both iterations are one for whoever reads them
        self._first = True  # whether this iteration has had no backward pass yet
        self._due = 0  # how many batches the loop is ahead at passes before which it has asked for some
        self._asked_before = 0  # `_asked` at the last backward pass

    @property
    def ahead(self) -> int | None:
        """How many batches the loop and its loader are ahead at a backward pass."""
        return None if self.held is None else self.held + self.by_loader

    @property
    def delivering(self) -> bool:
        """Whether this iteration's loader has been asked for a batch, and did not only read ahead."""
        return self._asked > self.by_loader

    def pace(self) -> dict[str, int | bool]:
        """What `forget` may be told later; empty if nothing is known, which is so for all processes or for none."""
        if self.held is None:
            return {}
        return {"held": max(0, self.held), "certain": self.certain, "at_least": self._at_least or not self.steady}

    def begin(self, read_out: bool, reads_on: bool) -> None:
        """An iteration begins. read_out: the last one came to its end; reads_on: whoever read it reads this one too,
        and so has dropped nothing."""
        if self.held is None and not reads_on:
            self.waiting.clear()  # before the first backward pass somebody only looked at batches
        if not self.waiting and self._suspected is not None:
            self.held = self._suspected  # no batch was left out
        self._suspected, self.counts, self._first = None, True, True
        self._older, self._asked, self._used, self._asked_before = len(self.waiting), 0, 0, 0
        self._read_out, self._reads_on = read_out, reads_on

    def may_be_left_out(self) -> int:
        """When the loop has come to the end of an iteration, and before the next one begins: how many batches at the
        start of the first one it has either left out, or fetched ahead since then."""
        asked = self.certain or not self.steady
        return len(self.waiting) if self.held == len(self.waiting) and not asked else 0

    def may_be_held(self) -> bool:
        """When an iteration begins: whether the loop may still hold the last batches of the one before."""
        return self._reads_on or (self._read_out and 0 < self._older <= (self.ahead or 0))

    def ask(self) -> None:
        """A batch of this iteration is asked for, whether there is one left or not."""
        self._asked += 1
        self._asks += 1

    def forward(self) -> None:
        """There was a forward pass, of whatever."""
        self._asks_then = self._asks

    def late(self) -> list[Batch]:
        """Batches of earlier epochs that are still to be used."""
        waiting, drop = list(self.waiting), self._to_drop() if self._first else 0
        return waiting[drop : self._older] + [batch for batch in waiting[self._older :] if batch.epoch < 0]

    def settle(self, few: bool, delivered: bool) -> Settled:
        """Call this when a backward pass starts. Batches that will not have one are dropped. few: this iteration is
        only the rest of an epoch, and all its batches were handed out; delivered: the loop may have got them all."""
        self.certain |= self.steady and 0 <= self._asks_then < self._asks
        self._asks_then = -1
        drop = self._to_drop() if self._first else 0
        all_dropped = 0 < drop == self._older
        for _ in range(drop):
            self.waiting.popleft()
        self._older -= drop
        ahead, anew = self._is_ahead(), self._first and not self._older
        again, self._asked_before = self._asked > self._asked_before, self._asked
        if self._first and not self._reads_on:
            self._due = ahead
        elif self.steady and again and not delivered and ahead < self._due:
            return Settled(extra=True)
        grown, self._first = self.ahead is not None and ahead > self.ahead, False
        may_grow = not self.steady or (anew and (self._at_least or not self._read_out))
        if grown and not may_grow:
            doubtful, self.counts, self._suspected = self.counts, False, ahead - self.by_loader
            return Settled(all_dropped, doubtful)
        if self.ahead is None or anew or grown:
            self.held, self._at_least = ahead - self.by_loader, few
        return Settled(all_dropped)

    def use(self) -> None:
        """The oldest one has had its backward pass."""
        if self._older:
            self._older -= 1
        else:
            self._used += 1
        self.waiting.popleft()

    def _is_ahead(self) -> int:
        return self._older + self._asked - self._used - 1

    def _to_drop(self) -> int:
        """How many batches of earlier iterations the loop holds no longer, told at the first backward pass."""
        if not self._older or self._reads_on or self.ahead is None:
            return 0
        ahead = self._is_ahead()
        held = self.steady and self._asked <= self.ahead <= ahead
        return ahead - self.ahead if held else self._older


def saved(pace: dict[str, int | bool], late: list[Batch], batch_size: int, group: WorkerGroup) -> dict:
    """For a state: `Outstanding.pace`, and batches of the last epoch that are still to be used. All processes call
    this."""
    rows = torch.full((1, len(late), batch_size), -1)
    for row, batch in zip(rows[0], late, strict=True):
        row[: len(batch.examples)] = torch.tensor(batch.examples)
    return pace | {"late": [batch.index for batch in late], "examples": group.gather(rows)}


def loaded(state: dict, batch_size: int, group: WorkerGroup, examples: int) -> tuple[dict, list[Batch]]:
    """The opposite of `saved`: the pace, and this process's late batches."""
    if isinstance(state, dict) and state.keys() == {"ahead", "late", "examples"}:  # of an earlier version
        state = {"held": state["ahead"], "certain": False, "at_least": True} | state
        del state["ahead"]
    late = state.get("late") if isinstance(state, dict) else None
    count = len(late) if isinstance(late, list) else 0
    pace = {"held": Field((int,), least=0, most=MOST), "certain": Field((bool,)), "at_least": Field((bool,))}
    sizes, words = (group.workers, count, batch_size), "-1 only after the examples of a batch"
    rows = Field(INT64, sizes, -1, examples - 1, _are_batches, words)
    fields = pace | {"late": Field((int,), (count,), 0, MOST), "examples": rows}
    whole = isinstance(state, dict) and state.keys() == fields.keys()
    refuse_others("this state of a sampler", state if whole else {}, fields)
    own = state["examples"][group.rank]
    batches = [Batch(-1, index, row[row >= 0].tolist()) for index, row in zip(late, own, strict=True)]
    return {name: state[name] for name in pace}, batches


def _are_batches(rows: Tensor) -> bool:
    there = rows >= 0
    return bool(there[..., 0].all() and (there[..., 1:] <= there[..., :-1]).all())
