"""A process that is lost, or fails alone: the others are told at once, in the words of whatever they wait for."""

import multiprocessing
import os
import re

import lost_checks
import pytest


@pytest.mark.parametrize("way", lost_checks.WAYS)
@pytest.mark.parametrize("how", ["killed", "undecided"])
def test_the_others_are_told(tmp_path, how, way):
    processes = multiprocessing.get_context("fork")
    running = [processes.Process(target=lost_checks.lost, args=(rank, tmp_path, how, way)) for rank in range(3)]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
        process.kill()
    for rank in range(2):
        steps, seconds, *told = (tmp_path / str(rank)).read_text().split()
        assert int(steps) - lost_checks.STEPS in (-1, 0, 1, 2) and float(seconds) < 10
        if how == "killed":
            assert ("shared memory" in " ".join(told)) == (way == "shared memory")
            assert re.search(r"connections? to ranks? [\d, ]+ (is|are) closed", " ".join(told))
    if how == "undecided":
        assert (tmp_path / "2").read_text().endswith("no room")
    assert not [name for name in os.listdir("/dev/shm") if any(name.startswith(f"torch_{p.pid}_") for p in running)]
