"""Start processes as torchrun does, through its Python interface.

The rendezvous finds a free port. When one rank dies, torchrun stops the others.
"""

from __future__ import annotations

import logging
import sys
import uuid

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from cdgrab.errors import MissingError, Stopped, first_line


def torchrun(
    arguments: list[str],
    processes: int,
    nnodes: int = 1,
    rdzv: str = "localhost:0",
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
        rdzv_backend="c10d",
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
