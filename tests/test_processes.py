"""The same config gives the same permutations and metrics for every process count, and across a change of it."""

import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from process_runs import COMPARED, EPOCHS, PROCESSES, wanted
from sockets import is_loopback, listening
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters

from cdgrab.runtime.torchrun import Meeting
from experiments import train
from experiments.store.records import read_metrics
from experiments.training.launcher import torchrun


@pytest.fixture(scope="module")
def runs(spawned):
    """Every case on 1 and 2 processes, some on 4; sparse also started on 4 processes and finished on 2 and on 1."""
    for run in wanted(spawned, 1):
        assert train.main(run) == 0
    return spawned


def assert_same(one, other, tolerance):
    assert [line["order_hash"] for line in one] == [line["order_hash"] for line in other]
    for a, b in zip(one, other, strict=True):
        metrics = {key for key in a if key.startswith(("train_", "test_"))}
        assert len(metrics) >= 2 and metrics == {key for key in b if key.startswith(("train_", "test_"))}
        for metric in metrics:
            assert a[metric] == pytest.approx(b[metric], rel=tolerance, abs=tolerance)
        assert a.get("sparsifier", {}) == pytest.approx(b.get("sparsifier", {}), rel=tolerance)


@pytest.mark.parametrize(("name", "processes"), COMPARED)
def test_process_count_changes_nothing(runs, name, processes):
    one, other = (read_metrics(runs / f"{name}-{n}" / "metrics.jsonl") for n in (1, processes))
    assert len(one) == EPOCHS
    assert len({line["order_hash"] for line in one}) == EPOCHS  # orders do change from epoch to epoch
    float32 = "float32" in name or name in ("long_rows", "long_rows_sparse")
    assert_same(one, other, 1e-6 if float32 else 1e-12)


def test_waiting_longer_before_an_exchange_changes_nothing(runs):
    often, rarely = (read_metrics(runs / f"{n}-2" / "metrics.jsonl") for n in ("cd_grab_small_exchanges", "cd_grab"))
    assert_same(often, rarely, 0)


@pytest.mark.parametrize("name", ["halfway", "halfway-alone"])
def test_a_run_can_go_on_with_another_number_of_processes(runs, name):
    assert_same(read_metrics(runs / "sparse-1" / "metrics.jsonl"), read_metrics(runs / name / "metrics.jsonl"), 1e-12)


def test_sorters_give_different_orders(runs):
    hashes = {
        name: read_metrics(runs / f"{name}-1" / "metrics.jsonl")[-1]["order_hash"]
        for name in ("cd_grab", "kh", "id_grab_bal")
    }
    assert len(set(hashes.values())) == 3


def test_every_rank_has_its_log(runs):
    assert {path.name for path in (runs / "kh-4" / "logs").iterdir()} == {f"rank{r}.log" for r in range(4)}


def test_nothing_listens_beyond_this_host(runs):
    for processes in PROCESSES:
        for addresses, _ in json.loads((runs / str(processes) / "processes").read_text()):
            assert addresses and all(map(is_loopback, addresses))


def test_all_processes_stop_at_the_step_after_which_one_of_them_is_told_to(runs):
    for processes in PROCESSES:
        found = json.loads((runs / str(processes) / "processes").read_text())
        assert [told for _, told in found] == [signal.SIGTERM] * processes


def test_a_failing_rank_ends_the_whole_run_and_its_launcher_listens_on_this_host_only(capfd):
    """Also when all ranks are started again: they find the launcher's store where it was."""
    crash = f"""if True:
        import os, socket, sys, time
        sys.path.append({str(Path(__file__).parent)!r})
        from sockets import listening
        if os.environ["RANK"] == "0":
            time.sleep(60)
        socket.create_connection((os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])).close()
        print(*listening(os.getppid()), flush=True)
        sys.exit(7)"""
    before = listening(os.getpid())  # what other tests have left
    assert torchrun(["-c", crash], 2, restarts=1) == 7
    printed = capfd.readouterr()
    assert "Traceback" not in printed.err
    first, again = (set(line.split()) - before for line in printed.out.splitlines())
    assert first and first == again and all(map(is_loopback, first))


ENDING = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])

def heard(number, frame):
    (folder / "heard").touch()
    sys.exit(0)

stands_still, ready = sys.argv[2] == "stands still", folder / "ready"

def stopped():
    number = ready.read_text()
    return number and pathlib.Path("/proc", number, "stat").read_text().rpartition(")")[2].split()[0] == "T"

if os.environ["RANK"] == "0":
    while not ready.exists() or (stands_still and not stopped()):
        time.sleep(0.01)
    sys.exit(4)
signal.signal(signal.SIGTERM, heard if stands_still else signal.SIG_IGN)
ready.write_text(str(os.getpid()))
if stands_still:
    os.kill(os.getpid(), signal.SIGSTOP)
for _ in range(1200):  # in one long sleep, a signal that comes just before it would be heard after it
    time.sleep(0.05)
"""


@pytest.mark.parametrize("what", ["stands still", "does not listen"])
def test_one_that_stands_still_hears_that_it_shall_end_and_one_that_does_not_listen_is_killed(
    what, tmp_path, monkeypatch
):
    """Soon: torch would wait for half a minute."""
    monkeypatch.setattr("cdgrab.runtime.torchrun.LAST_WORDS", 30 if what == "stands still" else 1)
    began = time.monotonic()
    assert torchrun(["-c", ENDING, str(tmp_path), what], 2) == 4
    assert (tmp_path / "heard").exists() == (what == "stands still") and time.monotonic() - began < 30


def test_hosts_meet_at_one_address_and_again_when_one_of_them_has_failed():
    with socket.create_server(("127.0.0.2", 0)) as free:  # an address of its own, as that of a network card
        endpoint = "{}:{}".format(*free.getsockname())
    before = listening(os.getpid())
    first, second = (Meeting(RendezvousParameters("cdgrab", endpoint, "name", 2, 2)) for _ in range(2))
    (address,) = listening(os.getpid()) - before
    assert address.startswith("0200007F")
    with ThreadPoolExecutor() as pool:
        for failed, other in ((first, second), (second, first), (first, second)):
            waits = pool.submit(failed.next_rendezvous)
            while other is not second and not other.num_nodes_waiting():  # not in the first round
                time.sleep(0.01)
            found = {other: other.next_rendezvous(), failed: waits.result()}
            assert [found[host].rank for host in (first, second)] == [0, 1]
            assert first.num_nodes_waiting() == second.num_nodes_waiting() == 0
            found[first].store.set("said", str(found))
            assert found[second].store.get("said").decode() == str(found)  # nothing of an earlier round
        waits = pool.submit(second.next_rendezvous)
        first.shutdown()
        assert isinstance(waits.exception(), RendezvousClosedError)
