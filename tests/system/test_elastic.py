"""torchrun starts a run again by itself; takes longer than an ordinary test, and needs nothing special."""

import json
import os
import signal
from pathlib import Path

import pytest
from test_resuming import SHORT, halted, lines, start, undisturbed, wait_for

__all__ = ["undisturbed"]  # a fixture


def ranks(process):
    return list(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))


def test_what_is_refused_is_not_taken_over_by_a_restart(tmp_path):
    folder = tmp_path / "run"
    before = halted(folder)
    process = start(folder, *SHORT[-1:], processes=2)  # without resume=true
    _, printed = process.communicate(timeout=240)
    assert process.returncode == 1 and "add resume=true to go on with it" in printed
    assert {path: path.read_bytes() for path in before} == before


def test_torchrun_goes_on_by_itself_when_a_rank_is_killed_and_one_that_stands_still_is_named(undisturbed, tmp_path):
    folder = tmp_path / "run"
    process = start(folder, processes=2)
    wait_for(folder, 2, lambda: process.poll() is None)
    os.kill(ranks(process)[1], signal.SIGKILL)
    _, printed = process.communicate(timeout=240)
    assert process.returncode == 0, printed
    for mine, theirs in zip(lines(folder), undisturbed, strict=True):  # which were made by one process
        assert mine.pop("order_hash") == theirs["order_hash"]
        assert mine == pytest.approx({key: theirs[key] for key in mine}, rel=1e-12)
    assert len(json.loads((folder / "manifest.json").read_text())["resumed"]) == 1

    process = start(tmp_path / "still", "timeout=4", "epochs=4000", processes=2)
    wait_for(tmp_path / "still", 2, lambda: process.poll() is None)
    started = ranks(process)
    os.kill(started[0], signal.SIGSTOP)
    printed = next(line for line in process.stderr if "error:" in line)
    assert "rank 0 no longer answers (its last collective was" in printed and "rank 1 waited for it in" in printed
    process.kill()  # torchrun would wait half a minute for the one that does not listen
    for rank in started:
        os.kill(rank, signal.SIGKILL)
