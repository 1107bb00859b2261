"""A process that is lost amid an epoch, or fails alone. Runs in each of several processes."""

import os
import signal
import time
from contextlib import nullcontext
from unittest import mock

import torch.distributed as dist
from dropin_cases import train
from shared_checks import started
from shared_obstacles import switched_off

from cdgrab.runtime import group as workers
from cdgrab.sorters.coordinated import CoordinatedBalancer

STEPS = 8  # before that
WAYS = ("shared memory", "pipes")


def lost(rank, folder, how, way):
    """The last of three processes is killed, or has no memory to decide signs. Each leaves a file with its steps, the
    seconds until it noticed, and the error."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=3)
    workers.WHOLE, steps = 0, []
    with switched_off() if way == "pipes" else nullcontext():
        model, sampler = started(options={"buffer_mb": 1e-4})  # signs are decided in every pair

    def note(_):
        steps.append(time.monotonic())
        if rank < 2 or len(steps) < STEPS:
            return
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        mock.patch.object(CoordinatedBalancer, "decide", side_effect=MemoryError("no room")).start()

    try:
        train(model, sampler, note=note)
    except Exception as error:
        (folder / str(rank)).write_text(f"{len(steps)} {time.monotonic() - steps[-1]} {error}")
    os._exit(0)
