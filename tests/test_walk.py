"""The walk of a gradient through the project's files stays short."""

from scripts.walk import two_steps, walk


def test_a_walk_counts_calls_and_returns():
    from cdgrab import checks, streams

    files = walk(lambda: (checks.is_whole(1), checks.is_whole(2), streams.permutation(3, 0, "order")))
    assert files == ["cdgrab/checks.py", "cdgrab/streams.py"]


def test_two_steps_touch_few_files_and_change_file_seldom():
    steps, order = two_steps()
    assert steps[0] == steps[-1] == "experiments/training/loop.py"
    assert {"experiments/training/steps.py", "cdgrab/sorters/base.py", "cdgrab/sorters/server.py"} <= set(steps)
    assert len(set(steps)) <= 8 and len(steps) - 1 <= 14
    assert "cdgrab/sorters/coordinated.py" in order
