"""Two hosts, each a network namespace with an address of its own: one run on both, also when the link between them is
cut for a while. Needs root and the command `ip`."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sockets import listening

from experiments.store.files import ROOT
from experiments.store.records import read_manifest, read_metrics

HOSTS = {"cdgrab-a": "10.77.0.1", "cdgrab-b": "10.77.0.2"}
NAMES = Path("/etc/netns")  # what `ip netns exec` shows to a namespace as its /etc
PORT = 29400
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
        (NAMES / host).mkdir(parents=True, exist_ok=True)
        (NAMES / host / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{HOSTS[h]} {h}\n" for h in HOSTS))
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
            shutil.rmtree(NAMES / host)
        with contextlib.suppress(OSError):
            NAMES.rmdir()


def start(host, folder, launcher):
    """The same command on every host, which has a name and an address of its own."""
    first, *_ = HOSTS
    if launcher == "torchrun":
        command = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--max-restarts=9", "--rdzv-id=1"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={first}:{PORT}", "--monitor-interval=0.2"]
        command += ["-m", "experiments.train", *RUN]
    else:
        command = ["-m", "experiments.launch", *RUN, "nnodes=2", "nproc=2", f"rdzv={first}:{PORT}", "restarts=9"]
    own_name = ["unshare", "--uts", "sh", "-c", f'hostname {host}; exec "$@"', "sh"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(folder.with_name(f"{host}.log"), "w") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", host, *own_name, sys.executable, *command, f"run_dir={folder}"],
            cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def stop(processes):
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def addresses(processes):
    """Where the launchers and their ranks listen."""
    found = set()
    for process in processes:
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        found = found.union(*map(listening, (process.pid, *ranks)))
    return {socket.inet_ntoa(bytes.fromhex(each[6:8] + each[4:6] + each[2:4] + each[:2])) for each in found}


def orders(folder):
    return [line["order_hash"] for line in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same run in one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    subprocess.run([sys.executable, "-m", "experiments.train", *RUN, f"run_dir={folder}"], cwd=ROOT, check=True)
    return orders(folder)


def cut_the_link(processes):
    ip("-n", "cdgrab-b", "link", "set", "eth0", "down")
    time.sleep(15)
    ip("-n", "cdgrab-b", "link", "set", "eth0", "up")


def kill_a_rank(processes):
    """On the second host: the first one's torchrun does not count that as a restart of its own."""
    ranks = Path(f"/proc/{processes[1].pid}/task/{processes[1].pid}/children").read_text().split()
    assert len(ranks) == 2
    os.kill(int(ranks[1]), signal.SIGKILL)


@pytest.mark.parametrize(
    "launcher, disturb",
    [("torchrun", None), ("launcher", cut_the_link), ("launcher", kill_a_rank)],
    ids=["undisturbed", "the link is cut", "a rank is killed"],
)
def test_two_hosts_give_the_orders_of_one(hosts, alone, tmp_path, launcher, disturb):
    folder = tmp_path / "run"
    processes = [start(host, folder, launcher) for host in HOSTS]

    def printed():
        return "".join((tmp_path / f"{host}.log").read_text()[-3000:] for host in HOSTS)

    try:
        if disturb:
            while len(read_metrics(folder / "metrics.jsonl")) < 5:
                assert all(process.poll() is None for process in processes), printed()
                time.sleep(0.02)
            assert addresses(processes) == set(HOSTS.values())
            disturb(processes)
        for process in processes:
            assert process.wait(400) == 0, printed()
    finally:
        stop(processes)
    assert orders(folder) == alone
    manifest = read_manifest(folder)
    assert manifest["processes"] == 4 and len(manifest["resumed"]) >= bool(disturb)
    if disturb is cut_the_link:
        assert "no longer answer" in printed() or "has not joined in" in printed()
    assert "Traceback" not in printed() or launcher == "torchrun"
