"""Two hosts, each a network namespace with an address of its own: one run on both, also when the link between them is
cut for a while. Needs root and the command `ip`."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from cdgrab.config import ROOT
from cdgrab.runlog import read_manifest, read_metrics

HOSTS = {"cdgrab-a": "10.77.0.1", "cdgrab-b": "10.77.0.2"}
RUN = ["data=embedded", "size=smoke", "task=lr_hmda", "epochs=60", "workers=4", "compile=off", "timeout=8"]


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def why_not():
    if not shutil.which("ip"):
        return "the command ip is not installed"
    if os.geteuid():
        return "making network namespaces needs root"
    try:
        ip("netns", "add", "cdgrab-try")
        ip("netns", "delete", "cdgrab-try")
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    return ""


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


@pytest.fixture
def hosts():
    """Joined by a pair of virtual network cards, both called eth0."""
    first, second = HOSTS
    for host in HOSTS:
        subprocess.run(["ip", "netns", "delete", host], capture_output=True)
        ip("netns", "add", host)
    try:
        ip("link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
        for host, address in HOSTS.items():
            ip("-n", host, "address", "add", f"{address}/24", "dev", "eth0")
            for card in ("eth0", "lo"):
                ip("-n", host, "link", "set", card, "up")
        yield
    finally:
        for host in HOSTS:
            ip("netns", "delete", host)


def start(host, folder):
    address, (first, *_) = HOSTS[host], HOSTS.values()
    launcher = ["--nnodes=2", "--nproc-per-node=2", "--max-restarts=9", f"--local-addr={address}", "--rdzv-id=test"]
    launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint={first}:29400", "--monitor-interval=0.2"]
    launcher += [f"--rdzv-conf=is_host={int(address == first)}"]  # both have the name of the one machine
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", "experiments.train", *RUN]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    with open(folder.with_name(f"{host}.log"), "w") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", host, *command, f"run_dir={folder}"],
            cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def stop(processes):
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def orders(folder):
    return [line["order_hash"] for line in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same run in one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    subprocess.run([sys.executable, "-m", "experiments.train", *RUN, f"run_dir={folder}"], cwd=ROOT, check=True)
    return orders(folder)


@pytest.mark.parametrize("cut", [False, True], ids=["undisturbed", "the link is cut"])
def test_two_hosts_give_the_orders_of_one(hosts, alone, tmp_path, cut):
    folder = tmp_path / "run"
    processes = [start(host, folder) for host in HOSTS]
    try:
        if cut:
            while len(read_metrics(folder / "metrics.jsonl")) < 5:
                assert all(process.poll() is None for process in processes), (tmp_path / "cdgrab-a.log").read_text()
                time.sleep(0.02)
            ip("-n", "cdgrab-b", "link", "set", "eth0", "down")
            time.sleep(15)
            ip("-n", "cdgrab-b", "link", "set", "eth0", "up")
        for process in processes:
            assert process.wait(400) == 0, (tmp_path / "cdgrab-a.log").read_text()[-3000:]
    finally:
        stop(processes)
    assert orders(folder) == alone
    manifest = read_manifest(folder)
    assert manifest["processes"] == 4 and bool(manifest["resumed"]) == cut
    if cut:
        printed = "".join((tmp_path / f"{host}.log").read_text() for host in HOSTS)
        assert "no longer answer" in printed or "has not joined in" in printed
