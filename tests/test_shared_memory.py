"""Gradients that processes of one host average in shared memory, against the same through pipes and by collectives."""

import contextlib
import os
import random
import resource
import secrets
import socket
import threading
import time
from unittest import mock

import pytest
import shared_checks
import torch
from dropin_cases import EPOCHS
from forked import elsewhere
from shared_checks import CASES, FEW, PROCESSES

from cdgrab.balance import kernels
from cdgrab.runtime import links, shared, sockets
from cdgrab.runtime.group import WorkerGroup
from cdgrab.runtime.mean import mean_of_rows
from cdgrab.runtime.pieces import Piece

TRAINED = [(n, name) for n in PROCESSES for name in (CASES if n == 3 else FEW) if name != "views"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What `shared_checks` saved, by number of processes."""
    folder = tmp_path_factory.mktemp("shared")
    assert elsewhere(shared_checks.main, folder) == 0
    return {n: torch.load(folder / str(n), weights_only=False) for n in PROCESSES}


def same(one, other):
    """Whether weights, batches and bytes are the same, on all processes."""
    return all(
        all(map(torch.equal, mine[0], theirs[0])) and mine[1:3] == theirs[1:3]
        for mine, theirs in zip(one, other, strict=True)
    )


def shared_steps(result):
    """In how many steps buckets were in shared memory, on each process, and how many steps there were."""
    return {each[3] for each in result}, EPOCHS * len(result[0][1][0])


@pytest.mark.parametrize(("processes", "name"), TRAINED)
def test_means_and_orders_are_those_of_pipes_to_the_last_bit(found, processes, name):
    here, sent = found[processes][name]
    assert same(here, sent)
    steps, every = shared_steps(here)
    assert len(steps) == 1 and every - 4 <= steps.pop() < every
    assert shared_steps(sent)[0] == {0}


def test_backward_passes_inside_others(found):
    """Gradients of which nobody takes orders."""
    for (weights, steps), (expected, sent) in zip(*found[3]["nested"], strict=True):
        assert all(map(torch.equal, weights, expected)) and steps and not sent


def test_without_numba_the_same(found):
    assert same(found[3]["without numba"], found[3]["views"][0])
    assert shared_steps(found[3]["without numba"])[0] != {0}


def test_memory_that_others_see_stays_where_it_is(found):
    """With gradient_as_bucket_view a bucket is .grad."""
    here, sent = found[3]["views"]
    assert same(here, sent) and shared_steps(here)[0] == {0}


@pytest.mark.parametrize(
    "name", ["room", "files", "too few files", "files on their way", "too few files to connect", "off"]
)
def test_what_one_process_cannot_do_none_does(found, name):
    assert shared_steps(found[3][name])[0] == {0}
    assert same(found[3][name], found[3]["off"])


def test_a_bucket_that_moves_on_one_process_is_shared_anew_on_all(found):
    result = found[3]["moved"]
    steps, every = shared_steps(result)
    assert same(result, found[3]["views"][0])
    assert len(steps) == 1 and every - 7 <= steps.pop() < every - 3


def test_half_of_the_files_stay_free(monkeypatch):
    """Those that are open count."""
    limit = 2 * (len(os.listdir("/proc/self/fd")) + 10)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert shared._may_open(10) and not shared._may_open(11)


@pytest.mark.parametrize("how", ["crosswise", "crosswise, collectives"])
def test_models_whose_order_differs_between_processes_wait_for_nobody(found, how):
    """Two in one backward pass."""
    (steps, weights), *others = found[3][how]
    assert 4 <= steps < 12 if how == "crosswise" else not steps
    for its_steps, its_weights in others:
        assert its_steps == steps and all(map(torch.equal, weights, its_weights))


def test_compressed_gradients_are_sent(found):
    assert shared_steps(found[3]["bf16"])[0] == {0}
    for each, plain in zip(found[3]["bf16"], found[3]["off"], strict=True):
        assert each[2] < 0.75 * plain[2]


def test_collectives_give_the_same_where_nothing_can_be_connected(found):
    assert same(found[3]["collectives"], found[3]["off"]) and shared_steps(found[3]["collectives"])[0] == {0}
    sent, collected = found[3]["compressed"]
    assert same(sent, collected) and not same(sent, found[3]["bf16"])


def test_memory_is_shared_where_pipes_cannot_be_made(found):
    assert same(found[3]["no pipes"], found[3]["off"]) and shared_steps(found[3]["no pipes"])[0] != {0}


def test_signs_are_decided_by_all_where_one_process_keeps_a_bucket(found):
    weights, visited, _, steps = found[3]["one owner"][0]
    assert steps and all(map(torch.equal, weights, found[3]["one owner"][1][0])) and visited[0] != visited[-1]


def test_a_sorter_that_fails_on_one_process_holds_up_nobody(found):
    told, gradients = zip(*found[3]["failed"], strict=True)
    assert told == ("", "no room", "")
    assert all(map(torch.equal, gradients[0], gradients[1])) and all(map(torch.equal, gradients[0], gradients[2]))


def test_closed_sockets_are_noticed_though_a_fork_has_copies(found):
    for rank, both in enumerate(found[3]["fork"]):
        for seconds, told in both:
            assert seconds < 5 and told == ("closed before" if rank == 0 else "the connection to rank 0 is closed")


def test_memory_and_files_are_released_with_the_model(found):
    for before, some, more, after, names in found[3]["gone"]:
        files, maps, linked, rooms = some
        assert some == more and files > 1 and maps == 3 * files and linked == 2 and not rooms
        assert before == after == (0, 0, 0, 0) and not names


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [2, 3, 4, 6, 8, 12])
def test_the_compiled_loop_has_the_bits_of_the_mean(count, dtype):
    compiled, dim = kernels.optional("shared"), 2 * 2**11 + 5
    rows, kept = torch.randn(count, dim + 9, dtype=dtype), torch.randn(count, dim, dtype=dtype)
    parts = [(3, 2**11 + 1, 0), (2**11 + 4, dim - 2**11 - 1, 2**11 + 1)]
    before, inside = rows.clone(), slice(3, dim + 3)
    mean, first = mean_of_rows(rows[:, inside], torch.empty(dim, dtype=dtype)), kept.clone()
    assert compiled.average_and_take(rows.unbind(), parts, kept, subtract=True)
    assert torch.equal(kept, first - before[:, inside]) and torch.equal(rows[:, inside], mean.expand(count, -1))
    assert torch.equal(rows[:, :3], before[:, :3]) and torch.equal(rows[:, dim + 3 :], before[:, dim + 3 :])
    before[1, 7], before[0, 8] = torch.inf, torch.nan
    for subtract in (False, True):
        rows = before.clone()
        assert not compiled.average_and_take(rows.unbind(), parts, kept, subtract)
        assert not rows[:, 7:9].isfinite().any() and kept.isfinite().all()
    assert not kept.any()


def test_the_compiled_loop_writes_the_mean_to_one_row_alone():
    rows, parts = torch.randn(4, 7), [(0, 2, 0), (3, 4, 2)]
    before, inside = rows.clone(), [0, 1, 3, 4, 5, 6]
    average = kernels.optional("shared").averaging(rows.unbind(), parts, 2)
    for _ in range(2):  # of what is there each time
        mean = mean_of_rows(rows, torch.empty(7))
        assert average(None, False) and torch.equal(rows[2, inside], mean[inside])
    rows[2, inside] = before[2, inside]
    assert torch.equal(rows, before)


@pytest.mark.parametrize("part", [[0, 9, 0], [-1, 2, 0], [0, 2, 3], [8, 1, 0]])
def test_the_compiled_loop_stays_inside(part):
    rows, kept = torch.ones(2, 8), torch.ones(2, 4)
    with pytest.raises(ValueError, match="outside"):
        kernels.optional("shared").average_and_take(rows.unbind(), [part], kept)


def test_the_compiled_loop_takes_vectors_of_one_type_only():
    """It knows nothing but their addresses."""
    compiled, part = kernels.optional("shared"), [(0, 4, 0)]
    rows = torch.ones(2, 8)
    for wrong in (rows[:, ::2], [rows[0], rows[1, :7]], [rows[0], rows[1].double()]):
        with pytest.raises(ValueError, match="vectors of . numbers of one type, without gaps"):
            compiled.average_and_take(list(wrong), part)
    with pytest.raises(ValueError, match="another type"):
        compiled.average_and_take(rows.unbind(), part, torch.ones(2, 4).double())


@pytest.fixture
def sharing():
    """That of a process whose only socket leads to the other end of a pair, which comes with it."""
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other:
        connected = links.Links({1: mine}, 5.0)
        yield shared.Sharing(None, connected), connected, other
        connected.close()


def test_buckets_that_never_settle_are_left_where_they_are(sharing):
    bucket, connected, _ = sharing
    for _ in range(shared.PATIENT - 1):
        bucket.begin()
        assert not bucket.after_step(divided=False)
    assert connected.close.alive and bucket.after_step(divided=False)
    assert not bucket.settle() and not connected.close.alive


def test_whoever_fails_while_sharing_leaves_nobody_waiting(sharing, monkeypatch):
    bucket, connected, other = sharing
    monkeypatch.setattr(shared, "share", mock.Mock(side_effect=MemoryError))
    bucket.begin()
    assert bucket.after_step(divided=True)
    with pytest.raises(MemoryError):
        bucket.settle()
    assert not connected.close.alive and other.recv(1) == b""


def test_any_patience_will_do():
    """The system takes no more than 24 days."""
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other:
        connected, notice = links.Links({1: mine}, 1e12), links.Notice(links.DONE, 3, 4)
        other.send(links.NOTICE.pack(notice.kind, False, notice.bucket, notice.step))
        assert connected.wait(notice) is False
        other.close()
        with pytest.raises(RuntimeError, match="rank 1 is closed"):
            connected.wait(notice)
        connected.close()


def test_strangers_who_connect_do_not_prolong_the_wait(monkeypatch):
    """They are let in, found to be none of ours, and time runs on."""
    monkeypatch.setattr(sockets, "PATIENCE", 0.5)
    token, ended = secrets.randbits(62), threading.Event()

    def knock():
        while not ended.is_set():
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one, contextlib.suppress(OSError):
                one.connect(links._address(token))
                one.send(random.choice((b"?", sockets.HELLO.pack(1, 0, 0))))
                time.sleep(0.02)

    thread = threading.Thread(target=knock, daemon=True)
    with links._listen(token, 2) as listening:
        thread.start()
        start = time.monotonic()
        with pytest.raises(OSError, match="not connected"):
            links._link(WorkerGroup(2, 0, 2), listening, (token, token))
    ended.set()
    thread.join()
    assert 0.5 <= time.monotonic() - start < 5


def test_notices_count_though_their_sender_is_gone(sharing):
    """With unread notices, so that its end is told as an error, before what it has sent."""
    _, connected, other = sharing
    notice = links.Notice(links.DONE, 3, 4)
    connected.tell(links.Notice(links.READY, 3, 4))
    other.send(links.NOTICE.pack(notice.kind, True, notice.bucket, notice.step))
    other.close()
    assert connected.wait(notice) is True
    with pytest.raises(RuntimeError, match="rank 1 is closed"):
        connected.wait(notice._replace(step=5))


def test_chunks_of_a_piece():
    piece = Piece(slice(10, 30), [slice(0, 20)], [7, 7, 6], slice(100, 107))
    assert list(piece.chunks(1, 4)) == [(slice(17, 21), slice(100, 104)), (slice(21, 24), slice(104, 107))]
    piece.place = None
    assert list(piece.chunks(0, 9)) == [(slice(10, 17), None)]
