"""Jobs that run beside a backward pass."""

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from cdgrab.runtime.beside import InThread


def jobs(number, done, seconds=0.0):
    """Each waits once, and notes where it began."""

    def one():
        done.append(threading.current_thread().name)
        time.sleep(seconds)
        yield True

    return [one() for _ in range(number)]


@pytest.fixture
def beside():
    found = InThread(SimpleNamespace(new_channel=lambda: None))
    yield found
    found.call(lambda: None).result()


def test_jobs_may_come_just_when_the_thread_gets_idle(beside, monkeypatch):
    def slow(future):
        found = ask(future)
        time.sleep(0.05)
        return found if found else ask(future)

    ask, done = Future.done, []
    beside.flows(lambda: None)
    monkeypatch.setattr(Future, "done", slow)
    for _ in range(5):
        beside.run(jobs(2, done, seconds=0.01))
    beside.call(lambda: None).result()
    assert len(done) == 10


@pytest.mark.parametrize("flows", [True, False])
def test_only_what_flows_begins_in_the_thread_of_the_backward_pass(beside, flows):
    """There a collective would wait for processes that are busy with something else."""
    done = []
    if flows:
        beside.flows(lambda: None)
    beside.run(jobs(3, done))
    beside.call(lambda: None).result()
    assert [name == threading.current_thread().name for name in done] == [flows, False, False]
