"""Gradients that flow between processes, which are threads here, each with its own ends of all connections."""

import contextlib
import random
import socket
import threading
import time
from functools import partial
from itertools import combinations
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdgrab.balance import kernels
from cdgrab.runtime import flows, pipes, sockets
from cdgrab.runtime.averages import Averages
from cdgrab.runtime.group import WHOLE, WorkerGroup
from cdgrab.runtime.mean import mean_of_rows
from cdgrab.runtime.pieces import Piece

SECONDS = 30.0


def through_tcp():
    """As `socket.socketpair`, but what arrives is told of only if it is enough."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return socket.create_connection(listening.getsockname()), listening.accept()[0]


def connected(count, patience=SECONDS, pair=socket.socketpair):
    ends = [{rank: [] for rank in range(count) if rank != mine} for mine in range(count)]
    for one, other in combinations(range(count), 2):
        for _ in range(2):
            here, there = pair()
            ends[one][other].append(here)
            ends[other][one].append(there)
    return [pipes.Pipes(rank, its, patience) for rank, its in enumerate(ends)]


def in_threads(work, count):
    """What work(rank) returns for each, or the error that it raises."""
    found = [None] * count

    def noted(rank):
        try:
            found[rank] = work(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=noted, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
        assert not thread.is_alive()
    return found


def flow_of(one, vector, widths, prepare):
    return one.whole(vector, prepare) if widths is None else one.divided(vector, widths, prepare)


def averaged(one, vectors, widths, late=0.0, steps=1):
    """This process's part in averaging all vectors, two at once at most; in every step, the same flows average what the
    last one has left, times its rank and one. Returns what it was shown of everybody's."""
    rank, shown, flows = one._rank, [[] for _ in vectors], []
    for number, (vector, its) in enumerate(zip(vectors, widths, strict=True)):

        def prepare(rows, start, number=number):
            def average():
                shown[number].append((start, torch.stack([row.clone() for row in rows])))
                rows[rank].copy_(mean_of_rows(torch.stack(rows), torch.empty_like(rows[rank])))

            return average

        flows.append(flow_of(one, vector, its, prepare))
    for step in range(steps):
        for flow, vector in zip(flows, vectors, strict=True):
            time.sleep(late)
            if step:
                vector *= rank + 1
            one.begin(flow)
            while len([flow for flow in flows if flow.left]) > 1:
                one.turn()
        while any(flow.left for flow in flows):
            one.turn()
    return shown


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_everybody_gets_the_mean_and_its_share_of_everything(data):
    count = data.draw(st.integers(2, 4))
    shapes = data.draw(
        st.lists(st.none() | st.lists(st.integers(0, 30), min_size=count, max_size=count), min_size=1, max_size=4)
    )
    lengths = [7 if widths is None else sum(widths) for widths in shapes]
    dtype, late = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])), data.draw(st.booleans())
    room = flows.ALIGNED * data.draw(st.integers(1, 5))  # bytes of each process
    chunk = room // torch.empty(0, dtype=dtype).element_size()
    every = [[torch.randn(length).to(dtype) for length in lengths] for _ in range(count)]
    sent = [torch.stack([vectors[i] for vectors in every]) for i in range(len(lengths))]
    with mock.patch.object(flows, "CHUNK", room * count):
        joined = connected(count)
    steps = data.draw(st.integers(1, 3))
    shown = in_threads(lambda rank: averaged(joined[rank], every[rank], shapes, 1e-3 * late * rank, steps), count)
    for i, widths in enumerate(shapes):
        for step in range(steps):
            mean = mean_of_rows(sent[i], torch.empty_like(sent[i][0]))
            for rank, its in enumerate(shown):
                first = 0 if widths is None else sum(widths[:rank])
                width = len(mean) if widths is None else widths[rank]
                starts = [0] if widths is None else list(range(0, width, chunk))
                chunks = its[i][step * len(starts) : (step + 1) * len(starts)]
                assert [start for start, _ in chunks] == starts and len(its[i]) == steps * len(starts)
                seen = torch.cat([sent[i][:, :0], *(chunk for _, chunk in chunks)], 1)
                assert torch.equal(seen, sent[i][:, first : first + width])
            sent[i] = torch.stack([mean * (rank + 1) for rank in range(count)])
        assert all(torch.equal(vectors[i], mean) for vectors in every)
    for one in joined:
        one.close()


