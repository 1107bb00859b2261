"""The paper's own curves: which file under results/paper holds which panel of which figure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from experiments.report.kinds import DataFrame
from experiments.store.files import RESULTS

PAPER = RESULTS / "paper"
AXES, EPOCHS = ("epoch", "seconds"), ("epoch",)


@dataclass(frozen=True)
class Curves:
    """Panels of one file; {axis} is epoch or seconds, {column} the value that distinguishes a figure's columns."""

    file: str
    panel: str  # with * where the metric is named
    metrics: dict[str, str]  # metric of our runs -> what replaces *
    axes: tuple[str, ...] = AXES
    paired: bool = False  # the point at epoch x stands for epochs x and x + 1


# The files of one experiment, most reliable first: a later one only adds series that are missing.
# Perplexities are the published code's, which our runs log under a name of their own.
LOSS = {"train_loss": "train_loss"}
ACCURACY, PERPLEXITY = LOSS | {"test_accuracy": "test_acc"}, LOSS | {"test_ppl_authors": "test_ppl"}
SMAPE = LOSS | {"test_smape": "test_smape"}
PUBLISHED: dict[str, tuple[Curves, ...]] = {
    "fig3a_lr_hmda": (
        Curves("fig3_published", "fig3a_lr_hmda/*/{axis}", LOSS | {"test_accuracy": "test_accuracy"}, paired=True),
        Curves("lr_hmda_{axis}", "*", ACCURACY, paired=True),
    ),
    "fig3b_lstm_wiki2": (
        Curves("fig3_published", "fig3b_lstm_wiki2/*/{axis}", PERPLEXITY),
        Curves("lstm_wiki2_{axis}", "*", PERPLEXITY),
    ),
    "fig3c_mlp_m4": (Curves("fig3_published", "fig3c_mlp_m4/*/{axis}", SMAPE),),
    "fig3c_mlp_m4_4workers": (Curves("mlp_m4_{axis}", "*", SMAPE),),
    "fig4_cifar10_workers": (Curves("published_vector", "4/{column} workers/*", ACCURACY, EPOCHS),),
    "fig6_cifar10_centralised": (Curves("published_vector", "6/1 worker/*", ACCURACY, EPOCHS),),
    "fig9_cifar10_herding": (
        Curves("published_vector", "9/{column} workers/*", {"herding_replayed": "herding_bound"}, EPOCHS, paired=True),
    ),
    "fig12_cifar10_lr": (Curves("published_vector", "12/lr {column}/*", ACCURACY, EPOCHS),),
    "fig11_gpt2_wiki103": (Curves("published_vector", "11//*", LOSS | {"val_ppl_authors": "test_ppl"}, EPOCHS),),
    "study_herding": (Curves("published_vector", "10/{column} workers/*", {"bound": "herding_bound"}, EPOCHS),),
    "table1_glue": (Curves("table1_glue", "{column}*", {"val_accuracy": "", "val_accuracy_mm": "-mm"}, EPOCHS),),
}


@cache
def published(
    experiment: str, metric: str, axis: str = "epoch", column: str | float | None = None
) -> dict[str, DataFrame]:
    """The paper's curves by series name: x (epoch or seconds), mean, low and high (± std, or the extreme seeds).

    Pairs of epochs are put at their centre. Empty where nothing was published.
    """
    curves: dict[str, DataFrame] = {}
    for source in PUBLISHED.get(experiment, ()):
        if metric not in source.metrics or axis not in source.axes:
            continue
        table = _read(source.file.format(axis=axis))
        panel = source.panel.replace("*", source.metrics[metric]).format(axis=axis, column=_as_printed(column))
        for series, rows in table[table["panel"] == panel].groupby("series"):
            x = rows["x"] + (0.5 if source.paired and axis == "epoch" else 0.0)
            curves.setdefault(series, rows[["mean", "low", "high"]].assign(x=x).reset_index(drop=True))
    return dict(sorted(curves.items()))


def published_metrics(experiment: str) -> tuple[str, ...]:
    """The metrics of our runs that the paper gives for an experiment."""
    return tuple(dict.fromkeys(metric for source in PUBLISHED.get(experiment, ()) for metric in source.metrics))


def last_half(curve: DataFrame) -> float:
    """The mean over the last half of the epochs."""
    return float(_later(curve)["mean"].mean())


def half_bands(curve: DataFrame) -> float:
    """The mean of half the bands of the last half of the epochs; NaN where they could not be read."""
    later = _later(curve)
    return float(((later["high"] - later["low"]) / 2).mean())


def _later(curve: DataFrame) -> DataFrame:
    """A pair of epochs that begins in the first half does not count; a single number does."""
    last = math.ceil(curve["x"].max())
    return curve[curve["x"] > (last / 2 + 0.5 if len(curve) > 1 else 0)]


@cache
def _read(file: str) -> DataFrame:
    import pandas as pd

    table = pd.read_csv(PAPER / f"{file}.csv").dropna(subset="mean")  # empty: outside the drawn range
    if parts := [name for name in ("figure", "panel", "metric", "axis") if name in table][1:]:
        table["panel"] = table["figure"].astype(str).str.cat(table[parts].fillna(""), sep="/")
    if "min" in table:
        return table.assign(low=table["min"], high=table["max"])
    return table.assign(low=table["mean"] - table["std"], high=table["mean"] + table["std"])


def _as_printed(column: str | float | None) -> str:
    """Learning rates as the panels name them: 5e-4."""
    return f"{column:.0e}".replace("e-0", "e-") if isinstance(column, float) else str(column)
