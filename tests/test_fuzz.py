"""A few hundred of the inputs that `make fuzz` makes up; and that the fuzzer sees what it looks for."""

import random
from collections import Counter

import pytest

from scripts import soak
from scripts.fuzz import __main__ as fuzz

INPUTS = {"settings": 12, "files": 12, "archives": 60, "runs": 14, "gradients": 160, "states": 40}


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_bad_input_is_refused_in_one_sentence_and_nothing_is_lost(kind, tmp_path, monkeypatch):
    monkeypatch.delenv("CDGRAB_DATA", raising=False)
    found = fuzz.fuzz(kind, INPUTS[kind], random.Random(7), tmp_path)
    assert set(found) == {"taken", "refused"} and sum(found.values()) == INPUTS[kind], found


def test_the_fuzzer_sees_crashes_and_errors_of_several_lines(monkeypatch, tmp_path):
    def kinds(generator, scratch):
        while True:
            yield lambda: {}["nothing"]
            yield lambda: (_ for _ in ()).throw(fuzz.CdgrabError("one line\nand another"))

    monkeypatch.setitem(fuzz.KINDS, "broken", kinds)
    found = fuzz.fuzz("broken", 4, random.Random(0), tmp_path)
    assert sorted(found.values()) == [2, 2] and any("KeyError" in words for words in found)


def test_the_soak_draws_all_kinds_of_runs():
    generator = random.Random(0)
    drawn = [soak.draw(generator) for _ in range(200)]
    for words in (*soak.TASKS, *set(soak.SORTERS), "exdyna", "topk"):
        assert any(words in str(case) for case in drawn), words
    assert Counter(case.processes for case in drawn).keys() == set(soak.PROCESSES)
    assert 20 < sum(case.grouped for case in drawn) < 100
