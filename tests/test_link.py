"""Training over limited links: one process's share of the benchmark, and what is said about its rows."""

import contextlib
import itertools
import json
from functools import partial

import IPython.display as notebook_display
import pytest
import torch.distributed as dist

from experiments.report import bench_claims, figures_link, plots
from experiments.report.notebook import FOLDER
from experiments.store import bench as bench_results
from scripts.bench import delay, hosts, link, link_methods
from scripts.bench.__main__ import main


def test_every_method_takes_its_turns(tmp_path, monkeypatch):
    """As one of the processes does, here the only one."""
    for key, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(key, value)
    # with a store that listens nowhere: DDP would keep it
    alone = partial(dist.init_process_group, store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(link.dist, "init_process_group", alone)
    calls = []
    monkeypatch.setattr(hosts, "limit", lambda *settings: calls.append(settings))
    monkeypatch.setattr(hosts, "sent_bytes", lambda rank: 1000 * len(calls))
    clock = itertools.count()
    monkeypatch.setattr(hosts, "delaying_seconds", lambda: next(clock) if calls[-1][2] else 0.0)
    monkeypatch.setattr(hosts, "round_trip_ms", lambda rank: 2.1)
    tiny = link_methods.Trained(lambda: link_methods.TinyGpt2(50, width=16, layers=1, heads=2), (4,), words=50)
    monkeypatch.setitem(link_methods.MODELS, "LSTM", tiny)
    monkeypatch.setattr(link, "MOST_STEPS", 2)
    link.main(str(tmp_path / "found"), "LSTM", "smoke", "1.0/0.0", "1.0/0.1")
    assert calls == [(0, 1e9, 0.0), (0, 1e9, 0.1)]
    direct, delayed = json.loads((tmp_path / "found0").read_text())
    rows, (first, *_) = (list(link._rows([found] * 2, 1.0)) for found in (direct, delayed))
    assert [(row["method"], row["density"]) for row in rows] == link_methods.methods()
    assert first["round_trip_ms"] == 2.1 and 0 < first["delay_cpu_seconds"] <= 1
    assert not any({"round_trip_ms", "delay_cpu_seconds"} & row.keys() for row in rows)
    for row in rows:
        assert row["ratio"] == pytest.approx(row["seconds_per_step"] / rows[1]["seconds_per_step"], rel=1e-3)
        if row["density"]:
            assert 0 < row["selecting_cpu_seconds"] < row["hook_cpu_seconds"] < row["seconds_per_step"]
        if row["density"] and row["method"] != "SIDCo":  # which guesses
            assert row["density"] / 3 < row["sent_density"] < 3 * row["density"]


def turns(seconds, sent):
    return [{"seconds": s, "cpu": s / 2, "bytes": sent, "delaying": 0.0} for s in seconds]


def test_rows_are_medians_of_rounds():
    """The first process's clock, the bytes of the one that sends most, ratios within a round."""
    means = {"hook_cpu_seconds": 0.1, "selecting_cpu_seconds": 0.02, "sent_density": 0.0012}
    methods = {"DDP": ("DDP", None), "no exchange": ("no exchange", None), "ExDyna 0.001": ("ExDyna", 0.001)}
    found = {"steps": 1, "parameters": 25_000_000, "methods": methods, "sparse": {"ExDyna 0.001": means}}
    times = {"DDP": [1.0, 2.0, 4.0], "no exchange": [0.2] * 3, "ExDyna 0.001": [0.5, 0.5, 2.0]}
    every = [found | {"turns": {name: turns(times[name], sent) for name in times}} for sent in (1000, 5000)]
    every[1]["turns"]["DDP"] = turns([9.0] * 3, 10)
    plain, _, sparse = link._rows(every, gigabits=1.0)
    assert (plain["seconds_per_step"], plain["ratio"], plain["bytes_per_step"]) == (2.0, 1.0, 1000)
    assert (sparse["seconds_per_step"], sparse["ratio"], sparse["ratio_quartiles"]) == (0.5, 0.5, [0.375, 0.5])
    assert (sparse["bytes_per_step"], sparse["link_seconds"], sparse["alone_seconds"]) == (5000, 4e-5, 0.2)
    assert sparse.items() >= means.items() and sparse["cpu_seconds"] == 0.5 and sparse["rounds"] == 3


def made_up(method, density, seconds, *, model="transformer", gigabits=1.0, spread=0.02):
    ratio = seconds / 2.0
    sparse = {"hook_cpu_seconds": 0.1, "selecting_cpu_seconds": 0.02, "sent_density": density} if density else {}
    return {
        **{"device": "cpu", "model": model, "link": gigabits, "delay": 0.0, "method": method, "density": density},
        **{"seconds_per_step": seconds, "ratio": ratio, "ratio_quartiles": [ratio - spread, ratio + spread]},
        **{"parameters": 25_000_000, "bytes_per_step": 2_000_000, "link_seconds": 0.016, "alone_seconds": 0.3},
        **{"cpu_seconds": 0.4, "rounds": 4, "steps": 1, **sparse},
    }


@pytest.fixture
def results(tmp_path, monkeypatch):
    """ExDyna wins over 1 Gbit/s, where MiCRO does not send enough, and one more has quartiles that overlap; over 10
    Gbit/s two are nearly as fast as each other."""
    monkeypatch.setenv("CDGRAB_BENCH", str(tmp_path))
    slow = [made_up("no exchange", None, 0.3), made_up("DDP", None, 2.0), made_up("Top-k", 0.01, 0.9)]
    slow += [made_up("ExDyna", 0.01, 0.7), made_up("ExDyna as published", 0.01, 0.89), made_up("ExDyna", 0.001, 0.5)]
    fast = [made_up("DDP", None, 2.0, gigabits=10.0), made_up("PowerSGD, rank 1", None, 1.9, gigabits=10.0)]
    fast += [made_up("no exchange", None, 0.3, gigabits=10.0), made_up("CD-GraB", None, 2.5, gigabits=10.0)]
    slow += [made_up("CD-GraB", None, 2.5), made_up("ExDyna in 4 sections", 0.01, 0.56, spread=0.02)]
    slow += [made_up("MiCRO", 0.01, 0.1) | {"sent_density": 0.008}]
    fast += [made_up(method, 0.01, 3.0, gigabits=10.0) for method in ("Top-k", "ExDyna", "ExDyna as published")]
    cannot = {"device": "cpu", "link": 1.0, "delay": 0.1, "skipped": "this kernel cannot"}
    made = {"size": "full", "machine": "a machine", "cores": 2, "load": [1.0], "ended": "2026", "commit": "abc"}
    bench_results.write("link", "cpu", [*fast, *slow, cannot], made)


def test_the_winner_is_named_for_every_link(results):
    fast, slow = figures_link.winners("cpu")
    assert fast == (
        "transformer (25 M parameters) over 10 Gbit/s: PowerSGD, rank 1, 1.9 s a step, 1.05 times as fast as DDP (not "
        "told apart from it: DDP); of the sparsifiers Top-k, 0.01, 3 s a step, 0.667 times as fast as DDP."
    )
    assert slow == (
        "transformer (25 M parameters) over 1 Gbit/s: ExDyna, 0.001, 0.5 s a step, 4 times as fast as DDP (not told "
        "apart from it: ExDyna in 4 sections, 0.01)."
    )
    (slow,) = figures_link.sent_early("cpu")
    assert slow.endswith("over 1 Gbit/s, ExDyna in 4 sections: times as fast as ExDyna: 1.25 at 0.01.")
    (off,) = figures_link.unmatched("cpu")
    assert off.endswith("over 1 Gbit/s: not compared, since less is sent than is wanted: MiCRO, 0.01 (0.008).")
    assert figures_link.skipped("cpu") == ["1 Gbit/s with a delay of 0.1 ms: not measured, this kernel cannot"]


def test_links_with_a_delay_have_their_place_in_what_is_said(results):
    """Those that were skipped once, and have been measured since; claims are of links without."""
    before = [list(bench_claims.speed("ExDyna")), figures_link.fastest()]
    line = {"delay": 0.1, "round_trip_ms": 0.21}
    methods = [("no exchange", None, 0.0), ("DDP", None, 0.03), ("CD-GraB", None, 0.04), ("ExDyna", 0.001, 0.01)]
    rows = [made_up(m, d, 1.0) | line | {"delay_cpu_seconds": cpu} for m, d, cpu in methods]
    bench_results.write("delay", "cpu", rows, {"size": "full", "ended": "2027", "commit": "def"})
    assert not figures_link.skipped("cpu") and list(bench_claims.speed("ExDyna")) == before[0]
    (said,) = figures_link.delayed("cpu")
    assert said == (
        "transformer (25 M parameters) over 1 Gbit/s with a delay of 0.1 ms: a round trip takes 0.21 ms; of a "
        "processor, the process that delays takes 0.03 s in a step of DDP and 0.01 s in a step of ExDyna, 0.001."
    )
    assert [row.split("|")[2].strip() for row in figures_link.fastest().splitlines()[2:]] == [
        *("10 Gbit/s", "1 Gbit/s", "1 Gbit/s with a delay of 0.1 ms")
    ]


def test_every_delay_has_a_start_of_its_own(monkeypatch):
    """Of all links only those are left out that cannot be."""
    starts, found = [], {"turns": {}}
    monkeypatch.setattr(hosts, "why_not", lambda delay=0.0: "too long" if delay > 0.5 else "")
    monkeypatch.setattr(hosts, "hosts", lambda count, speed, delay=0.0: contextlib.nullcontext())
    monkeypatch.setattr(hosts, "run_on_hosts", lambda *call: starts.append(call[2]) or [[found] * len(call[2][2:])] * 4)
    monkeypatch.setattr(link, "_rows", lambda every, gigabits: [])
    monkeypatch.setitem(link.TRAINED, "full", ("LSTM",))
    rows = [*link.over([(10.0, 0.0), (1.0, 0.0), *delay.LINKS["full"]], "cpu", "full")]
    assert [start[2:] for start in starts] == [("10.0/0.0", "1.0/0.0"), ("1.0/0.001",), ("1.0/0.1",)]
    assert rows == [{"device": "cpu", "link": 1.0, "delay": 1.0, "skipped": "too long"}]


def cells_of(table):
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]


