"""The order server decides every row once, in order, within its buffer, and loses none."""

import threading
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sorter_cases import GRADIENT_AWARE, feed, make, make_gradients, run
from torch import nn

import cdgrab
from cdgrab import CdgrabError
from cdgrab.dropin.parts import Layout, Parts
from cdgrab.sorters import balancers
from cdgrab.sorters.server import OrderServer

ROW_BYTES = 8  # of one row [1, 1] in float64


class Recorder:
    """A balancer that remembers what it was given."""

    dim = 1

    def __init__(self, block_bytes):
        self.block_bytes, self.seen, self.threads = block_bytes, [], set()
        self.may_decide = threading.Event()
        self.may_decide.set()

    def decide(self, first, rows):
        assert self.may_decide.wait(60)
        self.threads.add(threading.current_thread())
        assert first == len(self.seen)
        self.seen += rows[:, 0, 0].tolist()
        return (rows[:, :, 0] % 2 * 2 - 1).to(torch.int8)


def submit(server, start, end):
    """Rows that are their own numbers."""
    server.submit(start, torch.arange(start, end, dtype=torch.float64).view(-1, 1, 1))


@given(
    sizes=st.lists(st.integers(1, 9), max_size=12),
    block=st.integers(0, 20),
    buffer=st.integers(1, 40),
    background=st.booleans(),
    result_after=st.integers(0, 12),
)
def test_every_row_is_decided_once_and_in_order(sizes, block, buffer, background, result_after):
    balancer = Recorder(block * ROW_BYTES)
    server = OrderServer(balancer, buffer * ROW_BYTES, background)
    found, count = {}, 0
    for number, size in enumerate(sizes):
        if number == result_after and (result := server.result()):
            found[result[0]] = result[1]
        submit(server, count, count + size)
        count += size
    if result := server.result():
        found[result[0]] = result[1]
    assert balancer.seen == list(range(count))
    assert list(found) == sorted({0, count - len(list(found.values())[-1])} if found else ())
    expected = (torch.arange(count) % 2 * 2 - 1).to(torch.int8)[:, None]
    assert torch.equal(torch.cat(list(found.values())), expected) if count else not found
    assert server.result() is None


def test_a_thread_decides_while_the_caller_goes_on_but_never_holds_more_than_its_buffer():
    balancer = Recorder(0)
    balancer.may_decide.clear()
    server = OrderServer(balancer, 4 * ROW_BYTES, background=True)
    submit(server, 0, 2)
    submit(server, 2, 4)
    assert not balancer.seen, "two blocks fit: nobody waits"
    threading.Timer(0.2, balancer.may_decide.set).start()
    submit(server, 4, 6)  # waits for the first
    assert len(balancer.seen) >= 2
    assert sum(block.size for block in server._running) <= 4 * ROW_BYTES
    assert len(server.result()[1]) == 6 and threading.main_thread() not in balancer.threads


@pytest.mark.parametrize("background", [True, False])
def test_what_goes_wrong_in_the_server_reaches_the_caller(background):
    class Failing(Recorder):
        def decide(self, first, rows):
            raise ValueError("no sign")

    server = OrderServer(Failing(0), 2**20, background)
    with pytest.raises(ValueError, match="no sign"):
        submit(server, 0, 1)
        server.result()
    with pytest.raises((ValueError, CdgrabError), match="no sign|signs were lost"):  # nor is it forgotten
        server.result()


def test_starting_anew_forgets_what_was_collected():
    server = OrderServer(Recorder(100 * ROW_BYTES), 2**20, background=False)
    submit(server, 0, 3)
    with pytest.raises(CdgrabError, match="signs were lost"):
        submit(server, 0, 2)
    server.forget()
    submit(server, 0, 2)
    assert len(server.result()[1]) == 2


