"""The timeline of a backward pass: when buckets are handed over and averaged."""

import json

import pytest
from torch import nn

from experiments.report import figures_timeline
from experiments.store import bench as bench_results
from scripts.bench import link_methods, timeline


def test_buckets_are_averaged_after_they_are_handed_over_and_before_backward_returns(tmp_path, monkeypatch):
    """As one of the processes finds it, here the only one."""
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(key, value)
    layers = link_methods.Trained(
        lambda: nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600), nn.Linear(600, 10)), (600,)
    )
    monkeypatch.setitem(timeline.MODELS, "layers", layers)
    timeline.main(str(tmp_path / "found"), "layers", "3")
    found = json.loads((tmp_path / "found0").read_text())
    assert list(found) == ["DDP", "CD-GraB"]
    for each in found.values():
        handed, averaged = each["handed_ms"], each["averaged_ms"]
        assert len(handed) == len(averaged) == 2 and 0 < handed[0] < handed[1]
        assert all(start < end for start, end in zip(handed, averaged, strict=True))
        assert max(averaged) < each["returned_ms"] + 20


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.setenv("CDGRAB_BENCH", str(tmp_path))
    row = {"device": "cpu", "model": "transformer", "processes": 4, "link": 1.0, "steps": 9}
    plain = {"method": "DDP", "handed_ms": [10.0, 50.0, 60.0], "averaged_ms": [40.0, 90.0, 120.0], "returned_ms": 130.0}
    late = {
        "method": "CD-GraB",
        "handed_ms": [10.0, 50.0, 60.0],
        "averaged_ms": [70.0, 90.0, 99.0],
        "returned_ms": 110.0,
    }
    made = {"size": "full", "machine": "a machine", "load": [1.0], "ended": "2026-01-01", "commit": "abc"}
    bench_results.write("timeline", "cpu", [row | plain, row | late], made | {"host": {"cores": 2}})


def test_the_figure_divides_buckets_where_all_gradients_are_computed(rows):
    figure = figures_timeline.timelines("cpu")
    plain, late = figure.axes[:2]
    spans = [(bar.get_x(), bar.get_width()) for bar in plain.patches]
    assert spans == [(0, 60), (10, 30), (40, 0), (50, 10), (60, 30), (60, 0), (60, 60)]
    assert [(bar.get_x(), bar.get_width()) for bar in late.patches][1:3] == [(10, 50), (60, 10)]


def test_sentences_count_what_is_averaged_by_then(rows):
    plain, late = figures_timeline.sentences("cpu")
    assert (
        "after 60 ms; by then 2 of 3 buckets have been handed over and 1 averaged; `backward` returns after 130"
        in plain
    )
    assert "and 0 averaged" in late


def test_without_hosts_it_is_skipped(capsys):
    assert list(timeline.measure("cuda", "smoke")) == [] and "skipped: links" in capsys.readouterr().out
