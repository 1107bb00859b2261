"""Rows whose coordinates are divided among processes, for the tests of kernels: threads take their places."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from cdgrab.balance import kernels


class Shards:
    """Threads in place of processes that hold so many coordinates each, one at work at a time: Triton's interpreter is
    not for several."""

    def __init__(self, widths):
        self._widths, self._held, self._turn = widths, [None] * len(widths), threading.Lock()
        self._everybody = threading.Barrier(len(widths), timeout=60)

    def balance(self, balance_divided, rows, running, limits):
        """The signs that each of them finds, and the running sum of all."""
        parts = zip(rows.split(self._widths, 2), running.split(self._widths, 1), strict=True)
        with ThreadPoolExecutor(len(self._widths)) as pool:
            works = [pool.submit(self._work, rank, balance_divided, *part, limits) for rank, part in enumerate(parts)]
        signs, sums = zip(*(work.result() for work in works), strict=True)
        return signs, torch.cat(sums, 1)

    def _work(self, rank, balance_divided, rows, running, limits):
        def total(products):
            return products.copy_(sum(self._gather(rank, products)))

        def settle(few, at, its_limits):
            whole, r = (torch.cat(self._gather(rank, part), 1) for part in (few, at))
            return kernels.balance(whole[None], r, its_limits[None])[0]

        running = running.clone()
        with self._turn:
            try:
                return balance_divided(rows, running, limits, total, settle, sum(self._widths)), running
            except Exception:
                self._everybody.abort()  # nobody waits for who has failed
                raise

    def _gather(self, rank, tensor):
        self._held[rank] = tensor.clone()
        self._wait()
        found = list(self._held)
        self._wait()
        return found

    def _wait(self):
        self._turn.release()
        try:
            self._everybody.wait()
        finally:
            self._turn.acquire()
