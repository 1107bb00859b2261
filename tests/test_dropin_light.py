"""The drop-in sampler where only torch and numpy are installed: one process start for all checks."""

import json
import subprocess
import sys
from pathlib import Path

import light_checks
import pytest
from dropin_cases import EXAMPLES, sorted_alone
from test_dropin_processes import by_hand, in_order


@pytest.fixture(scope="module")
def found():
    script = Path(light_checks.__file__)
    answer = subprocess.run([sys.executable, script], cwd=script.parent.parent, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def test_the_library_loads_little_and_nothing_of_the_suite(found):
    assert found["suite"] == []
    assert "cdgrab.dropin.sampler" in found["loaded"] and len(found["loaded"]) <= 300


def test_it_trains_as_with_everything_installed_and_resumes_mid_epoch(found):
    assert found["whole"] == light_checks.uninterrupted() == found["resumed"]
    assert [sorted(sum(epoch, [])) for epoch in found["whole"]] == [list(range(EXAMPLES))] * 3


def test_it_runs_with_ddp(found):
    visited, units = ([process[name] for process in found["parallel"]] for name in ("visited", "units"))
    gradients, _ = by_hand(visited)
    assert visited == in_order(units, sorted_alone(gradients))
