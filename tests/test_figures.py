"""From run folders to figures, tables and notebooks: on made-up runs with known answers, and on a small real sweep."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import nbformat
import pandas as pd
import pytest
from made_up_runs import write_run

from cdgrab import figures, report, results
from cdgrab.config import ROOT
from cdgrab.errors import CdgrabError
from cdgrab.published import published
from cdgrab.results import Group, groups, sweeps
from cdgrab.runlog import read_metrics
from scripts.reproduce import EXPERIMENTS

METRICS = ("train_loss", "test_accuracy")
FIGURE = "fig3a_lr_hmda"


@pytest.fixture
def group(tmp_path, monkeypatch):
    """CD-GraB at 5 − epoch + seed/10, D-RR at 3 + seed/5 for ever: CD-GraB reaches D-RR's 3.1 in epoch 1.95."""
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    folder = tmp_path / FIGURE / "made-up"
    for seed in (0, 1):
        write_run(folder, "cd_grab", "CD-GraB", seed, [5 - e + seed / 10 for e in range(1, 5)], size="quick")
        write_run(folder, "d_rr,shared=True", "D-RR", seed, [3.5 + seed / 10] * 4, size="quick")
        write_run(folder, "d_rr", "D-RR", seed, [3.0 + seed / 5] * 4, size="quick")
        write_run(folder, "riffle", "Riffle", seed, [2.0 + seed / 5] * 4, size="quick")
    write_run(folder, "d_rr", "D-RR", 2, [9.0], status="running")
    return Group(folder)


def test_group_reads_finished_runs_only(group):
    assert group.sorters == ["cd_grab", "d_rr", "d_rr,shared=True", "riffle"]
    assert [group.label(s) for s in group.sorters[1:]] == ["D-RR", "D-RR, shared order", "riffle (published code)"]
    curve = group.curve("cd_grab", "train_loss")
    assert curve["mean"].tolist() == pytest.approx([4.05, 3.05, 2.05, 1.05])
    assert curve["std"].tolist() == pytest.approx([0.05] * 4)  # over seeds, population form as in the paper
    assert curve["elapsed"].tolist() == [2.0, 4.0, 6.0, 8.0]
    assert group.final("d_rr", "train_loss").to_dict() == {0: 3.0, 1: 3.2}


