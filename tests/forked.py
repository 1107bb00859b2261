"""Processes that share one start of Python: forked when everything is imported, they meet as if started by torchrun."""

import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch._dynamo  # this and the next are imported by DistributedDataParallel, in every process
import torch.distributed as dist
import torch.distributed.tensor
from torch.multiprocessing import start_processes

from experiments import train
from experiments.training.loop import Trainer

STUCK = "CDGRAB_TESTS_STUCK"  # how many seconds a process may take
USUAL = 200  # somewhat less than what a test gets, so that it is the process that stands still which says so


def say_if_stuck():
    """End this process, in a while, with the stacks of its threads. (pytest's own way would wait here for a thread that
    is not there in a fork.)"""
    seconds = float(os.environ.get(STUCK, USUAL))
    timer = threading.Timer(seconds, _say_where, [seconds])
    timer.daemon = True
    timer.start()


def _say_where(seconds):
    os.write(2, f"process {os.getpid()} is ended: it has taken {seconds:g} seconds\n".encode())
    faulthandler.dump_traceback(file=2)
    os._exit(1)


def forked(processes, work, *arguments):
    """Call work(*arguments) in every process; if one fails, the others are ended and its traceback is raised."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    gc.freeze()  # else collecting garbage in a process copies the memory that it shares with this one
    every = (processes, port, work, arguments)
    running = start_processes(_rank, every, processes, join=False, start_method="fork")
    store = dist.TCPStore(  # that of torchrun's agent
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    while not running.join():
        pass
    del store


def _rank(rank, processes, port, work, arguments):
    say_if_stuck()
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    agent = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in (ranks | agent | {"TORCHELASTIC_RUN_ID": port}).items()})
    threading.Thread(target=_let_senders_go_first, daemon=True).start()
    work(*arguments)


def _let_senders_go_first():
    """A thread of gloo that receives goes round and round while one that sends holds their lock. Where processes share
    cores, that takes half of their time."""
    while Path("/proc/self/task").exists():
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended
                if (thread / "comm").read_text().startswith("gloo_tcp_loop"):
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), 15)
        time.sleep(0.3)


@contextmanager
def started(work, *arguments):
    """A fork of this process that calls work(*arguments), and is killed at the end if it is still there."""
    process = multiprocessing.get_context("fork").Process(target=_carried_out, args=(work, arguments))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def elsewhere(work, *arguments):
    """Call work(*arguments) in a process of its own, which has imported what this one has. Returns its exit status. A
    fork could not use a GPU: where there is one, Python starts anew."""
    how = "spawn" if torch.cuda.is_available() else "fork"
    process = multiprocessing.get_context(how).Process(target=_carried_out, args=(work, arguments))
    process.start()
    process.join()
    return process.exitcode


def _carried_out(work, arguments):
    say_if_stuck()
    work(*arguments)


def in_checkout(folder, work, *arguments):
    """The same with the suite of a copied checkout in the place of ours, and nothing of notebooks that ran here.
    Returns the exit status, what was printed, and errors."""
    printed = [folder / name for name in ("printed", "errors")]
    status = elsewhere(_in_checkout, folder, printed, work, arguments)
    return status, *(path.read_text() for path in printed)


def _in_checkout(folder, printed, work, arguments):
    for fd, path in enumerate(printed, 1):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), fd)
    sys.stdout, sys.stderr = (open(fd, "w", closefd=False) for fd in (1, 2))  # noqa: SIM115
    ours = ("experiments", "scripts", "IPython", "matplotlib_inline")
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)
    for name in ("CDGRAB_DATA", "CDGRAB_GROUP"):
        os.environ.pop(name, None)
    gc.disable()
    gc.collect = lambda *_: 0  # every notebook and every run would look for garbage
    sys.exit(work(*arguments))


@contextmanager
def started_run(arguments, printed, before=lambda: None):
    """`python -m experiments.train arguments` in a process of its own, which first calls `before`; its errors go to the
    file `printed`."""
    with started(_run, arguments, printed, before) as process:
        yield process


def stop_after(epochs):
    """For `before`: the run stands still amid the epoch after so many, else it may be done before anybody looks."""
    train_block = Trainer._train_block

    def stop(trainer, *arguments):
        if trainer.epochs_done == epochs:
            Trainer._train_block = train_block
            os.kill(os.getpid(), signal.SIGSTOP)
        return train_block(trainer, *arguments)

    Trainer._train_block = stop


def wait_until_stopped(process):
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert process.is_alive()
        time.sleep(0.01)


def _run(arguments, printed, before):
    before()
    # the tests themselves may have been started in the background of a shell, where Ctrl-C is ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(printed, "w") as sys.stderr:
        sys.exit(train.main(arguments))
