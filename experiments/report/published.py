"""The paper's own curves: which file under results/paper holds which panel of which figure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from experiments.report.kinds import DataFrame
from experiments.store.files import RESULTS

PAPER = RESULTS / "paper"
AXES = ("epoch", "seconds")


@dataclass(frozen=True)
class Curves:
    """Panels of one file; {axis} is epoch or seconds, {column} the value that tells a figure's columns apart."""

    file: str
    panels: dict[str, str]  # the metric of our runs -> the panel
    axes: tuple[str, ...] = AXES
    paired: bool = False  # the point at epoch x stands for epochs x and x + 1


def _curves(file: str, panel: str, axes: tuple[str, ...] = AXES, paired: bool = False, **metrics: str) -> Curves:
    """metrics: by our name, the one that takes the place of * in the panel's."""
    return Curves(file, {ours: panel.replace("*", theirs) for ours, theirs in metrics.items()}, axes, paired)


# Files of one experiment in the order in which they are believed: a later one only adds series that are missing.
# Perplexities are the published code's, which our runs log under a name of their own.
LOSS = {"train_loss": "train_loss"}
ACCURACY, PERPLEXITY = LOSS | {"test_accuracy": "test_acc"}, LOSS | {"test_ppl_authors": "test_ppl"}
SMAPE = LOSS | {"test_smape": "test_smape"}
PUBLISHED: dict[str, tuple[Curves, ...]] = {
    "fig3a_lr_hmda": (
        _curves("fig3_published", "fig3a_lr_hmda/*/{axis}", paired=True, **LOSS, test_accuracy="test_accuracy"),
        _curves("lr_hmda_{axis}", "*", paired=True, **ACCURACY),
    ),
    "fig3b_lstm_wiki2": (
        _curves("fig3_published", "fig3b_lstm_wiki2/*/{axis}", **PERPLEXITY),
        _curves("lstm_wiki2_{axis}", "*", **PERPLEXITY),
    ),
    "fig3c_mlp_m4": (_curves("fig3_published", "fig3c_mlp_m4/*/{axis}", **SMAPE),),
    "fig3c_mlp_m4_4workers": (_curves("mlp_m4_{axis}", "*", **SMAPE),),
    "fig4_cifar10_workers": (_curves("lenet_cifar10_workers", "workers={column}/*", AXES[:1], **ACCURACY),),
    "fig9_cifar10_herding": (
        _curves("lenet_cifar10_herding", "*", AXES[:1], paired=True, herding_per_vector="workers={column}"),
    ),
    "fig12_cifar10_lr": (_curves("lenet_cifar10_lr", "lr={column}/*", AXES[:1], **ACCURACY),),
    "fig11_gpt2_wiki103": (_curves("gpt2_wiki103_epoch", "*", AXES[:1], **LOSS, val_ppl_authors="test_ppl"),),
    "study_herding": (_curves("random_herding", "*", AXES[:1], bound="{column}"),),
    "table1_glue": (_curves("table1_glue", "*", AXES[:1], val_accuracy="{column}", val_accuracy_mm="{column}-mm"),),
}


def published(
    experiment: str, metric: str, axis: str = "epoch", column: str | float | None = None
) -> dict[str, DataFrame]:
    """The paper's curves by series name: x (epoch or seconds), mean, low and high (± std, or the extreme seeds).

    Pairs of epochs are put at their centre. Empty where nothing was published.
    """
    curves: dict[str, DataFrame] = {}
    for source in PUBLISHED.get(experiment, ()):
        if metric not in source.panels or axis not in source.axes:
            continue
        table = _read(source.file.format(axis=axis))
        panel = source.panels[metric].format(axis=axis, column=_as_printed(column))
        for series, rows in table[table["panel"] == panel].groupby("series"):
            x = rows["x"] + (0.5 if source.paired and axis == "epoch" else 0.0)
            curves.setdefault(series, rows[["mean", "low", "high"]].assign(x=x).reset_index(drop=True))
    return dict(sorted(curves.items()))


def published_metrics(experiment: str) -> tuple[str, ...]:
    """The metrics of our runs that the paper gives for an experiment."""
    return tuple(dict.fromkeys(metric for source in PUBLISHED.get(experiment, ()) for metric in source.panels))


@cache
def _read(file: str) -> DataFrame:
    import pandas as pd

    table = pd.read_csv(PAPER / f"{file}.csv").dropna(subset="mean")  # empty: outside the drawn range
    if "figure" in table:
        table["panel"] = table["figure"] + "/" + table["metric"] + "/" + table["axis"]
    if "min" in table:
        return table.assign(low=table["min"], high=table["max"])
    return table.assign(low=table["mean"] - table["std"], high=table["mean"] + table["std"])


def _as_printed(column: str | float | None) -> str:
    """Learning rates as the panels name them: 5e-4."""
    return f"{column:.0e}".replace("e-0", "e-") if isinstance(column, float) else str(column)
