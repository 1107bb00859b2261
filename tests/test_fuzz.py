"""A few hundred of the inputs that `make fuzz` makes up; and that the fuzzer sees what it looks for."""

import json
import os
import random
import signal
import socket
import subprocess
from collections import Counter

import pytest
import torch

from scripts import reliability
from scripts.fuzz import __main__ as fuzz
from scripts.soak import __main__ as soak
from scripts.soak import disturbances, processes, victims

INPUTS = {
    "settings": 8,
    "files": 10,
    "tables": 40,
    "archives": 40,
    "runs": 12,
    "gradients": 100,
    "states": 40,
    "samplers": 15,
    "arguments": 800,
    "calls": 40,
}


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_bad_input_is_refused_in_one_sentence_and_nothing_is_lost(kind, tmp_path, monkeypatch):
    monkeypatch.delenv("CDGRAB_DATA", raising=False)
    found = fuzz.fuzz(kind, INPUTS[kind], random.Random(5), tmp_path)
    assert set(found) == {"taken", "refused"} and sum(found.values()) == INPUTS[kind], found


def test_the_fuzzer_sees_crashes_and_errors_of_several_lines(monkeypatch, tmp_path):
    def kinds(generator, scratch):
        while True:
            yield lambda: {}["nothing"]
            yield lambda: (_ for _ in ()).throw(fuzz.CdgrabError("one line\nand another"))

    monkeypatch.setitem(fuzz.KINDS, "broken", (kinds, 1.0))
    found = fuzz.fuzz("broken", 4, random.Random(0), tmp_path)
    assert sorted(found.values()) == [2, 2] and any("KeyError" in words for words in found)


def test_the_fuzzer_survives_a_crash_of_the_interpreter(monkeypatch):
    monkeypatch.setattr(fuzz, "_portion", lambda kind, inputs, seed, found: os.kill(os.getpid(), signal.SIGKILL))
    found = sorted(fuzz.portions({"states": fuzz.PORTION + 1}, seed=0), key=str)
    assert [(kind, *counts) for kind, counts in found] == [
        ("states", f"inputs from {first} on: ended with status -9") for first in (0, fuzz.PORTION)
    ]


def test_the_fuzzer_sees_calls_that_are_refused_too_late(monkeypatch, tmp_path):
    def forgets(sparsifier, gradients):
        sparsifier.iteration += 1
        raise fuzz.CdgrabError("no")

    monkeypatch.setattr("cdgrab.sparsify.base.Sparsifier.reduce", forgets)
    assert any(
        "refused calls changed something" in words for words in fuzz.fuzz("calls", 30, random.Random(0), tmp_path)
    )


def test_the_soak_draws_all_kinds_of_victims_and_disturbances():
    generator = random.Random(0)
    for kind, (draw, _) in victims.VICTIMS.items():
        drawn = [draw(generator) for _ in range(100)]
        words = victims.SORTERS if "script" in kind else [*victims.TASKS, *victims.SORTERS, *victims.SPARSIFIERS[2:]]
        assert all(any(word in victim.words for victim in drawn) for word in words), kind
        processes = {victim.processes for victim in drawn}
        several = any(word in kind for word in ("with", "several"))
        assert processes == ({2, 3, 4} if several else {1 + ("launcher" in kind)})
    happened = [Counter(disturbances.draw(generator, processes) for _ in range(1000)) for processes in (1, 2)]
    assert happened[1].keys() == disturbances.DISTURBANCES.keys() and not happened[0]["link cut"]


def test_the_soak_sees_statuses_tracebacks_and_numbers_that_are_wrong(tmp_path):
    run, script = (victims.VICTIMS[kind][0](random.Random(0)) for kind in ("run", "script"))
    for victim, kind, statuses, printed, wrong in (
        (run, "", {0}, "", None),
        (run, "", {75}, "", "undisturbed: ended with {75}"),
        (run, "told to end", {75, 4}, "", None),
        (run, "told to end", {2}, "", "told to end: ended with {2}"),
        (run, "disk full", {2}, "", None),
        (run, "disk full", {2}, "Traceback", "disk full: a traceback"),
        (run, "link cut", {processes.HANGS}, "", "link cut: ended with {256}, hangs"),
        (script, "link cut", {1}, "Traceback", None),
        (script, "link cut", {-signal.SIGSEGV}, "", "link cut: ended with {-11}"),
        (script, "", {1}, "Traceback", "undisturbed: ended with {1}, a traceback"),
    ):
        assert [wrong in words for words in soak.complaints(victim, kind, statuses, printed)] == [True] * bool(wrong)
    assert soak.differ(script, [tmp_path, tmp_path])  # neither has come to an end
    one, other = ({"lines": [{"loss": loss}], "weights": torch.tensor([loss])} for loss in (0.1, 0.1 + 1e-12))
    assert soak.same(one, one) and soak.same(one, other, 1e-9) and not soak.same(one, other)


def test_a_link_is_cut_and_nothing_stays_open():
    mine, other = socket.socketpair()
    with mine, subprocess.Popen(["sleep", "60"], pass_fds=[other.fileno()]) as child:
        other.close()
        before = os.listdir("/proc/self/fd")
        disturbances.link_is_cut([child.pid], random.Random(0))
        assert mine.recv(1) == b"" and os.listdir("/proc/self/fd") == before
        child.kill()


def test_calls_add_up(tmp_path, monkeypatch):
    monkeypatch.setattr(reliability, "home", lambda trial: tmp_path)
    for seed in (3, 4):
        monkeypatch.setattr(reliability, "now", lambda seed=seed: str(seed))
        record = reliability.Record("soak", seed)
        for kills in (1, 5):
            record.write(kills={"link cut": kills, "disk full": seed}, differences=0)
    assert record.total("kills") == {"link cut": 10, "disk full": 7} and record.total("differences") == {}
    assert [call["seed"] for call in json.loads((tmp_path / "reliability.json").read_text())["soak"]] == [3, 4]
