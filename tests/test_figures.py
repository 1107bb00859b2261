"""From run folders to figures and tables, on made-up runs with known answers."""

import json
import re

import pandas as pd
import pytest
from synthetic_runs import cells_of, write_run

from cdgrab.errors import CdgrabError
from experiments.report import figures, plots
from experiments.report import runs as results
from experiments.report import tables as report
from experiments.report.published import published
from experiments.report.runs import Group, groups, sweeps

METRICS = ("train_loss", "test_accuracy")
FIGURE = "fig3a_lr_hmda"


@pytest.fixture(autouse=True)
def crowded(monkeypatch, request):
    """Making room for labels takes longer than all the rest, and only files show it."""
    if "reproducible" not in request.node.name:
        monkeypatch.setattr("matplotlib.figure.Figure.tight_layout", lambda *_, **__: None)


@pytest.fixture
def group(tmp_path, monkeypatch):
    """CD-GraB at 5 − epoch + seed/10, D-RR at 3 + seed/5 for ever: CD-GraB reaches D-RR's 3.2 in epoch 2."""
    monkeypatch.setenv("CDGRAB_FIGURES", str(tmp_path / "figures"))
    folder = tmp_path / FIGURE / "made-up"
    for seed in (0, 1, 2):
        write_run(folder, "cd_grab", "CD-GraB", seed, [5 - e + seed / 10 for e in range(1, 5)], size="quick")
        write_run(folder, "d_rr,shared=True", "D-RR", seed, [3.5 + seed / 10] * 4, size="quick")
        write_run(folder, "d_rr", "D-RR", seed, [3.0 + seed / 5] * 4, size="quick")
        write_run(folder, "riffle", "Riffle", seed, [2.0 + seed / 5] * 4, size="quick")
    write_run(folder, "d_rr", "D-RR", 3, [9.0], status="running")
    return Group(folder)


def test_group_reads_finished_runs_only(group):
    assert group.sorters == ["cd_grab", "d_rr", "d_rr,shared=True", "riffle"]
    assert [group.label(s) for s in group.sorters[1:]] == ["D-RR", "D-RR, shared order", "riffle (no balancing)"]
    curve = group.curve("cd_grab", "train_loss")
    assert curve["mean"].tolist() == pytest.approx([4.1, 3.1, 2.1, 1.1])
    assert curve["std"].tolist() == pytest.approx([0.1] * 4)  # over seeds, the sample's
    assert curve["elapsed"].tolist() == [2.0, 4.0, 6.0, 8.0]
    assert group.final("d_rr", "train_loss").to_dict() == pytest.approx({0: 3.0, 1: 3.2, 2: 3.4})


def test_summary_table_has_the_right_numbers(group):
    text = report.summary(group, METRICS, FIGURE)
    row = next(cells for cells in cells_of(text) if cells[0] == "CD-GraB")
    losses = ["1.600000 ± 0.100000", "1.100000 ± 0.100000"]  # epochs 3 and 4, and 4 alone
    assert row == ["CD-GraB", "3", *losses, "81.000 ± 1.000", "81.000 ± 1.000", "2", "2.000"]
    # differences -2, -2.1, -2.2: t = -2.1 √3 / 0.1 = -36.4 with two degrees of freedom, p = 1 - t / √(t² + 2)
    differences = {tuple(cells[:2]): cells[2:] for cells in cells_of(text) if "−" in cells[0]}
    last, half = "full train loss, last epoch", "full train loss, last half"
    assert differences["CD-GraB − D-RR", last] == ["-2.1 ± 0.1", "3 of 3 seeds", "p = 0.00076"]
    assert differences["CD-GraB − D-RR", half][0] == "-1.6 ± 0.1"
    assert differences["CD-GraB − riffle (no balancing)", last][0] == "-1.1 ± 0.1"
    assert differences["riffle (no balancing) − D-RR, shared order", last][0] == "-1.4 ± 0.1"
    assert len(differences) == 2 * 2 * 5  # three sorters against D-RR, and the two pairs above
    assert "size quick" in text and "made up, 1,234 rows" in text and "3 seeds" in text and "commit abc123" in text
    assert "0.335455" in text  # what the paper reports


@pytest.mark.parametrize(("target", "epoch"), [(10.0, 1.0), (4.0, 2.0), (3.0, 3.0), (2.0, 3.0), (0.5, None)])
def test_epochs_to_a_loss_are_counted(target, epoch):
    found = report.epochs_to(pd.Series([5.0, 4.0, 2.0], index=[1, 2, 3]), target)
    assert found == epoch if epoch else found != found


def labels_of(figure):
    return [line.get_label() for line in figure.axes[0].get_lines()]


