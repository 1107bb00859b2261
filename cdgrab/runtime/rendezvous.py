"""How the processes of a run find each other, also after torchrun has restarted them.

torchrun's store survives a restart, and still holds the addresses of dead processes. So the processes first agree on a
new name: rank 0 proposes one and every other rank answers with a random token. Rank 0 confirms the tokens it has read.
A rank that finds its own token among them knows that the proposal is not left over from before.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from cdgrab.errors import MissingError, first_line
from cdgrab.runtime.sockets import address_of

PATIENCE = 120.0  # seconds that all processes have to start
PAUSE = 0.02  # seconds between two polls
GONE = "the process that keeps the store no longer answers"


def meet(rank: int, world_size: int, timeout: float | None) -> None:
    """Connect the default process group with gloo; a collective that takes longer than `timeout` seconds fails."""
    limit = timedelta(seconds=timeout) if timeout else None
    try:
        _listen_on_one_card(world_size)
        if _has_agent():
            store = dist.PrefixStore(_agree(agents_store(PATIENCE), rank, world_size), agents_store(PATIENCE))
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        else:
            dist.init_process_group("gloo", timeout=limit)
    except (OSError, RuntimeError, ValueError) as error:
        raise MissingError(f"the {world_size} processes cannot connect ({first_line(error)})") from error


def _listen_on_one_card(world_size: int) -> None:
    """gloo otherwise listens at the address of the host's name. If all processes are on this host, only the loopback
    interface will do; if not, the card that leads to the first host, unless another is named."""
    cards = [name for _, name in socket.if_nameindex()]
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        found = [card for card in cards if card in ("lo", "lo0")]
    elif "GLOO_SOCKET_IFNAME" not in os.environ and _has_agent():
        with socket.create_connection(_agents_address(), PATIENCE) as way:
            found = [card for card in cards if address_of(card) == way.getsockname()[0]]
    else:
        return
    if found:
        os.environ["GLOO_SOCKET_IFNAME"] = found[0]


def _agents_address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def agents_store(patience: float) -> dist.TCPStore:
    """A separate connection to torchrun's store."""
    limit = timedelta(seconds=patience)
    return dist.TCPStore(*_agents_address(), is_master=False, wait_for_workers=False, timeout=limit)


def note_beginning(name: str) -> None:
    """Tell processes that torchrun starts later that this run has begun and may be resumed."""
    if _has_agent():
        with _answering():
            agents_store(PATIENCE).set(f"cdgrab/begun/{name}", "1")


def has_begun(name: str) -> bool:
    with _answering():
        return _has_agent() and agents_store(PATIENCE).check([f"cdgrab/begun/{name}"])


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise MissingError(GONE) from error


def _has_agent() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _agree(store: dist.Store, rank: int, world_size: int) -> str:
    """A name agreed on by the processes running now, and by no earlier ones."""
    me, deadline = uuid.uuid4().hex, time.monotonic() + PATIENCE
    if rank == 0:
        name, answers = me, {}
        store.set("cdgrab/proposed", name)
        while len(answers) < world_size - 1:
            for other in set(range(1, world_size)) - answers.keys():
                if answer := _look(store, f"cdgrab/{name}/{other}"):
                    answers[other] = answer
            _wait(deadline, f"rank {min(set(range(1, world_size)) - answers.keys(), default=0)}")
        store.set(f"cdgrab/{name}/confirmed", " ".join(answers.values()))
        return name
    while True:
        if name := _look(store, "cdgrab/proposed"):
            store.set(f"cdgrab/{name}/{rank}", me)
            if me in (_look(store, f"cdgrab/{name}/confirmed") or "").split():
                return name
        _wait(deadline, "rank 0, or one that it waits for,")


def _look(store: dist.Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def _wait(deadline: float, who: str) -> None:
    if time.monotonic() > deadline:
        raise MissingError(f"{who} did not reach the rendezvous within {PATIENCE:.0f} seconds")
    time.sleep(PAUSE)
