"""From run folders to figures, tables and notebooks: on made-up runs with known answers, and on a small real sweep."""

import json
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

from cdgrab import figures, report, results
from cdgrab.config import ROOT
from cdgrab.errors import CdgrabError
from cdgrab.results import Group, groups, published
from cdgrab.runlog import read_metrics
from scripts.reproduce import EXPERIMENTS

METRICS = ("train_loss", "test_accuracy")
FIGURE = "fig3a_lr_hmda"


def write_run(folder, sorter, label, seed, losses, papers_own=False, status="finished"):
    run = folder / f"{sorter}-s{seed}"
    run.mkdir(parents=True)
    lines = [
        {"epoch": e, "train_loss": loss, "test_accuracy": 80.0 + seed, "seconds": 2.0}
        for e, loss in enumerate(losses, 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifest = {
        "status": status,
        "sorter": sorter.partition(",")[0],
        "sorter_label": label,
        "seed": seed,
        "size": "quick",
        "commit": "abc123",
        "science": {"workers": 4, "task.batch": 16, "task.lr": 0.005},
        "data": {"embedded": False, "papers_own": papers_own, "description": "made up", "rows": {"all": 1234}},
    }
    (run / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def group(tmp_path, monkeypatch):
    """CD-GraB at 5 − epoch + seed/10, D-RR at 3 + seed/10 for ever: CD-GraB reaches D-RR's 3.05 in epoch 2."""
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    folder = tmp_path / FIGURE / "made-up"
    for seed in (0, 1):
        write_run(folder, "cd_grab", "CD-GraB", seed, [5 - e + seed / 10 for e in range(1, 5)])
        write_run(folder, "d_rr,shared=True", "D-RR", seed, [3.5 + seed / 10] * 4)
        write_run(folder, "d_rr", "D-RR", seed, [3.0 + seed / 10] * 4)
    write_run(folder, "d_rr", "D-RR", 2, [9.0], status="running")
    return Group(folder)


def test_group_reads_finished_runs_only(group):
    assert group.sorters == ["cd_grab", "d_rr", "d_rr,shared=True"]
    assert group.label("d_rr,shared=True") == "D-RR, shared=True"
    curve = group.curve("cd_grab", "train_loss")
    assert curve["mean"].tolist() == pytest.approx([4.05, 3.05, 2.05, 1.05])
    assert curve["std"].tolist() == pytest.approx([0.05] * 4)  # over seeds, population form as in the paper
    assert curve["elapsed"].tolist() == [2.0, 4.0, 6.0, 8.0]
    assert group.final("d_rr", "train_loss").to_dict() == {0: 3.0, 1: 3.1}


def test_summary_table_has_the_right_numbers(group):
    text = report.summary(group, METRICS, FIGURE)
    row = next(line for line in text.splitlines() if line.startswith("| CD-GraB"))
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        *("CD-GraB", "2", "1.050000 ± 0.050000", "80.500 ± 0.500", "2.0", "2.000")
    ]
    assert "CD-GraB − D-RR, final full train loss: -2 ± 0, better on 2 of 2 seeds." in text
    assert "size quick" in text and "made up, 1,234 rows" in text and "2 seeds" in text and "commit abc123" in text
    assert "0.335455" in text  # what the paper reports


@pytest.mark.parametrize(("target", "epoch"), [(10.0, 1.0), (3.0, 2.5), (2.0, 3.0), (0.5, None)])
def test_first_crossing_interpolates(target, epoch):
    found = report.first_crossing(pd.Series([5.0, 4.0, 2.0], index=[1, 2, 3]), target)
    assert found == epoch if epoch else found != found


def test_published_curves_come_from_the_paper():
    loss, accuracy = (published(FIGURE, metric) for metric in METRICS)
    assert set(loss) == set(accuracy) == {"CD-GraB", "D-RR"}
    assert loss["CD-GraB"]["mean"].iloc[-1] == pytest.approx(0.33545536, abs=1e-6)
    assert loss["D-RR"]["mean"].iloc[-1] == pytest.approx(0.33724705, abs=1e-6)
    assert accuracy["CD-GraB"]["mean"].iloc[-1] == pytest.approx(82.371071, abs=1e-4)
    assert published("fig0_nothing", "train_loss") == {}


def labels_of(figure):
    return [line.get_label() for line in figure.axes[0].get_lines()]


def test_papers_curves_are_drawn_only_beside_the_papers_own_data(group, tmp_path):
    ours = ["CD-GraB", "D-RR", "D-RR, shared=True"]
    assert labels_of(figures.learning_curves(group, METRICS, "title", FIGURE)) == ours
    own = tmp_path / FIGURE / "own"
    write_run(own, "cd_grab", "CD-GraB", 0, [0.4] * 4, papers_own=True)
    figure = figures.learning_curves(Group(own), METRICS, "title", FIGURE, pair_offset=0.5)
    assert labels_of(figure) == ["CD-GraB", "CD-GraB, paper", "D-RR, paper"]
    paper = figure.axes[0].get_lines()[1]
    by_seconds = figure.axes[2].get_lines()[1]
    assert by_seconds.get_xdata()[-1] > 500 and figure.axes[2].get_xscale() == "log"
    assert paper.get_xdata()[-1] == 49.5 and paper.get_ydata()[-1] == pytest.approx(0.33545536, abs=1e-6)


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
    options = ("LR-HMDA", "--seeds", "1", "--epochs", "3", "--data", "embedded", "--nproc", "1")
    first = call(checkout, "scripts.reproduce", *options)
    assert first.returncode == 0, first.stderr
    assert re.search(r"\| CD-GraB +\| 1 ", first.stdout) and "EMBEDDED DATA" in first.stdout
    name = "fig3a_lr_hmda-embedded,epochs=3"
    for suffix in ("png", "pdf", "md"):
        assert (checkout / "results" / "figures" / f"{name}.{suffix}").stat().st_size > 500
    executed = nbformat.read(checkout / "results" / "notebooks" / "fig3a_lr_hmda.ipynb", as_version=4)
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    again = call(checkout, "scripts.reproduce", *options)
    assert again.returncode == 0 and again.stdout.count("already complete") == 2


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
        ("scripts.reproduce", ["nonsense"], f"unknown task 'nonsense'; the tasks are {', '.join(EXPERIMENTS)}"),
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