def test_papers_curves_are_drawn_only_beside_the_papers_own_data(group, tmp_path):
    ours = ["CD-GraB", "D-RR", "D-RR, shared order", "riffle (no balancing)"]
    assert labels_of(figures.learning_curves(group, METRICS, "title", FIGURE)) == ours
    other = tmp_path / FIGURE / "other"
    for sorter, label in (("cd_grab", "CD-GraB"), ("d_rr", "D-RR")):
        write_run(other, sorter, label, 0, [0.4] * 4)
    figure = figures.learning_curves(Group(other), METRICS[:1], "title", FIGURE)
    assert labels_of(figure) == ["CD-GraB", "D-RR"]  # beside other data, the paper's differences alone
    (theirs,) = [line for line in figure.axes[-1].get_lines() if "paper" in line.get_label()]
    assert theirs.get_ydata()[-1] == pytest.approx(0.33545536 - 0.337247, abs=1e-6)
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
        ("GLUE", {"started_from": "fig11_gpt2_wiki103/WikiText-103"}, True),
        ("GLUE", {"started_from": "fig11_gpt2_wiki103/WikiText-103,epochs=8"}, False),
        ("GLUE", {"started_from": "fig11_gpt2_wiki103/WikiText-103-quick"}, False),
        ("GLUE", {"started_from": "fig11_gpt2_wiki103/novels"}, False),
        ("GLUE", {"started_from": "adhoc/WikiText-103"}, False),
        ("GLUE,epochs=3", {"task.schedule.kind": "linear"}, False),  # its rates end with the epochs
    ],
)
def test_only_the_papers_data_and_settings_are_like_the_paper(tmp_path, folder, run, drawn):
    write_run(tmp_path / FIGURE / folder, "cd_grab", "CD-GraB", 0, [0.4], **{"papers_own": True} | run)
    group = Group(tmp_path / FIGURE / folder)
    assert group.like_the_paper == drawn
    perplexity = "test_ppl" if run.get("size") == "quick" else "test_ppl_authors"  # beside the paper's differences, too
    assert group.as_compared(("train_loss", "test_ppl")) == ("train_loss", perplexity)


@pytest.mark.parametrize(
    ("task", "folder", "size", "said"),
    [
        ("lr_hmda", "NJ-2017", "paper", "made up, 1,234 applications · size paper · "),
        ("lstm_wiki2", "WikiText-2-quick", "quick", "made up, 1,234 words · size quick · "),
        ("gpt2_wiki103", "novels,epochs=8,limit=9", "paper", "1,234 tokens used · size paper with epochs=8, limit=9"),
        ("mlp_m4", "M4,workers=8", "paper", "1,234 windows · size paper · 4 workers"),  # workers are the columns here
    ],
)
def test_captions_name_the_unit_the_size_and_what_was_changed(tmp_path, task, folder, size, said):
    columns = "workers" if "workers" in folder else None
    write_run(tmp_path / FIGURE / folder, "cd_grab", "CD-GraB", 0, [0.4], task=task, size=size, columns=columns)
    assert said in Group(tmp_path / FIGURE / folder).caption()


# -- one figure from several groups ------------------------------------------------------------------------------------