def cells_of(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_summary_table_has_the_right_numbers(group):
    text = report.summary(group, METRICS, FIGURE)
    row = next(cells for cells in cells_of(text) if cells[0] == "CD-GraB")
    assert row == ["CD-GraB", "2", "1.050000 ± 0.050000", "80.500 ± 0.500", "1.9", "2.000"]
    # differences -2 and -2.1: t = -2.05 / 0.05 = -41 with one degree of freedom, p = 1 - 2 atan(41) / pi
    differences = {tuple(cells[:2]): cells[2:] for cells in cells_of(text) if "−" in cells[0]}
    assert differences["CD-GraB − D-RR", "full train loss"] == ["-2.05 ± 0.05", "2 of 2 seeds", "p = 0.016"]
    assert differences["CD-GraB − riffle (published code)", "full train loss"][0] == "-1.05 ± 0.05"
    assert differences["riffle (published code) − D-RR, shared order", "full train loss"][0] == "-1.45 ± 0.05"
    assert len(differences) == 2 * 5  # three sorters against D-RR, and the two pairs above
    assert "size quick" in text and "made up, 1,234 rows" in text and "2 seeds" in text and "commit abc123" in text
    assert "0.335455" in text  # what the paper reports


@pytest.mark.parametrize(("target", "epoch"), [(10.0, 1.0), (3.0, 2.5), (2.0, 3.0), (0.5, None)])
def test_first_crossing_interpolates(target, epoch):
    found = report.first_crossing(pd.Series([5.0, 4.0, 2.0], index=[1, 2, 3]), target)
    assert found == epoch if epoch else found != found


def labels_of(figure):
    return [line.get_label() for line in figure.axes[0].get_lines()]


def test_papers_curves_are_drawn_only_beside_the_papers_own_data(group, tmp_path):
    ours = ["CD-GraB", "D-RR", "D-RR, shared order", "riffle (published code)"]
    assert labels_of(figures.learning_curves(group, METRICS, "title", FIGURE)) == ours
    own = tmp_path / FIGURE / "own"
    write_run(own, "cd_grab", "CD-GraB", 0, [0.4] * 4, papers_own=True)
    figure = figures.learning_curves(Group(own), METRICS, "title", FIGURE)
    assert labels_of(figure) == ["CD-GraB", "CD-GraB, paper", "D-RR, paper"]
    paper = figure.axes[0].get_lines()[1]
    by_seconds = figure.axes[2].get_lines()[1]
    assert by_seconds.get_xdata()[-1] > 500 and figure.axes[2].get_xscale() == "log"
    assert paper.get_xdata()[-1] == 49.5 and paper.get_ydata()[-1] == pytest.approx(0.33545536, abs=1e-6)


@pytest.mark.parametrize(
    ("folder", "run", "drawn"),
    [
        ("NY-2017", {}, True),
        ("NY-2017,epochs=3", {}, True),
        ("NY-2017,epochs=3,lr=0.1", {}, False),
        ("NY-2017,workers=8", {}, False),
        ("NY-2017,workers=8", {"columns": "workers"}, True),
        ("NY-2017,limit=100", {}, False),
        ("NY-2017-quick", {"size": "quick"}, False),
        ("NJ-2017", {"papers_own": False}, False),
    ],
)
def test_only_the_papers_data_and_settings_are_like_the_paper(tmp_path, folder, run, drawn):
    write_run(tmp_path / FIGURE / folder, "cd_grab", "CD-GraB", 0, [0.4], **{"papers_own": True} | run)
    group = Group(tmp_path / FIGURE / folder)
    assert group.like_the_paper == drawn
    assert group.as_compared(("train_loss", "test_ppl")) == ("train_loss", "test_ppl_authors" if drawn else "test_ppl")


# -- one figure from several groups ------------------------------------------------------------------------------------

SWEPT = "fig4_cifar10_workers"
HERDING = ("herding_per_vector", "herding_per_step")


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """4 and 64 workers on CIFAR-10, 4 on another source; herding every second epoch; 64 workers lack one sorter."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.delenv("CDGRAB_GROUP", raising=False)
    runs = tmp_path / "runs" / "cifar10" / SWEPT
    for folder, workers, own in [
        ("CIFAR-10", 64, True),
        ("CIFAR-10,workers=4", 4, True),
        ("other,workers=4", 4, False),
    ]:
        for sorter, label, loss in [("cd_grab", "CD-GraB", 1.0), ("d_rr", "D-RR", 2.0)][: 1 if workers == 64 else 2]:
            herding = {name: {2: 10.0 * loss, 4: 9.0 * loss} for name in HERDING}
            losses = [loss + 1 / e for e in range(1, 5)]
            settings = {"workers": workers, "columns": "workers", "metrics": herding}
            write_run(runs / folder, sorter, label, 0, losses, papers_own=own, **settings)
    return runs


def test_a_sweep_gathers_the_groups_of_one_source(swept, monkeypatch):
    found = sweeps(SWEPT, "workers", "herding_per_step")
    assert {sweep.source: [group.column for group in sweep.groups] for sweep in found} == {
        "CIFAR-10": [4, 64],
        "other": [4],
    }
    assert "4, 64 workers" in next(sweep for sweep in found if sweep.source == "CIFAR-10").caption()
    monkeypatch.setenv("CDGRAB_GROUP", str(swept / "CIFAR-10,workers=4"))
    assert [sweep.source for sweep in sweeps(SWEPT, "workers")] == ["CIFAR-10"]
    with pytest.raises(CdgrabError, match="no finished runs of fig4_cifar10_workers with test_ppl"):
        sweeps(SWEPT, "workers", "test_ppl")


def test_a_sweeps_figure_has_a_column_per_value_and_a_row_per_metric(swept):
    sweep = next(sweep for sweep in sweeps(SWEPT, "workers") if sweep.source == "CIFAR-10")
    figure = figures.sweep_curves(sweep, METRICS, "title", SWEPT)
    few, many = figure.axes[:2]
    assert [panel.get_title() for panel in figure.axes] == ["4 workers", "64 workers", "", ""]
    assert [panel.get_ylabel() for panel in figure.axes] == ["full train loss", "", "test accuracy (%)", ""]
    assert few.get_ylim() == many.get_ylim()
    series = ["CD-GraB", "D-RR", "ID-GraB (Bal)", "ID-GraB (PairBal)"]
    assert [line.get_label() for line in many.get_lines()] == ["CD-GraB", *(f"{name}, paper" for name in series)]
    assert list(few.get_lines()[1].get_ydata()) == pytest.approx([3.0, 2.5, 2 + 1 / 3, 2.25])
    for panel, workers in ((few, 4), (many, 64)):
        drawn = next(line for line in panel.get_lines() if line.get_label() == "D-RR, paper")
        paper = published(SWEPT, "train_loss", column=workers)["D-RR"]
        assert list(drawn.get_ydata()) == paper["mean"].tolist() and list(drawn.get_xdata()) == paper["x"].tolist()
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(legend) == sorted(["CD-GraB", "D-RR", *(f"{name}, paper" for name in series)])


def test_herding_is_drawn_where_it_was_logged(swept):
    sweep = next(sweep for sweep in sweeps(SWEPT, "workers") if sweep.source == "other")
    figure = figures.sweep_curves(sweep, HERDING, "title", "fig9_cifar10_herding")
    lines = [line for panel in figure.axes for line in panel.get_lines()]
    assert [line.get_label() for line in lines] == ["CD-GraB", "D-RR"] * 2  # never the paper's beside other data
    assert list(lines[0].get_xdata()) == [2, 4] and list(lines[1].get_ydata()) == [20.0, 18.0]
    table = report.sweep_summary(sweep, HERDING, "fig9_cifar10_herding")
    assert re.search(r"\| 4 workers \| CD-GraB \| 1 +\| 9.000000 ± 0.000000", table)
    difference = ["4 workers", "CD-GraB − D-RR", "herding bound, per vector", "-9 ± 0", "1 of 1 seeds", "one seed"]
    assert difference in cells_of(table)


def test_figures_show_the_data_and_are_reproducible(group):
    figure = figures.learning_curves(group, METRICS, "title", FIGURE)
    line = figure.axes[0].get_lines()[0]
    assert list(line.get_ydata()) == pytest.approx([4.05, 3.05, 2.05, 1.05]) and list(line.get_xdata()) == [1, 2, 3, 4]
    assert any(group.caption() in text.get_text() for text in figure.texts)
    paths = figures.save(figure, "one")
    again = figures.save(figures.learning_curves(group, METRICS, "title", FIGURE), "two")
    assert [path.suffix for path in paths] == [".png", ".pdf"]
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in again]


def test_no_runs_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.delenv("CDGRAB_GROUP", raising=False)
    with pytest.raises(CdgrabError, match="no finished runs of fig3a_lr_hmda"):
        groups(FIGURE)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what reproduce needs, so that the real results/ stay untouched."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("cdgrab", "configs", "experiments", "scripts", "notebooks"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(folder / name)], check=True)
    (folder / "results").mkdir()
    subprocess.run(["cp", "-r", str(ROOT / "results" / "paper"), str(folder / "results" / "paper")], check=True)
    return folder


def environment(checkout):
    kept = {key: value for key, value in os.environ.items() if key not in ("CDGRAB_DATA", "CDGRAB_GROUP")}
    return kept | {"PYTHONPATH": str(checkout)}


def call(checkout, module, *arguments):
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=checkout, env=environment(checkout), capture_output=True, text=True, timeout=300)


def test_reproduce_runs_draws_and_prints(checkout):
    """`make reproduce-LR-HMDA SEEDS=1 EPOCHS=3 DATA=embedded`, on a real small sweep, twice."""
    options = ("LR-HMDA", "--seeds", "1", "--epochs", "3", "--data", "embedded", "--nproc", "1", "--size", "smoke")
    first = call(checkout, "scripts.reproduce", *options)
    assert first.returncode == 0, first.stderr
    assert re.search(r"\| CD-GraB +\| 1 ", first.stdout) and "EMBEDDED DATA" in first.stdout
    name = "fig3a_lr_hmda-embedded-smoke,epochs=3"
    for suffix in ("png", "pdf", "md"):
        assert (checkout / "results" / "figures" / f"{name}.{suffix}").stat().st_size > 500
    executed = nbformat.read(checkout / "results" / "notebooks" / "fig3a_lr_hmda.ipynb", as_version=4)
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    again = call(checkout, "scripts.reproduce", *options)
    assert again.returncode == 0 and again.stdout.count("already complete") == 2


def test_reproduce_all_goes_on_after_a_failing_task_and_ends_with_one_table(checkout):
    """Two of the real tasks around one that cannot be run; LR-HMDA's runs are there from the test above."""
    tasks = {"lr-hmda": EXPERIMENTS["lr-hmda"], "broken": ["fig0_missing"], "cifar10": EXPERIMENTS["cifar10"][:2]}
    overrides = ["epochs=3", "nproc=1", "data=embedded", "size=smoke"]
    code = f"from scripts import reproduce as r; r.EXPERIMENTS = {tasks}; exit(r.reproduce_all({overrides}, 1))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=checkout, env=environment(checkout), capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "error: unknown experiment 'fig0_missing'" in done.stderr
    table = (checkout / "results" / "figures" / "all.md").read_text()
    assert table in done.stdout and "failed: broken (exit status 2)" in table
    rows = cells_of(table)
    assert [row[0] for row in rows[2:]] == [
        *("lr_hmda, 4 workers", "lr_hmda, 4 workers"),
        *("cifar10, 4 workers", "cifar10, 4 workers", "cifar10, 64 workers", "cifar10, 64 workers"),
        *("cifar10, 4 workers", "cifar10, 64 workers"),  # the herding bound
    ]
    row = dict(zip(rows[0], rows[2], strict=True))
    runs = checkout / "results" / "runs" / "lr_hmda" / "fig3a_lr_hmda" / "embedded-smoke,epochs=3"
    ours, theirs = (read_metrics(runs / f"{s}-s0" / "metrics.jsonl")[-1]["train_loss"] for s in ("cd_grab", "d_rr"))
    assert row["CD-GraB − D-RR"] == f"{ours - theirs:+.3g} ± 0" and row["size"] == "smoke"
    assert row["data"].startswith("EMBEDDED: ") and row["paired t-test"] == "one seed"
    for figure in (SWEPT, "fig9_cifar10_herding"):
        assert (checkout / "results" / "figures" / f"{figure}-embedded-smoke,epochs=3.png").stat().st_size > 500


@pytest.mark.parametrize(("number", "jobs"), [(signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_signal_ends_the_whole_sweep(checkout, number, jobs):
    """Not only the run under way: a sweep that goes on unseen would train on code that is being edited."""
    command = [sys.executable, "-m", "experiments.launch", "-m", "data=embedded", "epochs=5000", "seed=0,1,2"]
    runs = checkout / "results" / "runs" / "lr_hmda" / "adhoc" / "embedded,epochs=5000"
    command = [*command, f"jobs={jobs}"]
    process = subprocess.Popen(command, cwd=checkout, env=environment(checkout), stderr=subprocess.DEVNULL)
    while len(list(runs.glob("*/metrics.jsonl"))) < jobs and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    assert sorted(path.name for path in runs.iterdir()) == [f"cd_grab-s{seed}" for seed in range(jobs)]
    lengths = [len(read_metrics(path / "metrics.jsonl")) for path in runs.iterdir()]
    time.sleep(1)
    assert [len(read_metrics(path / "metrics.jsonl")) for path in runs.iterdir()] == lengths, "a rank is still training"
    shutil.rmtree(runs)


def test_bad_calls_of_the_helpers_are_one_sentence(checkout):
    for module, arguments, message in [
        ("scripts.reproduce", ["nonsense"], f"unknown task 'nonsense'; the tasks are {', '.join(EXPERIMENTS)}, all"),
        ("scripts.reproduce", ["lr-hmda", "--workers", "5"], "cannot be split evenly over workers=5"),
        ("scripts.get_data", ["nonsense"], "unknown task 'nonsense'"),
        ("experiments.launch", ["-m", "sorter=cd_grab,nonsense"], "unknown sorter 'nonsense'"),
        ("experiments.launch", ["data=embedded", "nproc=3"], "cannot be split evenly over 3 processes"),
    ]:
        done = call(checkout, module, *arguments)
        assert done.returncode != 0 and re.fullmatch(r"error: [^\n]+\n", done.stderr) and message in done.stderr


def test_notebooks_only_read_results():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        code = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
        assert "cdgrab" in code and not re.search(r"\bopen\(|data_root|CDGRAB_DATA|plt\.(?!show)", code)