@pytest.mark.parametrize("name", GRADIENT_AWARE)
def test_where_signs_are_decided_changes_no_order(name):
    gradients = make_gradients("random", 3, 3, 9, 5)
    orders = [
        run(make(name, units=9, background=background, buffer_mb=size), gradients, {4, 7})
        for background in (True, False)
        for size in (1e-5, 8.0)
    ]
    assert all(torch.equal(orders[0], other) for other in orders[1:])


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("name", GRADIENT_AWARE)
def test_gradients_that_come_together_are_decided_in_blocks_that_fit_the_buffer(name, background):
    """However many: 32 units of 3 workers, 40 numbers each, are 15 times the buffer."""
    gradients, buffer_bytes = make_gradients("random", 1, 3, 32, 40), 2 * 1920
    sorter = make(name, units=32, dim=40, background=background, buffer_mb=buffer_bytes / 2**20)
    decide, sizes, held = sorter._balancer.decide, [], []

    def watched(first, rows):
        sizes.append(rows.numel() * rows.element_size())
        held.append(rows.untyped_storage().nbytes())
        return decide(first, rows)

    sorter._balancer.decide = watched
    expected = run(make(name, units=32, dim=40), gradients)[1]
    assert torch.equal(run(sorter, gradients)[1], expected)
    assert len(sizes) >= 8 and max(sizes) == max(held) == buffer_bytes / 2


@pytest.mark.parametrize("name", GRADIENT_AWARE)
def test_no_single_gradient_is_saved_at_the_end_of_an_epoch(name):
    """An odd last unit has no pair to wait for."""
    sorter = make(name, units=9, dim=40)
    sorter.order(0)
    for end in (8, 9):
        feed(sorter, make_gradients("random", 1, 3, end, 40)[0], start=sorter.position)
        saved = sorter.state_dict()["per_worker"]
        assert saved.get("_unpaired", torch.empty(0)).numel() == 0
    assert sorter.order(1).shape == (3, 9)


# -- interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRADIENT_AWARE)
def test_loading_a_state_waits_for_blocks_that_are_still_being_decided(name):
    gradients = make_gradients("random", 1, 3, 9, 5)
    options = {"units": 9, "background": True, "buffer_mb": 1e-3}
    expected = run(make(name, **options), gradients)[1]
    saved = make(name, **options)
    saved.order(0)
    saved.observe(range(4), gradients[0][:, :4])
    sorter = make(name, **options)
    sorter.order(0)
    slowed_down(sorter, 0.05)
    for unit in range(6):
        sorter.observe([unit], -3 * gradients[0][:, unit : unit + 1])
    sorter._server.flush()
    sorter.load_state_dict(saved.state_dict())
    feed(sorter, gradients[0], start=4)
    assert torch.equal(sorter.order(1), expected)


def slowed_down(sorter, seconds):
    decide = sorter._balancer.decide

    def slowly(first, rows):
        time.sleep(seconds)
        return decide(first, rows)

    sorter._balancer.decide = slowly


def test_a_refused_state_leaves_what_is_being_decided_alone():
    gradients = make_gradients("random", 1, 3, 9, 5)
    sorter = make("cd_grab", units=9, background=True)
    sorter.order(0)
    slowed_down(sorter, 0.02)
    sorter.observe(range(6), gradients[0][:, :6])
    with pytest.raises(CdgrabError, match="another sorter"):
        sorter.load_state_dict(make("cd_grab", units=8).state_dict())
    feed(sorter, gradients[0], start=6)
    assert torch.equal(sorter.order(1), run(make("cd_grab", units=9), gradients)[1])


class InterruptedWaits:
    """Ctrl-C in every one of the given waits."""

    def __init__(self, monkeypatch, numbers):
        self.count, wait = 0, OrderServer._wait_for_oldest

        def interrupted(server):
            self.count += 1
            if self.count in numbers:
                raise KeyboardInterrupt
            return wait(server)

        monkeypatch.setattr(OrderServer, "_wait_for_oldest", interrupted)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("name", GRADIENT_AWARE)
def test_a_wait_that_is_interrupted_loses_nothing(name, number, monkeypatch):
    """In the middle of observing, or of settling for a state: `position` says what has been taken."""
    gradients = make_gradients("random", 1, 3, 9, 40)
    options = {"units": 9, "dim": 40, "background": True, "buffer_mb": 2e-3}  # two rows
    expected = run(make(name, **options), gradients)[1]
    waits = InterruptedWaits(monkeypatch, {number})
    sorter = make(name, **options)
    sorter.order(0)
    interrupted = 0
    while sorter.position < 9 or not interrupted:
        try:
            while sorter.position < 9:
                start = sorter.position
                sorter.observe(range(start, min(9, start + 4)), gradients[0][:, start : start + 4])
            state = sorter.state_dict()
        except KeyboardInterrupt:
            interrupted += 1
            state = sorter.state_dict()
            resumed = make(name, **options)
            resumed.load_state_dict(state)
            feed(resumed, gradients[0], start=resumed.position)
            assert torch.equal(resumed.order(1), expected)
        assert waits.count >= number or sorter.position < 9
    assert interrupted == 1 and torch.equal(sorter.order(1), expected)


