"""Significance against printed values, and the table of all tasks against numbers computed by hand."""

import math
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_runs import cells_of, write_run

from experiments.report import own, plots, text
from experiments.report import tables as report
from experiments.report.runs import Group
from experiments.report.statistics import paired_p
from experiments.store.files import ROOT
from scripts import report as write_report


def test_paired_p():
    """Student's own data (1908): extra hours of sleep under two drugs, ten patients; t = 4.0621, p = 0.00283."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    assert paired_p([b - a for a, b in zip(first, second, strict=True)]) == pytest.approx(0.002833, abs=1e-6)
    assert math.isnan(paired_p([1.0, 2.0])) and paired_p([0.0] * 3) == 1.0 and paired_p([2.0] * 3) == 0.0


def compared(tmp_path, experiment, folder="made-up", **settings):
    """Three seeds; CD-GraB better by 1, 2 and 3."""
    for seed in range(3):
        perplexity = {name: {1: 100.0 - seed} for name in ("test_ppl", "test_ppl_authors")}
        write_run(
            tmp_path / experiment / folder, "cd_grab", "CD-GraB", seed, [4.0 - seed], metrics=perplexity, **settings
        )
        write_run(tmp_path / experiment / folder, "d_rr", "D-RR", seed, [5.0], metrics=perplexity, **settings)
    return report.comparison(experiment, [Group(tmp_path / experiment / folder)])


def test_the_table_of_all_tasks(tmp_path):
    half, loss, _, accuracy = compared(tmp_path, "fig3a_lr_hmda")
    assert (half["metric"], half["the paper's difference"]) == ("full train loss, last half", "-0.00162")
    assert loss == {
        "task": "made_up, 4 workers",
        "data": "made up",
        "size": "paper",
        "seeds": "3",
        "metric": "full train loss, last epoch",
        "D-RR": "5.000000 ± 0.000000",
        "CD-GraB": "3.000000 ± 1.000000",  # of 4, 3, 2
        "CD-GraB − D-RR": "-2 ± 1",
        "better on": "3 of 3 seeds",
        "paired t-test": "p = 0.074",  # t = 2 / (1 / sqrt 3) = 3.464, two degrees of freedom: 1 - t / sqrt(2 + t²)
        "the paper's difference": "-0.00179",  # 0.33545536 - 0.33724705
    }
    assert (accuracy["CD-GraB − D-RR"], accuracy["better on"]) == ("+0 ± 0", "0 of 3 seeds")
    assert accuracy["the paper's difference"] == "+0.0922"  # 82.371071 - 82.278885


@pytest.mark.parametrize(("own", "metric"), [(True, "test perplexity, as published"), (False, "test perplexity")])
def test_perplexities_are_the_published_codes_beside_the_papers_data_only(tmp_path, own, metric):
    row = compared(tmp_path, "fig3b_lstm_wiki2", papers_own=own)[3]
    assert row["metric"] == f"{metric}, last epoch"
    assert float(row["the paper's difference"]) == pytest.approx(223.537 - 231.922, abs=0.006)


def test_columns_have_the_papers_difference_of_their_own(tmp_path):
    for folder, workers, difference in (("x", 64, "-0.0517"), ("x,workers=4", 4, "-0.0417"), ("x,workers=2", 2, "–")):
        row = compared(tmp_path, "fig4_cifar10_workers", folder, workers=workers, columns="workers")[1]
        assert (row["task"], row["the paper's difference"]) == (f"made_up, {workers} workers", difference)


def test_a_single_sorter_makes_no_row(tmp_path):
    write_run(tmp_path / "fig3a_lr_hmda" / "half", "cd_grab", "CD-GraB", 0, [1.0])
    assert report.comparison("fig3a_lr_hmda", [Group(tmp_path / "fig3a_lr_hmda" / "half")]) == []


def test_a_damaged_run_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("scripts.report.RESULTS", tmp_path)
    folder = tmp_path / "runs" / "lr_hmda" / "fig3a_lr_hmda" / "NJ-2017"
    for sorter in ("cd_grab", "d_rr"):
        write_run(folder, sorter, sorter, 0, [0.5, 0.25])
    path = next(folder.glob("*/metrics.jsonl"))
    path.write_text("x" + path.read_text()[1:])
    assert write_report.main() == 2
    assert "metrics.jsonl is damaged: it has 0 of 2 epochs" in capsys.readouterr().err
    path.with_name("manifest.json").write_text("{")
    assert write_report.main() == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "manifest.json cannot be read" in printed


def test_a_sweep_of_ones_own_gets_its_table_and_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(own, "RESULTS", tmp_path)
    monkeypatch.setattr(own, "home", lambda trial: tmp_path)
    rates = {"x,lr=0.1": 0.1, "x": 0.005, "x,lr=0.01": 0.01}
    for folder, rate in rates.items():
        for sorter, label, loss in (("cd_grab", "CD-GraB", 0.5), ("d_rr", "D-RR", 0.75)):
            for batch, more in ((16, ""), (32, ",batch=32")):
                where = tmp_path / "runs" / "made_up" / "adhoc" / f"{folder}{more}"
                write_run(where, sorter, label, 0, [1.0, loss], **{"task.lr": rate, "task.batch": batch})
    for ours in own.COMMITTED:
        write_run(tmp_path / "runs" / "made_up" / ours / "x", "cd_grab", "CD-GraB", 0, [1.0])
    with plots.words_only():
        drawn = own.write()
    assert [path.name for path in drawn] == ["made_up-adhoc-x.png", "made_up-adhoc-x,batch=32.png"]
    rows = cells_of((tmp_path / "figures" / "made_up-adhoc-x.md").read_text())
    assert [row[:2] for row in rows[2:8]] == [[f"lr {r}", s] for r in (0.005, 0.01, 0.1) for s in ("CD-GraB", "D-RR")]
    assert rows[2][4] == "0.500000" and rows[3][4] == "0.750000"


def test_no_run_that_comes_with_a_clone_is_taken_for_ones_own():
    listed = subprocess.run(["git", "ls-files", "results/runs"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no clone")
    assert {Path(line).parts[3] for line in listed.stdout.splitlines()} <= own.COMMITTED


words = st.lists(st.text("abc", min_size=1, max_size=9), max_size=5).map(" ".join)


@given(table=st.lists(st.lists(words, min_size=3, max_size=3), min_size=2, max_size=5))
def test_pages_fit_a_terminal_and_lose_no_word(table):
    page = "A line of words that is longer than the terminal is wide.\n\n"
    page += text.markdown([dict(zip("xyz", row, strict=True)) for row in table])
    shown = text.for_terminal(page, 60)
    assert max(map(len, shown.splitlines())) <= 60
    assert sorted(re.findall(r"\w+", shown)) == sorted(re.findall(r"\w+", page))


def test_narrow_tables_keep_the_options_of_commands():
    rows = [{"what": "one", "command": "`python -m scripts.bench --size full`"}, {"what": "a -- b", "command": "–"}]
    page = text.narrow(f"A sentence -- and\n{text.markdown(rows)}")
    assert page.splitlines() == [
        *("A sentence -- and", "| what | command |", "|---|---|"),
        *("| one | `python -m scripts.bench --size full` |", "| a -- b | – |"),
    ]
