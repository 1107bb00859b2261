"""Part of `shared_checks`: what keeps processes from averaging in shared memory, or from sending through pipes."""

import errno
import os
import resource
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist

from cdgrab.runtime import links, pipes, shared, sockets


@contextmanager
def switched_off():
    """By one process, for all of them."""
    with mock.patch.dict(os.environ, {links.SWITCH: "0"} if dist.get_rank() == 0 else {}):
        yield


@contextmanager
def no_pipes():
    with mock.patch.dict(os.environ, {pipes.SWITCH: "0"} if dist.get_rank() == 1 else {}):
        yield


@contextmanager
def only_collectives():
    with no_pipes(), switched_off():
        yield


def no_room():
    """On the last process."""
    if dist.get_rank() < dist.get_world_size() - 1:
        return ExitStack()
    full = SimpleNamespace(f_bavail=2**10, f_blocks=2**14, f_frsize=2**12)  # that of docker, almost full
    return mock.patch.object(shared.os, "statvfs", lambda _: full)


@contextmanager
def few_files(spare):
    """The first process may open only so many more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gaps = set(range(soft)) - set(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (sorted(gaps)[spare], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def few_files_in(module, name, spare):
    """While this function of a module runs, on the first process."""
    call = getattr(module, name)

    def with_few(*arguments):
        with few_files(spare) if dist.get_rank() == 0 else ExitStack():
            return call(*arguments)

    return mock.patch.object(module, name, with_few)


def no_files():
    return few_files_in(shared, "share", 3)


@contextmanager
def no_files_after_all():
    """They run out although there seemed to be enough."""
    with no_files(), mock.patch.object(shared, "_may_open", lambda _: True):
        yield


def too_many_on_their_way():
    """As for a user who is not root, of whom a few dozen processes give each other many files at once."""
    refused = OSError(errno.ETOOMANYREFS, "too many references")
    if dist.get_rank():
        return ExitStack()
    return mock.patch.object(links.socket, "send_fds", mock.Mock(side_effect=refused))


@contextmanager
def no_files_to_connect():
    with few_files_in(links, "_link", 0), mock.patch.object(sockets, "PATIENCE", 1.0):
        yield


@contextmanager
def moved():
    """One process finds its buckets elsewhere, in one step."""
    lies_in, asked = shared.SharedBucket._lies_in, []

    def not_once(bucket, buffer):
        asked.append(bucket)
        return len(asked) not in range(10, 17) and lies_in(bucket, buffer)

    with mock.patch.object(shared.SharedBucket, "_lies_in", not_once) if dist.get_rank() == 1 else ExitStack():
        yield
