"""Finds out which process is missing when the others wait in vain.

Every few seconds each process writes to torchrun's store which collective it started last. When a collective fails or
takes longer than `timeout`, the others read the store: a process that has written nothing new has died or hangs. If all
of them still write, the one furthest behind is busy with something else.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

from cdgrab.errors import CollectiveError, MissingError
from cdgrab.runtime.group import WorkerGroup
from cdgrab.runtime.rendezvous import GONE, agents_store

MOST_SECONDS = 5.0  # between two beats


@contextlib.contextmanager
def watching(group: WorkerGroup, timeout: float) -> Iterator[None]:
    """A collective that fails in here becomes one sentence that names the missing process."""
    if group.world_size == 1:
        yield
        return
    try:
        heartbeat = Heartbeat(group, timeout)
    except RuntimeError as error:
        raise MissingError(f"{GONE}: rank {group.rank} could not report its presence") from error
    try:
        yield
    except CollectiveError as error:
        raise MissingError(f"{heartbeat.missing()}: rank {group.rank} waited for it in {error.where}") from error
    finally:
        heartbeat.stop()


class Heartbeat:
    """Beats in a thread until `stop`."""

    def __init__(self, group: WorkerGroup, timeout: float) -> None:
        self._group, self._interval = group, min(MOST_SECONDS, timeout / 10)
        self._store = agents_store(max(5.0, self._interval))
        self._beats, self._ended = 0, threading.Event()
        self._beat()
        threading.Thread(target=self._run, daemon=True, name="heartbeat").start()

    def stop(self) -> None:
        self._ended.set()

    def missing(self) -> str:
        """A clause that names the process the others are waiting for."""
        try:
            before = self._all()
            time.sleep(2.5 * self._interval)
            after = self._all()
        except RuntimeError:
            return GONE
        silent = [rank for rank in after if after[rank] == before[rank] and rank != self._group.rank]
        if silent:
            return f"{_ranks(silent)} no longer answer{'s' * (len(silent) == 1)}{_last(after[max(silent)])}"
        behind = min(after, key=lambda rank: after[rank][1])
        return f"rank {behind} has not joined in{_last(after[behind])}"

    def _run(self) -> None:
        with contextlib.suppress(dist.DistError, RuntimeError):  # the store is gone: nothing to report to
            while not self._ended.wait(self._interval):
                self._beat()

    def _beat(self) -> None:
        self._beats += 1
        traffic = self._group.traffic
        self._store.set(self._key(self._group.rank), f"{self._beats} {traffic.calls} {traffic.last}")

    def _all(self) -> dict[int, tuple[int, int, str]]:
        """By rank: beats, collectives started, the name of the last one."""
        found = {}
        for rank in range(self._group.world_size):
            told = "0 0 " if not self._store.check([self._key(rank)]) else self._store.get(self._key(rank)).decode()
            beats, calls, last = told.split(" ", 2)
            found[rank] = int(beats), int(calls), last
        return found

    def _key(self, rank: int) -> str:
        return f"cdgrab/heartbeat/{rank}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _last(told: tuple[int, int, str]) -> str:
    _, calls, name = told
    return f" (its last collective was {name}, number {calls})" if calls else " (it has begun no collective)"
