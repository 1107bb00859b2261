"""Processes that tests start: one that stands still ends by itself, and says where it stood."""

import time

import forked
import pytest
from torch.multiprocessing import ProcessExitedException


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setenv(forked.STUCK, "0.2")


def test_a_process_that_stands_still_says_where(impatient, capfd):
    assert forked.elsewhere(time.sleep, 60) == 1
    told = capfd.readouterr().err
    assert "it has taken 0.2 seconds" in told and "in _carried_out" in told


def test_so_does_each_of_several(impatient, capfd):
    with pytest.raises(ProcessExitedException):
        forked.forked(2, time.sleep, 60)
    assert "in _rank" in capfd.readouterr().err