SWEPT = "fig4_cifar10_workers"
HERDING = ("herding_replayed", "herding_per_step")


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """4 and 64 workers on CIFAR-10, 4 on another source and in a trial; herding every second epoch; 64 workers lack one
    sorter."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.delenv("CDGRAB_GROUP", raising=False)
    runs = tmp_path / "runs" / "cifar10" / SWEPT
    for folder, workers, own, size in [
        ("CIFAR-10", 64, True, "paper"),
        ("CIFAR-10,workers=4", 4, True, "paper"),
        ("other,workers=4", 4, False, "paper"),
        ("other-quick,workers=4", 4, False, "quick"),
    ]:
        for sorter, label, loss in [("cd_grab", "CD-GraB", 1.0), ("d_rr", "D-RR", 2.0)][: 1 if workers == 64 else 2]:
            herding = {name: {2: 10.0 * loss, 4: 9.0 * loss} for name in HERDING}
            losses = [loss + 1 / e for e in range(1, 5)]
            settings = {"workers": workers, "columns": "workers", "metrics": herding, "size": size}
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
    monkeypatch.setenv("CDGRAB_GROUP", str(swept / "other-quick,workers=4"))
    assert [sweep.source for sweep in sweeps(SWEPT, "workers")] == ["other-quick"]
    with pytest.raises(CdgrabError, match="no finished runs of fig4_cifar10_workers with test_ppl"):
        sweeps(SWEPT, "workers", "test_ppl")
    monkeypatch.setenv("CDGRAB_GROUP", str(swept / "elsewhere"))
    with pytest.raises(CdgrabError, match=f"no finished runs of {SWEPT} in .*elsewhere"):
        sweeps(SWEPT, "workers")
    monkeypatch.setenv("CDGRAB_GROUP", str(swept.parent / "fig12_cifar10_lr" / "CIFAR-10"))
    for find in (lambda: sweeps(SWEPT, "workers"), lambda: groups(SWEPT)):
        with pytest.raises(CdgrabError, match=f"CIFAR-10 is no folder with runs of {SWEPT}"):
            find()


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
    assert re.search(r"\| 4 workers \| CD-GraB \| 1 +\| 9.000000 +\| 9.000000 +\|", table)  # one seed: no spread
    difference = ["4 workers", "CD-GraB − D-RR", "herding bound, replayed as published, last epoch", "-9"]
    assert [*difference, "1 of 1 seeds", "too few seeds"] in cells_of(table)


def test_seconds_are_those_of_runs_made_alone(group):
    assert len(figures.learning_curves(group, METRICS, "title", FIGURE).axes) == 3 * len(METRICS)
    before = report.summary(group, METRICS, FIGURE)

    def sharing(device, *seeds):
        for path in (path for seed in seeds for path in group.directory.glob(f"*-s{seed}/manifest.json")):
            path.write_text(json.dumps(json.loads(path.read_text()) | {"device": device, "config": {"jobs": 2}}))
        shared = Group(group.directory)
        cells = cells_of(report.summary(shared, METRICS, FIGURE))
        return shared, next(row[-1] for row in cells if row[0] == "CD-GraB")

    some, seconds = sharing("a GPU", 0, 1)  # those of the third seed are still shown
    assert seconds == "2.000" and len(figures.learning_curves(some, METRICS, "title", FIGURE).axes) == 3 * len(METRICS)
    assert {m["seed"] for m in some.alone.manifests} == {2}
    shared, seconds = sharing("cpu", 2)  # a core of its own is not the machine
    figure = figures.learning_curves(shared, METRICS, "title", FIGURE)
    assert [panel.get_xlabel() for panel in figure.axes] == ["epoch"] * 2 * len(METRICS)
    assert "CPU, a GPU, up to 2 runs at a time: no times ·" in shared.caption() and seconds == "–"
    for sorter, label, last in (("cd_grab", "CD-GraB", 1.0), ("d_rr", "D-RR", 9.0)):  # two runs more, made alone
        write_run(group.directory, sorter, label, 10, [4.0, 3.0, 2.0, last], size="quick")
    more = Group(group.directory)
    figure = figures.learning_curves(more, METRICS, "title", FIGURE)
    assert [line.get_label() for line in figure.axes[2].get_lines()] == ["CD-GraB", "D-RR"]
    assert list(figure.axes[2].get_lines()[0].get_ydata()) == [4.0, 3.0, 2.0, 1.0]
    assert "3–4 seeds" in more.caption() and "no times but those of seed 10, made alone" in more.caption()
    old, new = (cells_of(text) for text in (before, report.summary(more, METRICS, FIGURE)))
    changed = {now[0] for then, now in zip(old, new, strict=True) if then[:-1] != now[:-1] and "--" not in now[0]}
    assert changed == {"CD-GraB", "D-RR", "CD-GraB − D-RR"}  # others are compared on the seeds that they have


def test_figures_show_the_data_and_are_reproducible(group):
    figure = figures.learning_curves(group, METRICS[:1], "title", FIGURE)
    line = figure.axes[0].get_lines()[0]
    assert list(line.get_ydata()) == pytest.approx([4.1, 3.1, 2.1, 1.1]) and list(line.get_xdata()) == [1, 2, 3, 4]
    assert any(group.caption() in " ".join(text.get_text().split()) for text in figure.texts)
    zero, ours, *_ = figure.axes[2].get_lines()  # below the seconds: differences to D-RR's 3.0, 3.2, 3.4, seed by seed
    assert list(ours.get_ydata()) == pytest.approx([0.9, -0.1, -1.1, -2.1]) and list(zero.get_ydata()) == [0.0, 0.0]
    paths = plots.save(figure, "one")
    again = plots.save(figures.learning_curves(group, METRICS[:1], "title", FIGURE), "two")
    assert [path.suffix for path in paths] == [".png", ".pdf"]
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in again]


def test_no_runs_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.delenv("CDGRAB_GROUP", raising=False)
    with pytest.raises(CdgrabError, match="no finished runs of fig3a_lr_hmda"):
        groups(FIGURE)