def test_the_tables_of_the_documentation_name_the_same_winners(results):
    where = "transformer, 25 M parameters"
    fast, slow = cells_of(figures_link.fastest())
    assert fast == [where, "10 Gbit/s", "PowerSGD, rank 1", "1.05", "DDP", "the same"]
    assert slow == [where, "1 Gbit/s", "ExDyna, 0.001", "4", "ExDyna in 4 sections, 0.01", "the same"]
    fast, slow = cells_of(figures_link.steps())
    assert fast == [where, "10 Gbit/s", "0.3 s", "2 s, 2 MB", "–", "1.9 s, 2 MB", "–", "3 s, 2 MB", "–", "2.5 s, 2 MB"]
    assert slow[2:] == ["0.3 s", "2 s, 2 MB", *"–––", "0.7 s, 2 MB", "0.5 s, 2 MB", "2.5 s, 2 MB"]
    assert [row[2:] for row in cells_of(figures_link.early())] == [["–", "–"], ["1.25", "–"]]


def test_a_winner_that_was_helped_is_said_to_be(results):
    rows = [made_up("no exchange", None, 0.3), made_up("DDP", None, 2.0), made_up("CD-GraB", None, 2.5)]
    rows += [made_up("ExDyna as published", density, 0.4) for density in (0.01, 0.001)]
    rows += [made_up("ExDyna", 0.001, 0.8), made_up("MiCRO", 0.01, 0.1) | {"sent_density": 0.008}]
    bench_results.write("link", "cpu", rows, {"size": "full", "ended": "2026", "commit": "abc"})
    helped = "ExDyna as published, 0.01, 0.4 s a step, 5 times as fast as DDP (not told apart from it: ExDyna as "
    unaided = (
        "the fastest without a threshold counted beforehand is ExDyna, 0.001, 0.8 s a step, 2.5 times as fast as DDP"
    )
    (sentence,) = figures_link.winners("cpu")
    assert helped in sentence and sentence.endswith(f"; {unaided}.")
    ((*_, alike, other),) = cells_of(figures_link.fastest())
    assert (alike, other) == ("ExDyna as published, 0.001", "ExDyna, 0.001, 2.5 times")


