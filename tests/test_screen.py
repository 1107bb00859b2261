"""What a person sees while a command runs: on a terminal of 80 columns, and in a pipe."""

import contextlib
import fcntl
import multiprocessing
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest

from experiments import screen
from experiments.store.files import ROOT
from experiments.training import jobs, progress
from experiments.training.progress import Progress

COMMAND = """
import sys, time
from experiments import screen
screen.PATIENCE, screen.PAUSE = 0.7, 0.4  # not 5 and 60 seconds
screen.begin("loading")
time.sleep(1.3)
print("a line")
print("half a", end=" ", flush=True)
time.sleep(0.3)
print("line")
with screen.doing("drawing " + "x" * 99):
    time.sleep(0.3)
print("an error", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def seen():
    """What the same command writes to a terminal of 80 columns, and to pipes."""
    command, pipes = [sys.executable, "-c", COMMAND], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    on_a_terminal = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, cwd=ROOT)
    in_pipes = subprocess.Popen(command, **pipes, text=True, cwd=ROOT)
    os.close(its)
    written = b""
    with open(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # when its other end is closed
        while part := terminal.read(4096):
            written += part
    assert on_a_terminal.wait() == 0
    return written.decode().replace("\r\n", "\n"), *in_pipes.communicate()


def test_on_a_terminal_the_last_line_says_what_is_going_on_and_other_lines_stay(seen):
    text, *_ = seen
    lines = [line.rpartition("\r\x1b[K")[2] for line in text.split("\n")]
    assert lines == ["a line", "half a line", "an error", ""]
    shown = re.findall(r"\r\x1b\[K([^\r\n]+)\r", text)
    assert shown[0] == "loading …" and "loading … 1 s" in shown and max(map(len, shown)) == 79
    assert "half a line" in text  # nothing is drawn into a line that somebody has begun
    assert any(line.startswith("drawing xxx") for line in shown)


def test_in_a_pipe_lines_are_plain(seen):
    _, out, errors = seen
    assert out == "a line\nhalf a line\n"
    first, *others, last = errors.splitlines()
    assert first == "loading …" and last == "an error" and others and set(others) == {"loading … 1 s"}


def test_the_line_of_a_sweep_has_number_time_left_epoch_and_losses_in_80_columns(monkeypatch):
    seconds = [1000.0]
    monkeypatch.setattr(progress.time, "time", lambda: seconds[0])
    made = Progress(40, since=1000.0)
    assert made.left() == ""
    made.skip(12)
    with made.watching(12, "lstm_wiki2 cd_grab seed 0", part=0.25) as watch:
        assert "<?" in made.text(79)  # nothing is known yet
        watch(0.5, 12, "5.3012–5.3871")
        seconds[0] += 30  # for a quarter of 12 runs
        shown = made.text(79)
        assert shown.startswith("runs 13–24 of 40:  45%|") and len(shown) == 79
        assert shown.endswith("| 00:30<03:40, epoch 12, loss 5.3012–5.3871") and made.left() == "03:40"
        plain = "runs 13–24 of 40: 45% after 00:30, 03:40 left, epoch 12, loss 5.3012–5.3871"
        assert made.text(None) == plain
        monkeypatch.setenv(*made.tell().popitem())  # a process that makes the next run goes on from there
    assert Progress.told() == Progress(40, 12.0, 15.0, 1000.0, first=13)
    for other in ("", "five", "1 2 3", "inf 0 0 0 1", "1 0 0 0 nan"):
        monkeypatch.setenv(progress.VARIABLE, other)
        assert (Progress.told().total, Progress.told().first) == (1, 1)
    alone = Progress(1)
    with alone.watching(1, "lr_hmda cd_grab seed 0", part=0.0):
        assert alone.text(79).startswith("lr_hmda cd_grab seed 0:   0%|")


def test_parallel_runs_share_one_line_and_print_through_the_first_process(monkeypatch, capsys):
    here, there = multiprocessing.Pipe()
    whole, workers = Progress(6), [jobs._Told(there, 6, first) for first in (1, 4)]
    out = jobs._Printed(there, "stdout")
    with workers[0].watching(3, "", 0.0) as one, workers[1].watching(3, "", 0.0) as other:
        one(0.5, 5, "0.1")
        other(0.4, 4, "0.2")
        other(0.5, 5, "0.2")  # too soon to be looked at
        out.write(" 1/6 cd_grab-s0: ")
        out.write("done\n 2/6")
        while here.poll():
            jobs._pass_on(whole, *here.recv())
        assert whole.text(79).startswith("runs 1–3, 4–6 of 6:  45%|") and whole.text(79).endswith(", epoch 5, 4")
    while here.poll():
        jobs._pass_on(whole, *here.recv())
    assert whole.done == 6 and not whole.groups
    assert capsys.readouterr().out == " 1/6 cd_grab-s0: done\n"


def test_other_processes_of_a_run_show_nothing(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(screen, "_screen", screen._Screen())  # another test may have begun
    screen.begin()
    assert screen._screen.stream is None and not screen.has_status_line()


def test_a_process_of_a_sweep_that_stands_still_hears_that_it_shall_end():
    sleeping = subprocess.Popen(["sleep", "60"])
    sleeping.send_signal(signal.SIGSTOP)
    process = SimpleNamespace(pid=sleeping.pid, terminate=sleeping.terminate, join=lambda: sleeping.wait(20))
    worker = SimpleNamespace(process=process, answer=lambda: [process.join()])
    try:
        with pytest.raises(KeyboardInterrupt), jobs._ending_on_signals([worker], Progress(1)):
            raise KeyboardInterrupt
        assert sleeping.returncode == -signal.SIGTERM
    finally:
        sleeping.kill()
