"""What `OrderedBatchSampler.report` needs: some coordinates of every gradient, and the time that orders take."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch import Tensor, nn

from cdgrab import streams
from cdgrab.runtime.division import Division
from cdgrab.runtime.group import WorkerGroup
from cdgrab.runtime.shared import Sharing

EPOCHS = 3  # that are remembered: the one under way, the last one, and the one that the last order was learnt from


@dataclass
class Record:
    """An epoch. rows [units, workers seen here, coordinates]: by position in `order`, [1, units]; the first `seen` are
    known."""

    epoch: int
    order: Tensor
    rows: Tensor | None = None
    seen: int = 0
    seconds: float = 0.0  # spent on gradients and orders
    began: float = field(default_factory=time.perf_counter)
    ended: float = 0.0  # with its last gradient; the time for the next order is added

    def put(self, position: int, rows: Tensor) -> None:
        """Rows of the positions from this one on. An epoch that is not observed from its start is left out."""
        if position != self.seen:
            return
        if self.rows is None:
            self.rows = rows.new_zeros(self.order.shape[1], *rows.shape[1:])
        self.seen += len(rows)
        self.rows[position : self.seen] = rows


class Diagnosis:
    """Keeps `size` coordinates of every gradient, drawn at random: all of them if there are no more.

    If gradients come divided among processes, each keeps its part of these coordinates, of all workers' gradients;
    otherwise each keeps its own gradients' (see `gathered`).
    """

    def __init__(self, size: int, seed: int, group: WorkerGroup) -> None:
        self.records: deque[Record] = deque(maxlen=EPOCHS)
        self.dim = 0  # of gradients
        self._size, self._seed, self._group = size, seed, group
        self._places: dict[tuple[int, int], tuple[slice, Tensor]] = {}
        self._chosen = -1, torch.empty(0)  # of so many coordinates, those that are kept
        self._division: Division | None = None  # None: gradients are whole
        self._row: Tensor | None = None  # of the position under way, [workers, coordinates], if it comes in pieces
        self._watch, self._depth, self._entered, self._seen_before = threading.Lock(), 0, 0.0, 0

    def begin_epoch(self, epoch: int, order: Tensor) -> None:
        """order [1, units]. An epoch may begin several times, if only its first batches were looked at."""
        if not self.records or self.records[-1].epoch != epoch:
            self.records.append(Record(epoch, order))

    def forget(self) -> None:
        self.records.clear()

    # -- gradients ----------------------------------------------------------------------------------------------------

    def put(self, position: int, gradients: Tensor) -> None:
        """Whole gradients [k, dim] of this process's worker."""
        self._division, self.dim = None, gradients.shape[1]
        places = self._places_in(slice(0, gradients.shape[1]), gradients.device)[1]
        self._record(position, gradients[:, places][:, None])

    def begin(self, division: Division, like: Tensor) -> None:
        """The next gradients follow in pieces, divided by coordinates."""
        if division != self._division:
            self._division, self._places = division, {}
            self.forget()  # other coordinates than before
            self.dim = sum(division.widths)
        here = self._places_in(slice(0, division.width), like.device)[1]
        self._row = like.new_zeros(self._group.workers, len(here))

    def take(self, place: slice, share: Tensor, add: bool) -> None:
        """See `Sorter.take_share`."""
        where, places = self._places_in(place, share.device)
        part = share.expand(len(self._row), place.stop - place.start)[:, places]
        self._row[:, where] = self._row[:, where] + part if add else part

    def end(self, position: int) -> None:
        """All pieces have been taken."""
        self._record(position, self._row[None])

    def _places_in(self, place: slice, device: torch.device) -> tuple[slice, Tensor]:
        """The coordinates that are kept, among those at `place`: where in a row they go, and where they are found."""
        found = self._places.get((place.start, place.stop))
        if found is None:
            width, parts = (place.stop, 1) if self._division is None else (self._division.width, self._group.world_size)
            if self._chosen[0] != width:  # which takes long
                every = streams.permutation(width, self._seed, "report")
                self._chosen = width, every[: max(1, self._size // parts)].sort().values
            chosen = self._chosen[1]
            first, end = torch.searchsorted(chosen, torch.tensor([place.start, place.stop])).tolist()
            found = slice(first, end), (chosen[first:end] - place.start).to(device)
            self._places[place.start, place.stop] = found
        return found

    def _record(self, position: int, rows: Tensor) -> None:
        if self.records:
            self.records[-1].put(position, rows)

    # -- time ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> None:
        """Several threads may do so at a time."""
        with self._watch:
            if not self._depth:
                self._entered, self._seen_before = time.perf_counter(), self.records[-1].seen if self.records else 0
            self._depth += 1

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._watch:
            self._depth -= 1
            if self._depth or not self.records:
                return
            record, now = self.records[-1], time.perf_counter()
            record.seconds += now - self._entered
            record.ended = now if record.seen > self._seen_before else record.ended + now - self._entered

    # -- for the report -----------------------------------------------------------------------------------------------

    def gathered(self, record: Record) -> tuple[Tensor, Tensor]:
        """Rows [workers, seen, coordinates] in float64, by position, and the order [workers, units], of all workers.
        All processes call this."""
        group, rows = self._group, record.rows[: record.seen].cpu().double()
        order = group.gather(record.order.cpu())
        if group.world_size == 1 or self._division is None:
            return group.gather(rows.transpose(0, 1).contiguous()), order
        parts = group.gather_uneven([rows.flatten()])
        shape = (record.seen, group.workers, -1)
        return torch.cat([part.view(shape) for part in parts if len(part)], dim=2).transpose(0, 1), order


def held_bytes(roots: Iterable[object]) -> int:
    """The memory of all tensors that these objects of the library keep, without parameters of the model."""
    storages, todo, known = {}, list(roots), set()
    while todo:
        item = todo.pop()
        if id(item) in known:
            continue
        known.add(id(item))
        if isinstance(item, Tensor):
            if not isinstance(item, nn.Parameter):
                storage = item.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, list | tuple | deque) and item and not isinstance(item[0], int):
            todo += item
        elif type(item).__module__.startswith("cdgrab.") and not isinstance(item, Sharing):  # DDP's own buckets
            todo += getattr(item, "__dict__", {}).values()
    return sum(storages.values())