def marked(panel, chosen):
    """What methods stand where the panel has these marks, and how many times as fast as DDP they are."""
    names = [label.get_text() for label in panel.get_yticklabels()]
    points = (line.get_xydata()[0] for line in panel.lines if chosen(line))
    return {names[round(y)]: pytest.approx(x) for x, y in points}


def test_who_wins_is_circled_and_who_sends_too_little_is_crossed_out(results):
    """The slower link on top."""
    slow, fast = figures_link.links("cpu").axes
    crossed, circled = (lambda line: line.get_marker() == "x"), (lambda line: line.get_markersize() == 10)
    assert marked(slow, crossed) == {"MiCRO, 0.01": 20} and not marked(fast, crossed)
    assert marked(slow, circled) == {"ExDyna, 0.001": 4} and marked(fast, circled) == {"PowerSGD, rank 1": 2 / 1.9}
    assert slow.get_title() == "transformer, 25 M parameters\nfastest: ExDyna, 0.001, 4 ×"
    assert fast.get_title() == "fastest: PowerSGD, rank 1, or DDP"
    assert (slow.get_ylabel(), fast.get_ylabel()) == ("1 Gbit/s", "10 Gbit/s")


def test_what_was_wanted_of_exdyna_is_answered(results):
    ((what, wanted, found),) = figures_link.sought()
    assert what.startswith("a step of transformer (25 M parameters) over 1 Gbit/s with ExDyna at 0.001")
    assert wanted == "at least 3 times as fast" and found.startswith("4 times, quartiles 3.7 and 4.35; 0.5 s a step:")
    assert "0.3 s is a step without any exchange, 0.016 s is what the link takes for its 2 MB" in found


