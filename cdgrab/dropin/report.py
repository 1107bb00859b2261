"""Does the order help? What the gradients of an epoch say about the order in which they came."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cdgrab import streams
from cdgrab.dropin.diagnosis import Diagnosis, held_bytes
from cdgrab.herding import parallel_herding_bound
from cdgrab.sorters.balancing import BalancingSorter
from cdgrab.sorters.base import Sorter

PERMUTATIONS = 40  # random orders to compare with
FEWEST = 16  # units of all workers; with fewer a random order may be as good as any
SURE = 0.95  # a learnt order is balanced if it is better than this share of the random ones
DEVIATIONS = 2  # by which the share of signs that are still right must exceed chance to be no accident
DEAR = 0.25  # of the epoch's time: an order that takes more has to save epochs

Epoch = tuple[Tensor, Tensor]  # rows [workers, seen, coordinates] of the first units of an order [workers, units]
WORTH, NOT_WORTH, CANNOT_TELL = "worth it", "not worth it", "cannot tell yet"


@dataclass(frozen=True)
class Report:
    """What `OrderedBatchSampler.report` has found out about the last complete epoch; `print` it.

    The herding bound (CD-GraB, arXiv 2302.00845, equation 8) says how far partial sums of gradients stray from their
    mean, and is what theory wants small. It is computed in float64 from `coordinates` of the `dim` coordinates, drawn
    at random: with fewer than all, bounds are those of these coordinates, and signs are judged by inner products over
    them only. Gradients are those that were seen, at weights that change during the epoch. A small bound promises
    nothing: whether training gains anything, only runs beside `sorter="d_rr"` tell.
    """

    verdict: str  # worth it, not worth it, or cannot tell yet
    sentence: str  # why
    epoch: int = -1
    units: int = 0  # of each worker, as far as their gradients were seen
    workers: int = 0
    coordinates: int = 0
    dim: int = 0
    herding_used: float | None = None  # the bound of the order that was used
    herding_random: float | None = None  # of random orders of the same gradients, in the mean
    better_than: float | None = None  # the share of these random orders that have a larger bound
    promised: float | None = None  # this order's bound over a random one's, for the gradients that it was learnt from
    signs: int = 0  # that made this order, as far as they can be judged
    signs_right: float | None = None  # the share of them that still balances; 0.5 if nothing survives
    signs_right_when_made: float | None = None  # the same for the gradients that it was learnt from
    seconds: float = 0.0  # on gradients and orders, in this process; a GPU's own time is not counted
    epoch_seconds: float = 0.0
    memory_bytes: int = 0  # kept by the sampler on this process, this report's own data included

    @property
    def kept(self) -> float | None:
        """The used order's bound over a random one's; compare with `promised`."""
        return None if not self.herding_random else self.herding_used / self.herding_random

    def __str__(self) -> str:
        if self.herding_used is None:
            return f"{self.verdict}: {self.sentence}"
        rows = {
            "seen": f"{self.workers} × {self.units} units, {self.coordinates:,} of {self.dim:,} coordinates",
            "herding bound": f"{self.herding_used:.4g}; {self.herding_random:.4g} in random order "
            f"(larger for {_percent(self.better_than)} of {PERMUTATIONS} such orders)",
            "over a random one's": f"{_percent(self.kept)} now, {_percent(self.promised)} when it was learnt",
            "signs right": f"{_percent(self.signs_right)} of {self.signs} now, "
            f"{_percent(self.signs_right_when_made)} when they were made",
            "cost": f"{self.seconds:.3g} s of {self.epoch_seconds:.3g} s, {self.memory_bytes / 2**20:.3g} MiB",
        }
        left_out = {"over a random one's": self.promised is None, "signs right": self.signs_right is None}
        lines = [f"  {name:<21}{text}" for name, text in rows.items() if not left_out.get(name)]
        return "\n".join([f"{self.verdict}, after epoch {self.epoch}: {self.sentence}", *lines])


def made(diagnosis: Diagnosis, sorter: Sorter | None, model: object) -> Report:
    """The report of the last epoch that is complete. model: an `ObservedModel`. All processes call this."""
    done = [record for record in diagnosis.records if record.rows is not None]
    if done and done[-1] is diagnosis.records[-1] and done[-1].seen < sorter.units:
        done.pop()  # it is still under way
    found = {"memory_bytes": held_bytes([diagnosis, sorter, model, model and model.hook])}
    seed = 0 if sorter is None else sorter.seed
    if done:
        last, (rows, order) = done[-1], diagnosis.gathered(done[-1])
        found |= {"epoch": last.epoch, "seconds": last.seconds, "epoch_seconds": last.ended - last.began}
        found |= {"dim": diagnosis.dim} | examined(rows, seed)
        if len(done) > 1 and done[-2].epoch == last.epoch - 1 and sorter.needs_gradients:
            pairs, common = None, False  # somebody's own sorter
            if isinstance(sorter, BalancingSorter):
                pairs, common = sorter.units_per_row == 2, sorter.balancer.common
            found |= compared((rows, order), diagnosis.gathered(done[-2]), pairs, common, seed)
    verdict, sentence = _verdict(Report("", "", **found), sorter)
    return Report(verdict, sentence, **found)


def _verdict(found: Report, sorter: Sorter | None) -> tuple[str, str]:
    if sorter is not None and not sorter.needs_gradients:
        return CANNOT_TELL, "this sorter's orders are not learnt from gradients: try sorter='cd_grab'"
    if found.herding_used is None:
        return CANNOT_TELL, "no epoch has been seen from its start to its end yet"
    if found.promised is None:
        return CANNOT_TELL, "the last epoch's order was not learnt yet, or not from what was seen: ask after the next"
    if found.units * found.workers < FEWEST or 2 * found.units < sorter.units:
        return CANNOT_TELL, f"gradients of {found.units} units per worker are too few"
    right = "" if found.signs_right is None else f"; {_percent(found.signs_right)} of its signs still balance"
    balanced = f"the learnt order's herding bound is {_percent(found.kept)} of a random one's{right}"
    if found.better_than < SURE:
        balanced += " (50 % is chance)" if right else ""
        survives = right and (found.signs_right - 0.5) * 2 * math.sqrt(found.signs) > DEVIATIONS
        if found.kept < 1 or survives:
            return CANNOT_TELL, f"{balanced}; random orders may be as good: ask after other epochs, too"
        return NOT_WORTH, balanced
    if found.seconds > DEAR * found.epoch_seconds:
        dear = _percent(found.seconds / found.epoch_seconds)
        return CANNOT_TELL, f"{balanced}, but orders take {dear} of the time: compare losses with sorter='d_rr'"
    return WORTH, f"{balanced}; what that does to the loss, only a comparison with sorter='d_rr' tells"


def examined(rows: Tensor, seed: int) -> dict:
    """What an epoch alone tells; rows [workers, units, coordinates], in the order in which they came."""
    used, random = herding_bounds(rows, seed)
    better = sum(used < one for one in random) / PERMUTATIONS
    sizes = dict(zip(("workers", "units", "coordinates"), rows.shape, strict=True))
    return sizes | {"herding_used": used, "herding_random": sum(random) / PERMUTATIONS, "better_than": better}


def compared(now: Epoch, before: Epoch, pairs: bool | None, common: bool, seed: int) -> dict:
    """What the epoch before tells about this one's order. pairs, common: see `signs_right`; pairs is None if there are
    no signs."""
    (rows, order), (rows_before, order_before) = now, before
    by_unit, known = in_place(rows_before, order_before)
    here = known.gather(1, order)  # the same number in every row
    learnt_from = by_unit.gather(1, order[:, :, None].expand(-1, -1, rows.shape[2]))[here]
    promised, random = herding_bounds(learnt_from.view_as(rows_before), seed)
    found = {"promised": promised * PERMUTATIONS / sum(random) if any(random) else None}
    if pairs is not None:
        signs, old = signs_between(order_before, order), order_before[:, : rows_before.shape[1]]
        by_unit, known = in_place(rows, order)
        again, known = by_unit.gather(1, old[:, :, None].expand(-1, -1, rows.shape[2])), known.gather(1, old)
        again = torch.where(known[:, :, None], again, rows_before)  # as if it had not changed, but not counted
        found["signs_right_when_made"], _ = signs_right(rows_before, signs, torch.ones_like(known), pairs, common)
        found["signs_right"], found["signs"] = signs_right(again, signs, known, pairs, common)
    return found


def in_place(rows: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the first units of an order, by unit, [workers, units, dim], and which are known, [workers, units]."""
    workers, dim, first = len(rows), rows.shape[2], order[:, : rows.shape[1]]
    known = torch.zeros_like(order, dtype=torch.bool).scatter(1, first, True)
    empty = rows.new_zeros(workers, order.shape[1], dim)
    return empty.scatter(1, first[:, :, None].expand(-1, -1, dim), rows), known