def test_more_than_the_connections_hold():
    """Nobody reads before it has sent all of it: the connections are full."""
    joined, length = connected(2), 2**21
    every = [torch.randn(length) for _ in range(2)]
    wanted = mean_of_rows(torch.stack(every), torch.empty(length))
    in_threads(lambda rank: averaged(joined[rank], [every[rank]], [[length // 2] * 2]), 2)
    assert all(torch.equal(vector, wanted) for vector in every)


@pytest.mark.parametrize("count", [2, 4])
def test_large_vectors_through_tcp(count):
    """What is left of a chunk, or of a result, may be less than what is worth reading otherwise."""
    joined, widths = connected(count, pair=through_tcp), [[2**20 + 5, 3, 0, 300_001][:count], [100_000 + 1] * count]
    every = [[torch.randn(sum(its)) for its in widths] for _ in range(count)]
    wanted = [mean_of_rows(torch.stack(rows), torch.empty_like(rows[0])) for rows in zip(*every, strict=True)]
    in_threads(lambda rank: averaged(joined[rank], every[rank], widths, 1e-3 * rank), count)
    for vectors in every:
        assert all(map(torch.equal, vectors, wanted))
    for one in joined:
        one.close()


@pytest.mark.parametrize("compiled", [True, False])
def test_buckets_may_move_from_step_to_step(compiled):
    """Flows of buckets that stay where they were are used again."""
    joined, length, places = connected(2), WHOLE, [0, 0, 0, 1, 1, 0, 0, 0, 0]
    every = torch.randn(2, len(places), length)
    averaging = kernels.optional("shared").averaging if compiled else lambda *_: None
    made = []

    def work(rank):
        group = WorkerGroup(2, rank, 2)
        averages = Averages(group, None, None, mean_of_rows, averaging)
        averages.pipes, buffers = joined[rank], torch.empty(2, length)
        piece = Piece(slice(0, length), [slice(0, length)], group.widths(length))
        found = []
        for gradient, place in zip(every[rank], places, strict=True):
            buffers[place] = gradient
            for _ in averages.average(buffers[place], piece):
                """Nothing else is to be done meanwhile."""
            found.append(buffers[place].clone())
        return found

    divided = pipes.Pipes.divided
    with mock.patch.object(pipes.Pipes, "divided", lambda self, *rest: made.append(self) or divided(self, *rest)):
        first, second = in_threads(work, 2)
    for step, mean in enumerate(first):
        assert torch.equal(mean, mean_of_rows(every[:, step], torch.empty(length)))
        assert torch.equal(mean, second[step])
    assert len(made) == 2 * 6  # the third step makes none, nor do the last two


def begun(one, length):
    """A flow of this length, of which everybody has as much, and nobody computes anything."""
    count = len(one.shares) + 1
    flow = one.divided(torch.ones(length), [length // count] * count, lambda rows, start: lambda: None)
    one.begin(flow)
    return flow


@pytest.mark.parametrize("when", ["before", "after"])
def test_whoever_is_gone_is_named(when):
    """Who is there, and is read first, is not."""
    one, other, gone = connected(3)
    with pytest.raises(RuntimeError, match="the connection to rank 2 is closed"):
        if when == "before":
            gone.close()
        flow = begun(one, 9)
        begun(other, 9)
        gone.close()
        while flow.left:
            one.turn()
    one.close()
    for once_more in (one.turn, lambda: begun(one, 9)):
        with pytest.raises(RuntimeError, match="closed before"):
            once_more()


def test_all_who_are_gone_are_named():
    """Some are, because others were, and who was the first to go cannot be told."""
    one, *others = connected(4)
    flow = begun(one, 8)
    for other in reversed(others[:2]):
        other.close()
    with pytest.raises(RuntimeError, match="the connections to ranks 1, 2 are closed"):
        while flow.left:
            one.turn()


def test_whoever_is_silent_is_named():
    one, *_ = connected(3, patience=0.1)
    begun(one, 9)
    with pytest.raises(RuntimeError, match=r"waited 0\.1 seconds for ranks 1, 2"):
        one.turn()


def test_other_gradients_are_refused():
    one, other = connected(2)
    begun(other, 10)
    begun(one, 8)
    with pytest.raises(RuntimeError, match="rank 1 exchanges other gradients than rank 0"):
        one.turn()


def test_who_waits_can_be_woken():
    one, _ = connected(2)
    begun(one, 8)
    threading.Timer(0.2, one.wake).start()
    start = time.monotonic()
    one.turn()
    assert 0.1 < time.monotonic() - start < SECONDS / 2
    for _ in range(10**5):  # more than the system keeps
        one.wake()


class Processes:
    """Groups that gather, one for each thread."""

    def __init__(self, count):
        self._told, self._barrier = [None] * count, threading.Barrier(count)
        self.groups = [self._group(rank) for rank in range(count)]

    def _group(self, rank):
        size = len(self._told)
        return SimpleNamespace(rank=rank, world_size=size, timeout=SECONDS, gather=partial(self.gather, rank))

    def gather(self, rank, row):
        self._told[rank] = row
        self._barrier.wait(SECONDS)
        found = torch.cat(self._told)
        self._barrier.wait(SECONDS)
        return found


def test_processes_connect_though_strangers_knock(monkeypatch):
    """And what these say is not heard."""
    listen = pipes._listen

    def with_strangers(backlog):
        found = listen(backlog)
        for said in (b"?", sockets.HELLO.pack(1, 2, 0), sockets.HELLO.pack(99, 0, 5)):
            stranger = socket.create_connection(found.getsockname())
            stranger.send(said)
            strangers.append(stranger)
        return found

    strangers = []
    monkeypatch.setattr(pipes, "_listen", with_strangers)
    monkeypatch.setattr(sockets, "GREETING", 0.1)
    groups = Processes(3).groups
    joined = in_threads(lambda rank: pipes.connect(groups[rank]), 3)
    every = [torch.full((9,), float(rank)) for rank in range(3)]
    in_threads(lambda rank: averaged(joined[rank], [every[rank]], [[2, 3, 4]]), 3)
    assert len(strangers) == 9 and torch.equal(torch.stack(every), torch.ones(3, 9))
    for one in (*joined, *strangers):
        one.close()


REFUSING = {
    "listen": (pipes, "_listen", OSError("no")),
    "name": (socket, "gethostname", "a" * 64),
    "connect": (socket, "create_connection", OSError("no")),
    "wanted": (pipes, "_wanted", False),
}


@pytest.mark.parametrize("what", REFUSING)
def test_what_one_process_cannot_do_none_does(what, monkeypatch):
    where, name, refusal = REFUSING[what]
    call = getattr(where, name)

    def refuse(*arguments, **more):
        if threading.current_thread().name != "last":
            return call(*arguments, **more)
        if isinstance(refusal, Exception):
            raise refusal
        return refusal

    monkeypatch.setattr(sockets, "PATIENCE", 0.5)
    monkeypatch.setattr(where, name, refuse)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    groups = Processes(3).groups

    def work(rank):
        threading.current_thread().name = "last" if rank == 2 else "other"
        return pipes.connect(groups[rank])

    found = in_threads(work, 3)
    if what == "name":  # others call it at this host alone
        assert all(isinstance(one, pipes.Pipes) for one in found)
    else:
        assert found == [None] * 3


@pytest.mark.parametrize("name", [pipes.SWITCH, "GLOO_DEVICE_TRANSPORT", "poll"])
def test_where_pipes_are_not_wanted(name, monkeypatch):
    assert pipes._wanted()
    if name == "poll":
        monkeypatch.delattr(pipes.select, "poll")
    else:
        monkeypatch.setenv(name, "0" if name == pipes.SWITCH else "TCP_TLS")
    assert not pipes._wanted()


@pytest.mark.parametrize(("card", "host"), [("lo", "127.0.0.1"), ("lo,eth9", "127.0.0.1"), ("", None)])
def test_where_gloo_listens_pipes_do(card, host, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", card)
    with pipes._listen(1) as listening:
        address = pipes._address_of(listening)
        assert address.host() == listening.getsockname()[0] and host in (None, address.host())
        with contextlib.closing(socket.create_connection((address.host(), address.port), 5)):
            assert listening.accept()


def test_addresses_of_both_kinds_can_be_gathered():
    for host, version in (("127.0.0.1", 4), ("192.0.2.255", 4), ("2001:db8::ff00:42:8329", 6), ("ffff::", 6)):
        listening = SimpleNamespace(getsockname=lambda host=host: (host, random.randrange(2**16), 0, 0))
        address = pipes.Address(*torch.tensor([pipes._address_of(listening)])[0].tolist())
        assert (address.host(), address.version) == (host, version) and address.token > 0
