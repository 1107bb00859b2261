"""Hosts made of network namespaces: links keep their limit and count their bytes, a delay line holds every frame."""

import inspect
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.bench import delay_line, hosts

RECEIVE = """
import socket, sys, time
server = socket.create_server(("10.78.0.1", 5000))
print("ready", flush=True)
talk, left = server.accept()[0], int(sys.argv[1])
start = time.perf_counter()
while left:
    left -= len(talk.recv(left))
print(time.perf_counter() - start)
"""
SEND = "import socket, sys; socket.create_connection(('10.78.0.1', 5000)).sendall(bytes(int(sys.argv[1])))"
TAKE = """
import socket, sys, time
server = socket.socket(type=socket.SOCK_DGRAM)
server.setsockopt(socket.SOL_SOCKET, 33, 2**24)  # SO_RCVBUFFORCE
server.bind(("10.78.0.1", 5000))
server.settimeout(5)
print("ready", flush=True)
for _ in range(int(sys.argv[1])):
    number, sent = server.recv(2000).split()[:2]
    print(number.decode(), time.monotonic() - float(sent))
"""
NUMBER = """
import socket, sys, time
socket.socket().connect_ex(("10.78.0.1", 1))  # until its address is known, only a few may wait
talk = socket.socket(type=socket.SOCK_DGRAM)
for number in range(int(sys.argv[1])):
    talk.sendto(f"{number} {time.monotonic()} ".encode().ljust(1000), ("10.78.0.1", 5000))
    if number % 10 == 0:
        time.sleep(1e-3)
"""


def on_host(rank, code, *arguments):
    command = ["ip", "netns", "exec", hosts.host(rank), sys.executable, "-S", "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_links_keep_their_limit_and_count_their_bytes():
    if reason := hosts.why_not():
        pytest.skip(reason)
    size, speed = 1_500_000, 50e6
    with hosts.hosts(2, 1e9):
        for rank in range(2):
            hosts.limit(rank, speed)
        before = hosts.sent_bytes(1)
        with on_host(0, RECEIVE, size) as receiver:
            assert receiver.stdout.readline() == "ready\n"
            with on_host(1, SEND, size):
                seconds = float(receiver.stdout.readline())
        assert size < hosts.sent_bytes(1) - before < 1.1 * size
        assert hosts.sent_bytes(0) < 0.1 * size
        assert 0.9 * (size - 2 * 2**16) * 8 / speed < seconds < 30 * size * 8 / speed  # after a burst at each end
        with pytest.raises(hosts.CdgrabError, match="another process has such hosts"), hosts.hosts(1, 1e9):
            pass


CONGESTION = "print(open('/proc/sys/net/ipv4/tcp_congestion_control').read().strip())"


def test_hosts_avoid_congestion_as_they_are_told():
    """And this machine goes on as before."""
    before = Path(hosts.CONGESTION.format("")).read_text()
    others = set(Path(hosts.CONGESTION.format("allowed_")).read_text().split()) - {before.strip()}
    other = min(others, default="reno")
    if reason := hosts.why_not(0.0, other):
        pytest.skip(reason)
    with hosts.hosts(2, 1e9, congestion=other):
        for rank in range(2):
            with on_host(rank, CONGESTION) as asked:
                assert asked.stdout.read().strip() == other
    assert Path(hosts.CONGESTION.format("")).read_text() == before
    assert hosts.why_not(0.0, "none") == (
        "TCP may not use none here: it is not in net.ipv4.tcp_allowed_congestion_control"
    )


@pytest.fixture
def without_netem(monkeypatch):
    """Also on a kernel that has it."""
    monkeypatch.setattr(hosts, "_kernel_delays", lambda: False)
    hosts.why_not.cache_clear()
    if reason := hosts.why_not(1.0):
        pytest.skip(reason)
    yield
    hosts.why_not.cache_clear()


def cards():
    return hosts._do("ip", "-n", hosts.SWITCH, "-br", "link", "show")


def test_a_delay_line_holds_every_frame_for_so_long_and_loses_none(without_netem):
    with hosts.hosts(2, 1e9, 30.0):
        with on_host(0, TAKE, 500) as receiver:
            assert receiver.stdout.readline() == "ready\n"
            with on_host(1, NUMBER, 500):
                taken = [line.split() for line in receiver.stdout]
        assert 0 < hosts.delaying_seconds() < 5
        process = Path("/proc", hosts._delaying())
    assert [int(number) for number, _ in taken] == list(range(500))
    delays = [float(delay) for _, delay in taken]
    assert min(delays) > 0.030 - delay_line.OWN_SECONDS and statistics.median(delays) < 0.045
    assert not process.exists() and hosts.delaying_seconds() == 0


def test_large_packets_pass_and_a_round_trip_takes_two_delays(without_netem):
    call = [inspect.getsource(part) for part in (hosts.address, hosts.round_trip_ms)]  # importing it takes seconds
    call = ["import socket, statistics, time", *call, "print(round_trip_ms(0))"]
    with hosts.hosts(2, 1e9, 5.0):
        with on_host(0, RECEIVE, 10_000_000) as receiver:
            assert receiver.stdout.readline() == "ready\n"
            with on_host(1, SEND, 10_000_000):
                assert 0.01 < float(receiver.stdout.readline()) < 3
        with on_host(1, "\n".join(call)) as caller:
            assert 9.8 < float(caller.stdout.readline()) < 15


def test_a_delay_line_ends_with_its_parent_and_its_card_with_it(without_netem):
    with hosts.hosts(1, 1e9, 5.0):
        assert hosts.LINE in cards()
        os.kill(int(hosts._delaying()), signal.SIGKILL)
        assert gone(lambda: hosts.LINE in cards())
        command = ["ip", "netns", "exec", hosts.SWITCH, sys.executable, "-S", delay_line.__file__, "another", "1"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, **pipes) as line:
            assert line.stdout.readline() == b"ready\n" and "another" in cards()
            line.stdin.close()  # as the kernel does when the one who has the other end is killed
            assert line.wait(2) == 0 and "another" not in cards()
    assert not any(hosts.SWITCH in name for name in hosts._do("ip", "netns", "list").splitlines())


def gone(there):
    """Within two seconds."""
    end = time.monotonic() + 2
    while there() and time.monotonic() < end:
        time.sleep(0.01)
    return not there()


def test_it_is_said_why_there_can_be_no_delay(without_netem, monkeypatch, tmp_path):
    """Neither by the kernel nor by a process."""
    (tmp_path / "refuses.py").write_text("print('no such device')")
    monkeypatch.setattr(delay_line, "__file__", str(tmp_path / "refuses.py"))
    assert hosts.why_not(2.0) == "this kernel has no netem, and a delay line cannot start: no such device"
    assert not hosts.why_not(0.0)