def test_signs_that_are_lost_are_refused_not_shifted():
    """Ctrl-C inside of deciding itself, where the running sum may have moved and the sign is gone."""
    sorter = make("cd_grab", units=8, background=False)
    sorter.order(0)
    decide, calls = sorter._balancer.decide, []

    def interrupted(first, rows):
        signs = decide(first, rows)
        calls.append(first)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return signs

    sorter._balancer.decide = interrupted
    gradients = make_gradients("random", 1, 3, 8, 5)[0]
    sorter.observe(range(8), gradients)
    with pytest.raises(KeyboardInterrupt):
        sorter.order(1)
    for ask in (sorter.state_dict, lambda: sorter.order(1)):
        with pytest.raises(CdgrabError, match="signs were lost"):
            ask()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sketch": "hash"}, "sketch must be none, gaussian or countsketch"),
        ({"sketch_size": 0}, "sketch_size must be a whole number of at least 1"),
        ({"buffer_mb": 0}, "buffer_mb must be a number above 0"),
        ({"background": "maybe"}, "background must be auto, true or false"),
    ],
)
def test_bad_options_are_one_sentence(options, message):
    with pytest.raises(CdgrabError, match=message):
        cdgrab.make_sorter("cd_grab", workers=2, units=4, dim=3, **options)


@pytest.mark.parametrize("brief", [balancers.BRIEF, 0])
def test_rows_that_come_alone_and_in_blocks_are_decided_one_after_the_other(brief, monkeypatch):
    """On a GPU a brief row by itself is decided in the stream of whoever observes it, all others in another one."""
    monkeypatch.setattr(balancers, "BRIEF", brief)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dim, cuts = 150_000, (0, 2, 8, 9, 11, 12, 24, 25, 26, 32)  # such rows are decided by themselves
    gradients = make_gradients("random", 3, 1, cuts[-1], dim).float()
    sorter, one_by_one = make("cd_grab", *gradients.shape[1:]), make("cd_grab", *gradients.shape[1:], background=False)
    for epoch, every in enumerate(gradients):
        assert torch.equal(sorter.order(epoch), one_by_one.order(epoch))
        there = every.to(device)
        for start, end in pairwise(cuts):
            sorter.observe(range(start, end), there[:, start:end])
        for unit in range(cuts[-1]):
            one_by_one.observe([unit], every[:, unit : unit + 1])
    assert torch.equal(sorter.order(3), one_by_one.order(3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dim", [150_000, 40])  # decided by themselves, and in blocks
@pytest.mark.parametrize("brief, background", [(balancers.BRIEF, True), (0, True), (0, False)])
def test_whoever_observes_may_change_streams_amid_an_epoch(brief, background, dim, monkeypatch):
    """Every step waits for the one before, as a training's would, and then overwrites that one's gradient. The order is
    asked for in a stream that waits for none."""
    monkeypatch.setattr(balancers, "BRIEF", brief)
    units, streams = 32, [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(2))]
    gradients = make_gradients("random", 3, 1, units, dim).float()
    sorter, one_by_one = (make("cd_grab", 1, units, dim, background=how) for how in (background, False))
    there, gradient, before = gradients.cuda(), torch.empty(dim, device="cuda"), streams[0]
    layout = Layout([nn.Parameter(torch.empty_like(gradient))])
    for epoch, every in enumerate(gradients):
        assert torch.equal(sorter.order(epoch), one_by_one.order(epoch))
        for unit in range(units):
            stream = streams[(unit // 3 + epoch) % 3]
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(5_000_000)  # so that what does not wait is too early
                gradient.copy_(there[epoch, 0, unit])
                sorter.observe_parts(Parts(layout, [gradient]))  # `observe` waits for the GPU
            before = stream
            one_by_one.observe([unit], every[:, unit : unit + 1])
    with torch.cuda.stream(streams[1]):  # the last step was in another
        assert torch.equal(sorter.order(3), one_by_one.order(3))
