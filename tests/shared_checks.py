"""Called by test_shared_memory.py: what processes of one host find when they average gradients in shared memory."""

import gc
import os
import random
import signal
import time
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from dropin_cases import gathered, parallel, sampler_of, train
from forked import forked
from shared_obstacles import (
    moved,
    no_files,
    no_files_after_all,
    no_files_to_connect,
    no_pipes,
    no_room,
    only_collectives,
    switched_off,
    too_many_on_their_way,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from cdgrab.runtime import averages, division, flows, links, overlap, shared, sockets
from cdgrab.runtime import group as workers
from cdgrab.runtime.connection import connect, disconnect

PROCESSES = (2, 3, 4)
# options of DDP, and of the sampler; the type; numbers up to which pieces are sent whole; the length of pieces
CASES = {
    "plain": ({}, {}, torch.float64, 0, 2**20),
    "pieces": ({}, {}, torch.float32, 0, 270),
    "short": ({}, {}, torch.float32, 60, 400),
    "views": ({"gradient_as_bucket_view": True}, {}, torch.float32, 0, 2**20),
    "unused": ({"find_unused_parameters": True}, {}, torch.float64, 0, 2**20),
    "whole": ({}, {"sorter": "id_grab_pair"}, torch.float32, 0, 2**20),
    "half": ({}, {}, torch.bfloat16, 0, 300),
}
FEW = ("plain", "pieces", "short")
COMPRESSED = {"attach": {"compress": "bf16"}, "whole": 800}


class Uneven(nn.Module):
    """Seven layers of different sizes, which DDP puts into as many buckets. late: one process takes its time, whichever
    it is, wherever it is."""

    def __init__(self, dtype=torch.float32, late=False):
        super().__init__()
        torch.manual_seed(1)
        widths = (6, 5, 11, 7, 3, 9, 4, 2)
        self.layers = nn.ModuleList(nn.Linear(*sizes).to(dtype) for sizes in zip(widths, widths[1:], strict=False))
        self._dtype, self._late = dtype, random.Random(dist.get_rank()) if late else None

    def forward(self, inputs):
        hidden = inputs.to(self._dtype)
        for layer in self.layers:
            hidden = layer(hidden.tanh())
            if self._late:
                hidden.register_hook(lambda _: time.sleep(self._late.choice((0, 0, 0, 0.02))))
        return hidden


class Nested(Uneven):
    """The backward pass of all layers but the first runs inside another one."""

    def forward(self, inputs):
        return checkpoint(self._rest, self.layers[0](inputs), use_reentrant=True)

    def _rest(self, hidden):
        for layer in self.layers[1:]:
            hidden = layer(hidden.tanh())
        return hidden


def main(folder):
    for processes in PROCESSES:
        forked(processes, check, folder / str(processes))


def check(path):
    connect(dist_size())
    found = {name: both_ways(*CASES[name]) for name in (CASES if dist.get_world_size() == 3 else FEW)}
    if dist.get_world_size() == 3:
        found |= {
            "without numba": without_numba(),
            "room": trained(no_room, late=True),
            "files": trained(no_files),
            "too few files": trained(no_files_after_all),
            "files on their way": trained(too_many_on_their_way),
            "too few files to connect": trained(no_files_to_connect),
            "moved": trained(moved),
            "failed": failed(),
            "nested": nested(),
            "crosswise": crosswise(),
            "fork": closed_beside_a_fork(),
            "gone": gone(),
            "bf16": trained(attach={"compress": "bf16"}),
            "off": trained(switched_off),
            "collectives": trained(only_collectives),
            "no pipes": trained(no_pipes),
            "compressed": [trained(around, **COMPRESSED) for around in (ExitStack, only_collectives)],
            "crosswise, collectives": crosswise(only_collectives, whole=2**20),
            "one owner": trained(**one_owner()),
        }
    if dist.get_rank() == 0:
        torch.save(found, path)
    dist.barrier()
    disconnect()


def dist_size():
    return int(os.environ["WORLD_SIZE"])


def started(
    wrap=None, options=None, dtype=torch.float32, whole=0, piece=2**20, late=False, attach=None, network=Uneven
):
    workers.WHOLE, overlap.PIECE, division.PART = whole, piece, 3
    averages.CHUNK, flows.CHUNK = 7, 60
    model = parallel(network(dtype, late), **wrap or {})
    return model, sampler_of(**options or {}).attach(model, **attach or {})


@contextmanager
def counted():
    """An entry for each step in which the first bucket was averaged in shared memory."""
    steps, average = [], shared.SharedBucket.average

    def noted(bucket, *arguments):
        steps.extend([1] if bucket._number == 0 else [])
        return average(bucket, *arguments)

    with mock.patch.object(shared.SharedBucket, "average", noted):
        yield steps


def nested():
    """As `trained`, before the first epoch, in shared memory and through pipes."""
    found = []
    for around in (ExitStack, switched_off):
        with counted() as steps, around():
            model, _ = started(network=Nested)
            optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(8):
                torch.manual_seed(10 * step + dist.get_rank())
                optimiser.zero_grad()
                model(torch.randn(4, 6)).square().sum().backward()
                optimiser.step()
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        found.append(gathered((weights, len(steps))))
    return found


def trained(around=None, **how):
    """Weights, batches, bytes sent in the last steps, and in how many steps the first bucket was averaged in shared
    memory, by process."""
    sent = []
    with counted() as steps, around() if around else ExitStack():
        model, sampler = started(**how)
        visited = train(model, sampler, note=lambda _: sent.append(sampler.group.traffic.sent))
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return gathered((weights, visited, sent[-1] - sent[-5], len(steps)))


def both_ways(wrap, options, dtype, whole, piece):
    how = {"wrap": wrap, "options": options, "dtype": dtype, "whole": whole, "piece": piece}
    return trained(**how), trained(switched_off, **how)


def one_owner():
    """Short buckets, each of which one process keeps. Signs are decided in every pair, and processes are late."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    options = {"process_group": group, "diagnose": 1000, "buffer_mb": 1e-4}
    return {"wrap": {"process_group": group}, "options": options, "whole": 800, "late": True}


def without_numba():
    with mock.patch("cdgrab.dropin.gradients.optional", lambda name: None):
        return trained()


def crosswise(around=ExitStack, **how):
    """In how many steps the first bucket of two models in one backward pass was shared, of which one process has the
    second first; and their weights."""
    with counted() as steps, around():
        (some, mine), (other, its) = (started(**how) for _ in range(2))
        both = [*some.parameters(), *other.parameters()]
        optimiser, inputs = torch.optim.SGD(both, lr=0.1), torch.full((3, 6), float(dist.get_rank()))
        with mine.paused(), its.paused():
            for _ in range(6):
                optimiser.zero_grad()
                first, second = (some, other) if dist.get_rank() else (other, some)
                first, second = first(inputs), second(inputs)
                (first.square().sum() + second.square().sum()).backward()
                optimiser.step()
    return gathered((len(steps), [weight.detach().clone() for weight in both]))


def failed():
    """The errors of a step in which the sorter of one process fails, and whether gradients are equal afterwards."""
    model, sampler = started()
    train(model, sampler, 1, stop_after=4)
    full = mock.patch.object(sampler._model.gradients, "kept_shares", side_effect=MemoryError("no room"))
    told = ""
    with full if dist.get_rank() == 1 else ExitStack():
        try:
            train(model, sampler, 1, stop_after=1)
        except MemoryError as error:
            told = str(error)
    model.zero_grad()
    with sampler.paused():
        model(torch.ones(3, 6, dtype=torch.float64)).sum().backward()
    return gathered((told, [parameter.grad.clone() for parameter in model.parameters()]))


def closed_beside_a_fork():
    """Seconds until the others notice that the first process has closed its sockets, of which a fork has copies: made
    by Python, which closes them, or behind its back."""
    found = []
    for unknown in (False, True):
        linked, child = links.connect(connect(dist.get_world_size())), None
        if unknown:
            del sockets.opened[linked]
        if dist.get_rank() == 0 and (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        dist.barrier()
        start, told = time.monotonic(), ""
        if dist.get_rank() == 0:
            linked.close()
        try:
            linked.wait(links.Notice(links.READY, 0, 0))
        except RuntimeError as error:
            told = str(error)
        found.append((time.monotonic() - start, told))
        dist.barrier()
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        linked.close()
    return gathered(found)


def held():
    """Files in shared memory that are open, mappings of them, and users of connections: for notices, for gradients; and
    how many of these have room for what comes, or know how it is averaged."""
    gc.collect()
    pipes = [one for one in gc.get_objects() if type(one) in (flows.End, flows.Divided)]
    files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return (
        sum("/dev/shm/torch_" in one for one in files),
        sum("/dev/shm/torch_" in one for one in maps),
        len(sockets.opened),
        sum(type(one) is flows.Divided or one._room is not None for one in pipes),
    )


def gone():
    """What a process holds before there is a model, after some steps, after more of them, and when the model is gone
    but the sampler is not; and what has a name in shared memory meanwhile."""
    before = held()
    model, sampler = started()
    train(model, sampler, 1, stop_after=5)
    some = held()
    train(model, sampler)
    names = [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]
    more = held()
    sampler.detach()
    del model
    return gathered((before, some, more, held(), names))
