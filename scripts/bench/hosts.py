"""Hosts that are network namespaces of this machine, joined by links of limited speed.

Each has a card eth0, whose other end lies in a switch: a namespace of its own. `tc` limits what a host sends at its
card, and what it receives at the switch's end. A delay is the kernel's (`netem`) or, where it has none, that of a
process in the switch (`delay_line`), through which all frames go. Needs root and the commands ip and tc, and bridge for
such a process.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

from cdgrab.errors import CdgrabError
from experiments.store.files import ROOT
from scripts.bench import delay_line

SWITCH, PORT = "cdgrab-switch", 29400
LOCK = Path("/run/cdgrab-hosts.lock")  # their names are those of the whole machine; holds the delay line's process
LINE = "delay"  # its card
CONGESTION = "/proc/sys/net/ipv4/tcp_{}congestion_control"
BURST_SECONDS = 2e-3  # of full speed, after a pause: less than a timer's tick would keep the link from its rate


def host(rank: int) -> str:
    return f"cdgrab-host{rank}"


def address(rank: int) -> str:
    return f"10.78.0.{rank + 1}"


@cache
def why_not(delay_ms: float = 0.0, congestion: str = "") -> str:
    """The reason why there can be no such hosts here, or none with this delay and congestion control; empty if there
    can."""
    missing = [command for command in ("ip", "tc", *["bridge"] * bool(delay_ms)) if not shutil.which(command)]
    if missing:
        return f"the command {missing[0]} is not installed"
    if os.geteuid():
        return "making network namespaces needs root"
    try:
        with hosts(1, 1e9, delay_ms, congestion):
            return ""
    except CdgrabError as error:
        return str(error)


@contextmanager
def hosts(count: int, bits_per_second: float, delay_ms: float = 0.0, congestion: str = "") -> Iterator[None]:
    """So many hosts, for as long as this lasts. The delay is that of one way, however short: none is 0. congestion: how
    TCP avoids it there; empty: as this machine does."""
    names = [SWITCH, *map(host, range(count))]
    with LOCK.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CdgrabError("another process has such hosts; try again later") from error
        LOCK.write_text("")
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)  # of a run that was killed
        try:
            for name in names:
                _do("ip", "netns", "add", name)
                _do("ip", "-n", name, "link", "set", "lo", "up")
                if congestion:
                    _avoid(congestion, name)
            _do("ip", "-n", SWITCH, "link", "add", "bridge", "type", "bridge")
            _do("ip", "-n", SWITCH, "link", "set", "bridge", "up")
            with _line(delay_ms) if delay_ms and not _kernel_delays() else nullcontext():
                for rank in range(count):
                    _join(rank)
                    limit(rank, bits_per_second, delay_ms)
                yield
        finally:
            LOCK.write_text("")
            for name in names:
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _avoid(congestion: str, name: str) -> None:
    if congestion not in Path(CONGESTION.format("allowed_")).read_text().split():
        raise CdgrabError(f"TCP may not use {congestion} here: it is not in net.ipv4.tcp_allowed_congestion_control")
    _do("ip", "netns", "exec", name, "sh", "-c", f"echo {congestion} > {CONGESTION.format('')}")


def _kernel_delays() -> bool:
    """Tried on a card of the switch that nobody uses."""
    command = ["tc", "-n", SWITCH, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    return subprocess.run(command, capture_output=True).returncode == 0


@contextmanager
def _line(delay_ms: float) -> Iterator[None]:
    """A process through which all goes that hosts send, once `_join` has led it there."""
    command = ["ip", "netns", "exec", SWITCH, sys.executable, "-S", delay_line.__file__, LINE, str(delay_ms)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, process_group=0) as line:  # Ctrl-C is for us
        try:
            if (said := line.stdout.readline().strip()) != "ready":
                raise CdgrabError(f"this kernel has no netem, and a delay line cannot start: {said}")
            LOCK.write_text(str(line.pid))
            _do("ip", "-n", SWITCH, "link", "set", LINE, "master", "bridge", "up")
            _do("ip", "-n", SWITCH, "link", "set", LINE, "type", "bridge_slave", "learning", "off")
            yield
        finally:
            line.kill()


def _join(rank: int) -> None:
    name, end = host(rank), f"to{rank}"
    _do("ip", "-n", SWITCH, "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", name)
    _do("ip", "-n", SWITCH, "link", "set", end, "master", "bridge", "up")
    _do("ip", "-n", name, "address", "add", f"{address(rank)}/24", "dev", "eth0")
    _do("ip", "-n", name, "link", "set", "eth0", "up")
    if _delaying():  # all that this host sends goes to the delay line; the bridge must be told where the host is
        (card,) = json.loads(_do("ip", "-n", name, "-j", "link", "show", "eth0"))
        _do("bridge", "-n", SWITCH, "fdb", "replace", card["address"], "dev", end, "master", "static")
        _do("tc", "-n", SWITCH, "qdisc", "add", "dev", end, "ingress")
        every = ("protocol", "all", "u32", "match", "u32", "0", "0")
        there = ("action", "mirred", "egress", "redirect", "dev", LINE)
        _do("tc", "-n", SWITCH, "filter", "add", "dev", end, "parent", "ffff:", *every, *there)


def limit(rank: int, bits_per_second: float, delay_ms: float = 0.0) -> None:
    """The link of this host from now on; its own processes may call this, too. A delay line keeps its delay."""
    burst = max(2**16, round(bits_per_second / 8 * BURST_SECONDS))
    rate = ("tbf", "rate", f"{bits_per_second:.0f}bit", "burst", str(burst), "latency", "100ms")
    for space, card in ((host(rank), "eth0"), (SWITCH, f"to{rank}")):
        queue = ("tc", "-n", space, "qdisc")
        subprocess.run([*queue, "delete", "dev", card, "root"], capture_output=True)  # there may be none
        _do(*queue, "add", "dev", card, "root", "handle", "1:", *rate)
        if delay_ms and card == "eth0" and not _delaying():
            _do(*queue, "add", "dev", card, "parent", "1:", "netem", "delay", f"{delay_ms}ms")


def sent_bytes(rank: int) -> int:
    """That this host has sent, as the kernel counts them."""
    (card,) = json.loads(_do("ip", "-n", host(rank), "-s", "-j", "link", "show", "eth0"))
    return card["stats64"]["tx"]["bytes"]


def _delaying() -> str:
    """The delay line's process, if there is one."""
    return LOCK.read_text() if LOCK.exists() else ""