def test_speed_is_judged_against_the_fastest_other_sparsifier(results):
    """Which is another one for every model: 1, 2 and 2 s. ExDyna takes 0.5, 0.6 and 0.7 of that. Over another link one
    that sends too little does not count."""
    seconds = {"ExDyna": (0.5, 1.2, 1.4), "ExDyna as published": (1.5, 1.0, 2.0), "Top-k": (1, 3, 3), "DEFT": (2, 2, 2)}
    rows = [
        made_up(method, 0.01, taken, model=model)
        for method, every in seconds.items()
        for model, taken in zip(("LSTM", "ResNet-18", "transformer"), every, strict=True)
    ]
    rows += [made_up("ExDyna as published", 0.01, 0.1, gigabits=10.0) | {"sent_density": 0.005}]
    rows += [
        made_up(method, 0.01, 1.4 / 2 * taken, gigabits=10.0) for method, taken in (("ExDyna", 2), ("DEFT", 20 / 7))
    ]
    bench_results.write("link", "cpu", rows, bench_results.read_manifests("link")["cpu"])
    (published,), (ours,) = map(bench_claims.speed, ("ExDyna as published", "ExDyna"))
    assert ours.where == "speed, ExDyna, 4 processes on one CPU, links of 1 to 10 Gbit/s"
    assert (ours.verdict, published.verdict) == ("reproduced", "cannot decide")
    assert ours.ours.startswith("0.594 [0.391, 0.903] of the time") and ours.ours.endswith(
        "faster in 4 of 4 combinations of model and link"
    )
    assert (
        "1 of 3 combinations of model and link; 1 combination left out" in published.ours
        and published.reason.startswith("1 is between the ends")
    )


def test_every_method_is_drawn(results, monkeypatch):
    """By the notebook, which says the sentences, too."""
    saved, said = {}, []
    monkeypatch.setattr(plots, "save", lambda figure, name: saved.update({name: figure}))
    monkeypatch.setattr(notebook_display, "display", lambda shown: said.append(shown.data))
    cells = json.loads((FOLDER / "overhead.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    exec("\n".join([code[0], *(cell for cell in code if "figures_link.links" in cell)]), {})
    drawn = [
        marked(panel, lambda line: line.get_markersize() < 4 and line.get_marker() == "o")
        for panel in saved["overhead_link-cpu"].axes
    ]
    assert [len(some) for some in drawn] == [6, 5] and drawn[0]["ExDyna, 0.001"] == 4
    assert {method for method, _ in link_methods.methods()} == set(figures_link.COLOURS)
    assert said[0].count("\n- ") == 5 and "wanted at least 3 times as fast, found 4 times" in said[0]
    assert said[1].count("\n| transformer") == 16


def test_without_hosts_it_says_why(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CDGRAB_BENCH", str(tmp_path))
    monkeypatch.setattr(hosts, "why_not", lambda delay=0.0: "making network namespaces needs root")
    assert main(["link", "--size", "smoke", "--device", "cpu"]) == 0
    assert "skipped: making network namespaces needs root" in capsys.readouterr().out and not list(tmp_path.iterdir())
