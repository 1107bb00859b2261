"""The paper's curves: every number is the file's, and the finals are those of the summary made from the same files."""

import pandas as pd
import pytest

from cdgrab.sorters import SORTERS as OUR_SORTERS
from experiments.report.names import PUBLISHED_SORTERS
from experiments.report.published import PAPER, PUBLISHED, published, published_metrics
from experiments.training.composition import choices


def rows_of(file, **where):
    table = pd.read_csv(PAPER / f"{file}.csv")
    for column, value in where.items():
        table = table[table[column] == value]
    return table.dropna(subset="mean")


def vector(figure, panel, metric):
    return {"figure": figure, "panel": panel, "metric": metric}


# experiment, metric, axis, column; file, what selects the panel in it, where its points lie
CASES = [
    ("fig3b_lstm_wiki2", "train_loss", "epoch", None, "fig3", dict(metric="train_loss", axis="epoch"), 0),
    ("fig3b_lstm_wiki2", "test_ppl_authors", "seconds", None, "fig3", dict(metric="test_ppl", axis="seconds"), 0),
    ("fig3c_mlp_m4", "test_smape", "epoch", None, "fig3", dict(metric="test_smape", axis="epoch"), 0),
    ("fig3c_mlp_m4_4workers", "train_loss", "epoch", None, "mlp_m4_epoch", dict(panel="train_loss"), 0),
    ("fig3c_mlp_m4_4workers", "test_smape", "seconds", None, "mlp_m4_seconds", dict(panel="test_smape"), 0),
    ("fig4_cifar10_workers", "train_loss", "epoch", 64, "vector", vector(4, "64 workers", "train_loss"), 0),
    ("fig4_cifar10_workers", "test_accuracy", "epoch", 4, "vector", vector(4, "4 workers", "test_acc"), 0),
    ("fig9_cifar10_herding", "herding_replayed", "epoch", 16, "vector", dict(figure=9, panel="16 workers"), 0.5),
    ("fig6_cifar10_centralised", "train_loss", "epoch", None, "vector", vector(6, "1 worker", "train_loss"), 0),
    ("fig12_cifar10_lr", "test_accuracy", "epoch", 0.0005, "vector", vector(12, "lr 5e-4", "test_acc"), 0),
    ("fig12_cifar10_lr", "train_loss", "epoch", 0.01, "vector", vector(12, "lr 1e-2", "train_loss"), 0),
    ("fig11_gpt2_wiki103", "val_ppl_authors", "epoch", None, "vector", dict(figure=11, metric="test_ppl"), 0),
    ("study_herding", "bound", "epoch", 5, "vector", vector(10, "5 workers", "herding_bound"), 0),
    ("table1_glue", "val_accuracy_mm", "epoch", "MNLI", "table1_glue", dict(panel="MNLI-mm"), 0),
]  # fmt: skip


@pytest.mark.parametrize(("experiment", "metric", "axis", "column", "file", "where", "shift"), CASES)
def test_curves_are_the_files_numbers(experiment, metric, axis, column, file, where, shift):
    if file == "fig3":
        file, where = "fig3_published", where | {"figure": experiment}
    curves = published(experiment, metric, axis, column)
    rows = rows_of("published_vector" if file == "vector" else file, **where)
    assert set(curves) == set(rows["series"]) <= set(PUBLISHED_SORTERS) and len(curves) > 1
    for series, curve in curves.items():
        theirs = rows[rows["series"] == series]
        assert curve["mean"].tolist() == theirs["mean"].tolist()
        assert curve["x"].tolist() == (theirs["x"] + shift).tolist()
        low, high = (
            (theirs["min"], theirs["max"])
            if "min" in theirs
            else (theirs["mean"] - theirs["std"], theirs["mean"] + theirs["std"])
        )
        pd.testing.assert_series_equal(curve["low"], low.reset_index(drop=True), check_names=False)
        pd.testing.assert_series_equal(curve["high"], high.reset_index(drop=True), check_names=False)


SUMMARISED = {
    "lr_hmda": ("fig3a_lr_hmda", {"train_loss": "train_loss", "test_acc": "test_accuracy"}),
    "lstm_wiki2": ("fig3b_lstm_wiki2", {"train_loss": "train_loss", "test_ppl": "test_ppl_authors"}),
    "mlp_m4": ("fig3c_mlp_m4_4workers", {"train_loss": "train_loss", "test_smape": "test_smape"}),
    "gpt2_wiki103": ("fig11_gpt2_wiki103", {"train_loss": "train_loss", "test_ppl": "val_ppl_authors"}),
    "random_herding": ("study_herding", {"": "bound"}),
    "lenet_cifar10_herding": ("fig9_cifar10_herding", {"": "herding_replayed"}),
}


def test_finals_are_those_of_the_summary():
    """An oracle of its own: summary.csv was computed when the figures were read."""
    summary = pd.read_csv(PAPER / "summary.csv")
    checked = 0
    for row in summary.itertuples():
        if row.task not in SUMMARISED:
            continue
        experiment, metrics = SUMMARISED[row.task]
        setting, _, panel = row.panel.rpartition("/") if "/" in row.panel else ("", "", row.panel)
        if "=" in panel:
            setting, panel = panel, ""
        value = setting.partition("=")[2]
        value = value.split(" ")[0]  # m=5 n=2e5
        column = (int(value) if value.isdecimal() else float(value)) if value else setting
        curve = published(experiment, metrics[panel], column=column)[row.series]
        assert curve["mean"].iloc[-1] == pytest.approx(row.final, rel=2e-4), (row.task, row.panel, row.series)
        shift = (
            0.5 if row.task == "lenet_cifar10_herding" else 0.0
        )  # the summary leaves these pairs at their first epoch
        assert curve["x"].iloc[-1] == row.last_x + shift
        checked += 1
    assert checked == sum(summary["task"].isin(SUMMARISED)) > 50


def test_what_was_not_published_is_empty():
    assert published("fig0_nothing", "train_loss") == {}
    assert published("fig3a_lr_hmda", "test_ppl") == {}
    assert published("fig3b_lstm_wiki2", "test_ppl") == {}  # the published code computes something else
    assert published("fig4_cifar10_workers", "train_loss", column=2) == {}
    assert published("fig4_cifar10_workers", "train_loss", "seconds", column=4) == {}
    assert published("fig9_cifar10_herding", "herding_per_step", column=4) == {}
    assert published("fig12_cifar10_lr", "train_loss", column=0.002) == {}


def test_the_table_names_experiments_metrics_and_sorters_that_exist():
    studies = {f"study_{name}" for name in choices("study")}
    assert set(PUBLISHED) <= set(choices("experiment")) | studies
    assert set(PUBLISHED_SORTERS.values()) <= set(OUR_SORTERS)
    assert published_metrics("fig3b_lstm_wiki2") == ("train_loss", "test_ppl_authors")