def herding_bounds(rows: Tensor, seed: int) -> tuple[float, list[float]]:
    """The herding bound of rows [workers, units, dim] in their order, and those of random orders."""
    workers, units, _ = rows.shape
    orders = (
        torch.stack([streams.permutation(units, seed, "report", worker, number) for worker in range(workers)])
        for number in range(PERMUTATIONS)
    )
    return parallel_herding_bound(rows), [parallel_herding_bound(rows, order) for order in orders]


def signs_between(order: Tensor, following: Tensor) -> Tensor:
    """The signs [workers, units] that turned an order [workers, units] into the following one: the opposite of
    `cdgrab.balance.rules.reorder`. The last unit's is +1: it has the same place with either sign."""
    slots = following.argsort(1).gather(1, order)
    return torch.where(slots <= slots[:, -1:], 1, -1)


def signs_right(rows: Tensor, signs: Tensor, counted: Tensor, pairs: bool, common: bool) -> tuple[float | None, int]:
    """The share of signs that turn a row against the sum of the signed rows before it, as greedy balancing would, and
    of how many.

    rows [workers, n, dim], signs [workers, at least n], counted [workers, n]: in the order for which signs were found.
    pairs: it is differences of consecutive rows that have signs, otherwise rows less their mean; common: all workers
    have one sum, and take turns in rank order.
    """
    if pairs:
        first, second = slice(0, rows.shape[1] // 2 * 2, 2), slice(1, None, 2)
        rows, signs = rows[:, first] - rows[:, second], signs[:, first]
        counted = counted[:, first] & counted[:, second]
    else:
        rows = rows - rows.mean(1, keepdim=True)
        counted = counted & (torch.arange(counted.shape[1]) < signs.shape[1] - 1)  # the last one's sign decides nothing
    signed = rows * signs[:, : rows.shape[1], None]
    if common:
        signed, counted = signed.transpose(0, 1).flatten(0, 1)[None], counted.T.reshape(1, -1)
    right = ((signed.cumsum(1) - signed) * signed).sum(2) <= 0
    right = right[:, 1:][counted[:, 1:]]  # the first has nothing before it
    return float(right.double().mean()) if len(right) else None, len(right)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"
