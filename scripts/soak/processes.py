"""Processes that can be killed cheaply: forks of this one, which has imported everything; and whole commands."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from cdgrab.balance import kernels
from experiments import early
from experiments.store.files import ROOT
from scripts.reliability import die_with_parent

PATIENCE = 0.1  # seconds after which torchrun notices that a process has ended
JUMPS = 1e6  # seconds by which a clock jumps at most
LIMIT, HANGS = 240.0, 256  # seconds after which a process counts as hanging, and the status of one that does


class Processes:
    """What they print goes through a pipe: files might be on a disk that is full."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        self.printed, self._began = "", time.monotonic()

    def pids(self) -> list[int]:
        """Those of the ranks that are alive."""
        raise NotImplementedError

    def statuses(self) -> set[int]:
        raise NotImplementedError

    def look_after(self) -> None:
        """Called again and again until they have ended."""

    def over(self) -> bool:
        alive = self.pids()
        with contextlib.suppress(BlockingIOError):
            self.printed += os.read(self._reading, 2**20).decode(errors="replace")
        return not alive

    def settle(self) -> set[int]:
        """Wait for the end; returns exit statuses."""
        deadline, hangs = time.monotonic() + LIMIT, set()
        while not self.over():
            self.look_after()
            if time.monotonic() > deadline:
                send(self.pids(), signal.SIGKILL)
                hangs = {HANGS}
            time.sleep(0.005)
        os.close(self._reading)
        return self.statuses() | hangs


class Forks(Processes):
    """One process for each rank, calling `work`, which returns an exit status. They find each other through a store of
    this process, as torchrun's do. clock: their time of day jumps."""

    def __init__(self, work: Callable[[], int], ranks: int, clock: random.Random | None = None) -> None:
        super().__init__()
        listening, each = socket.create_server(("127.0.0.1", 0)), multiprocessing.get_context("fork").Process
        common = ranks, listening.getsockname()[1], self._writing, clock
        self._ranks = [each(target=_rank, args=(work, rank, *common)) for rank in range(ranks)]
        for process in self._ranks:
            process.start()
        os.close(self._writing)
        self._told = False
        self._store = dist.TCPStore(  # after the forks: it has threads
            *listening.getsockname(), is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )

    def pids(self) -> list[int]:
        return [process.pid for process in self._ranks if process.is_alive()]

    def statuses(self) -> set[int]:
        del self._store
        return {process.exitcode for process in self._ranks}

    def look_after(self) -> None:
        """As torchrun does: if a process has failed, the others are told to end, and killed if they stand still."""
        if not self._told and any(process.exitcode for process in self._ranks):
            time.sleep(PATIENCE)
            send(self.pids(), signal.SIGTERM)
            self._told = True
        if self._told:
            send(filter(_stands_still, self.pids()), signal.SIGKILL)


class Command(Processes):
    """Python with these arguments, which starts the ranks."""

    def __init__(self, arguments: list[str]) -> None:
        super().__init__()
        out = {"stdout": self._writing, "stderr": self._writing, "cwd": ROOT, "preexec_fn": die_with_parent}
        self._process = subprocess.Popen([sys.executable, *arguments], start_new_session=True, **out)
        os.close(self._writing)

    def pids(self) -> list[int]:
        if self._process.poll() is not None:
            return []
        pid = self._process.pid
        ranks = list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
        return ranks or [pid]

    def statuses(self) -> set[int]:
        return {self._process.returncode}


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def load_kernels() -> None:
    """Once, compiled if need be, instead of in every fork."""
    compiled = kernels.optional("cpu")
    sums, limits = torch.zeros(3, 1, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        for dim in (1, compiled.LONG):
            rows, running = torch.zeros(1, 3, dim, dtype=dtype), torch.zeros(1, dim, dtype=torch.float64)
            kernels.balance(rows, running, limits)
            kernels.balance_divided(rows, running, limits)
        for count in (2, 4):
            compiled.mean_of_rows(torch.zeros(count, 1, dtype=dtype), torch.zeros(1, dtype=dtype))
            part = [(0, 0, 0)]
            kernels.optional("shared").average_and_take(torch.zeros(count, 1, dtype=dtype).unbind(), part)
    compiled.balance_centred(sums[None], sums, sums, sums, limits)
    compiled.balance_kh(sums[None], sums, sums[:, 0], limits[0, :1], limits)
    compiled.add_to_sketches(sums, torch.zeros(1, dtype=torch.int16), sums)


def _stands_still(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _rank(work: Callable[[], int], rank: int, ranks: int, port: int, out: int, clock: random.Random | None) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    early.listen()
    for fd in (1, 2):
        os.dup2(out, fd)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
    if ranks > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        agent = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": True, "GLOO_SOCKET_IFNAME": "lo"}
        os.environ.update({name: str(value) for name, value in (names | agent).items()})
    if clock:
        usual = time.time
        time.time = lambda: usual() + clock.uniform(-JUMPS, JUMPS)
    sys.exit(work())
