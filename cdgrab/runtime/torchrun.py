"""Start processes as torchrun does, through its Python interface. When one rank dies, torchrun stops the others.

On one host nothing listens beyond the loopback interface. torch's own rendezvous, used for several hosts, listens on
every interface and unpickles what anybody stores there: their network must be trusted.
"""

from __future__ import annotations

import logging
import socket
import sys
import uuid

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from cdgrab.errors import MissingError, Stopped, first_line

ONE_HOST = "one_host"  # the name of its rendezvous


class OneHost(StaticTCPRendezvous):
    """A rendezvous with nobody, and a store for the processes of this host only."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        address, port = listening.getsockname()
        super().__init__(address, port, rank=0, world_size=1, run_id=parameters.run_id, timeout=60)
        self._store = TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )

    def get_backend(self) -> str:
        return ONE_HOST


rendezvous_handler_registry.register(ONE_HOST, OneHost)


def torchrun(
    arguments: list[str],
    processes: int,
    nnodes: int = 1,
    rdzv: str = "",
    name: str | None = None,
    restarts: int = 0,
) -> int:
    """`torchrun --nproc-per-node=processes` with Python arguments. Returns 0, or the first failing rank's status."""
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=nnodes,
        max_nodes=nnodes,
        nproc_per_node=processes,
        run_id=name or uuid.uuid4().hex,
        rdzv_backend=ONE_HOST if nnodes == 1 else "c10d",
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
