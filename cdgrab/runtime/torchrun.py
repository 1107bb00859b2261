"""Start processes as torchrun does, through its Python interface. When one rank dies, torchrun stops the others.

torch's own rendezvous listens on every interface, and unpickles what anybody stores there. This one listens at one
address only, the loopback interface's if there is one host, and hosts exchange nothing but numbers.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.launcher import api
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from cdgrab.errors import MissingError, Stopped, first_line

MEETING = "cdgrab"  # the name of its rendezvous
PATIENCE = 600.0  # seconds that hosts wait for each other
PAUSE = 0.05  # seconds between two looks
LAST_WORDS = 10  # seconds that processes get to end when they have nothing to save
CLOSED, TICKETS = "closed", "tickets"
ELSEWHERE = (errno.EADDRNOTAVAIL, errno.EADDRINUSE)  # another host's address, another launcher's port


class Meeting(RendezvousHandler):
    """Hosts take tickets from the first one, which keeps the store; `hosts` of them make a round. When processes have
    failed somewhere, that host takes a ticket of the next round, and the others see it waiting."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._name, self._hosts, self._round = parameters.run_id, parameters.max_nodes, -1
        self._address, self._port = _address(parameters.endpoint) if parameters.endpoint else ("127.0.0.1", 0)
        listening, limit = self._listening(), timedelta(seconds=PATIENCE)
        self._first = listening is not None
        keeping = {}
        if listening:
            self._port = listening.getsockname()[1]
            keeping = {"is_master": True, "master_listen_fd": listening.detach()}
        self._store = TCPStore(self._address, self._port, timeout=limit, wait_for_workers=False, **keeping)

    def _listening(self) -> socket.socket | None:
        try:
            return socket.create_server((self._address, self._port))
        except OSError as error:
            if error.errno in ELSEWHERE:
                return None
            raise MissingError(f"cannot listen at {self._address}:{self._port} ({error.strerror})") from error

    def next_rendezvous(self) -> RendezvousInfo:
        """The first host always has rank 0: torchrun lets that one end last."""
        self._round, number = divmod(self._store.add(TICKETS, 1) - 1, self._hosts)
        if self._first:
            self._store.set(f"first/{self._round}", str(number))
        deadline = time.monotonic() + PATIENCE
        while self._waiting() < 0:
            if self.is_closed():
                raise RendezvousClosedError("another host has ended")
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(f"{-self._waiting()} of them did not come within {PATIENCE:.0f} seconds")
            time.sleep(PAUSE)
        rank = (number - int(self._store.get(f"first/{self._round}"))) % self._hosts
        store = PrefixStore(f"{self._name}/{self._round}", self._store)
        return RendezvousInfo(store, rank, self._hosts, RendezvousStoreInfo(self._address, self._port))

    def _waiting(self) -> int:
        """Hosts that have come since this one's round was complete; negative: that are missing in it."""
        return self._store.add(TICKETS, 0) - (self._round + 1) * self._hosts

    def num_nodes_waiting(self) -> int:
        return max(0, self._waiting())

    def is_closed(self) -> bool:
        return self._store.check([CLOSED])

    def set_closed(self) -> None:
        self._store.set(CLOSED, "1")

    def shutdown(self) -> bool:
        with contextlib.suppress(DistError):  # the first host has ended
            self.set_closed()
        return True

    def get_backend(self) -> str:
        return MEETING

    def get_run_id(self) -> str:
        return self._name

    @property
    def use_agent_store(self) -> bool:
        return True


class Agent(LocalElasticAgent):
    """Ends processes in its own way."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        started, context = super()._start_workers(worker_group), self._pcontext
        context._close = partial(_close, context, context._close)
        return started


def _close(context: SubprocessContext, close: Callable, death_sig: signal.Signals, timeout: int) -> None:
    """A process that stands still would not hear that it shall end: it is woken. If one has died, or found another
    missing, the others have nothing to save any more, and are not waited for."""
    processes = [handler.proc for handler in context.subprocess_handlers.values()]
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGCONT)
    lost = any(code is not None and (code < 0 or code == MissingError.status) for code in (p.poll() for p in processes))
    close(death_sig=death_sig, timeout=min(timeout, LAST_WORDS) if lost else timeout)


rendezvous_handler_registry.register(MEETING, Meeting)
api.LocalElasticAgent = Agent


def _address(endpoint: str) -> tuple[str, int]:
    """Where the first host is reached."""
    host, _, port = endpoint.rpartition(":")
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise MissingError(f"the hosts cannot meet at {endpoint} ({error.strerror})") from error
    if address.startswith("127.") and host != "localhost" and not host.startswith("127."):
        raise MissingError(f"{host} is {address} here, where other hosts cannot reach it: rdzv needs its real address")
    return address, int(port)


def torchrun(
    arguments: list[str],
    processes: int,
    nnodes: int = 1,
    rdzv: str = "",
    name: str | None = None,
    restarts: int = 0,
) -> int:
    """`torchrun --nproc-per-node=processes` with Python arguments. Returns 0, or the first failing rank's status."""
    for logger in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]:
        logging.getLogger(logger).setLevel(logging.CRITICAL)  # some have a level of their own
    config = LaunchConfig(
        min_nodes=nnodes,
        max_nodes=nnodes,
        nproc_per_node=processes,
        run_id=name or uuid.uuid4().hex,
        rdzv_backend=MEETING,
        rdzv_endpoint=rdzv,
        max_restarts=restarts,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, entrypoint=sys.executable)(*arguments)
        return 0
    except ChildFailedError as error:
        return next(iter(error.failures.values())).exitcode
    except (RendezvousError, DistError) as error:
        raise MissingError(f"the hosts do not meet at {rdzv} ({first_line(error)})") from error
    except SignalException as error:
        raise Stopped(error.sigval, "the launcher was asked to stop") from None