def delaying_seconds() -> float:
    """Of a processor, that the delay line has used so far, for all hosts; 0 without one."""
    process = _delaying()
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) / 1e9 if process else 0.0


def round_trip_ms(rank: int) -> float:
    """From this process's host to another: the median time in which that one refuses to be called at an unused port."""
    taken = []
    for _ in range(25):
        with socket.socket() as call:
            start = time.perf_counter()
            call.connect_ex((address(rank), 1))
            taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e3


def run_on_hosts(module: str, count: int, arguments: Sequence[object]) -> list:
    """What `python -m module FILE arguments…` writes to FILE<rank> as JSON on each host, in rank order."""
    with tempfile.TemporaryDirectory() as scratch:
        target, processes = Path(scratch) / "found", []
        for rank in range(count):
            meeting = {"MASTER_ADDR": address(0), "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "eth0"}
            place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
            command = ["ip", "netns", "exec", host(rank), sys.executable, "-m", module, str(target)]
            quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # it warns that these hosts have no names
            environment = os.environ | meeting | place | quiet | {"PYTHONPATH": str(ROOT)}
            processes.append(subprocess.Popen([*command, *map(str, arguments)], cwd=ROOT, env=environment))
        try:
            if any([process.wait() for process in processes]):
                raise CdgrabError(f"{module} failed on {count} hosts; its message is above")
        finally:
            for process in processes:
                process.kill()
        return [json.loads(Path(f"{target}{rank}").read_text()) for rank in range(count)]


def _do(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CdgrabError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
