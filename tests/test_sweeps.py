"""Sweeps that are ended from outside."""

import os
import signal
import sys
import time

import pytest
from forked import started

from experiments import early, launch
from experiments.store.files import ROOT
from experiments.store.records import read_metrics
from experiments.training import config


@pytest.mark.parametrize(
    ("number", "jobs", "replicas", "under_way"), [(signal.SIGINT, 1, "1", 1), (signal.SIGTERM, 2, "auto", 3)]
)
def test_a_signal_ends_the_whole_sweep(tmp_path, number, jobs, replicas, under_way):
    """Not only the runs under way: a sweep that goes on unseen would train on code that is being edited."""
    runs = tmp_path / "lr_hmda" / "adhoc" / "embedded,epochs=5000"
    with started(sweep, tmp_path, f"jobs={jobs}", f"replicas={replicas}") as process:
        while len(list(runs.glob("*/metrics.jsonl"))) < under_way and process.is_alive():
            time.sleep(0.05)
        os.kill(process.pid, number)
        process.join(60)
        assert process.exitcode == early.STATUS[number]
        nobody_trains_on(runs, under_way)


def sweep(folder, *settings):
    """As the command does it. The sorter is one that every process finds by CDGRAB_EXTEND."""
    # the tests themselves may have been started in the background of a shell, where Ctrl-C is ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    early.listen()
    config.RUNS = folder
    os.environ["CDGRAB_EXTEND"] = str(ROOT / "examples" / "extend" / "sorter.py")
    os.environ.pop("CDGRAB_DATA", None)
    long = ["-m", "data=embedded", "epochs=5000", "seed=0,1,2", "sorter=longest_first", "compile=off"]
    with open(os.devnull, "w") as sys.stderr:
        sys.exit(launch.main([*long, *settings]))


def nobody_trains_on(runs, under_way):
    assert sorted(path.name for path in runs.iterdir()) == [f"longest_first-s{seed}" for seed in range(under_way)]
    lengths = [len(read_metrics(path / "metrics.jsonl")) for path in runs.iterdir()]
    time.sleep(1)
    assert [len(read_metrics(path / "metrics.jsonl")) for path in runs.iterdir()] == lengths, "a rank is still training"
