"""Figures of the study `learning_rate`."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.report.figures import STYLE, finish
from experiments.studies.base import Study
from experiments.studies.learning_rate import Measured, every_measured
from experiments.studies.paired import BASELINE, LOSS
from experiments.studies.style import label, line_style, ticks_at
from experiments.studies.verdicts import estimate

APART = 1.13


def losses_by_rate(study: Study) -> Figure:
    """Final train loss against the rate (above), and how far below D-RR (below); one column per task and optimiser."""
    columns = list(every_measured(study.table, study.settings))
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(2, len(columns), figsize=(2.9 * len(columns) + 0.6, 5.6), sharex="col")
        for (above, below), measured in zip(axes.T, columns, strict=True):
            for place, sorter in enumerate(measured.sorters):
                _draw_losses(above, measured, sorter, APART ** (place - (len(measured.sorters) - 1) / 2))
                if sorter != BASELINE:
                    _draw_differences(below, measured, sorter)
            _say_what_is_cut(above, measured)
            start = measured.rows["start_loss"].mean()
            lowest = measured.rows.loc[measured.rows["sound"], LOSS].min()
            above.axhline(start, color="0.6", lw=0.8, ls=":")
            above.set(title=measured.name, xscale="log", ylim=(lowest - 0.06 * (start - lowest), start * 1.06))
            below.axhline(0, color="0.6", lw=0.8)
            below.set(xlabel="learning rate")
            ticks_at(below.xaxis, measured.rates)
            below.tick_params(axis="x", labelrotation=60)
        axes[0, 0].set_ylabel("train loss")
        axes[1, 0].set_ylabel("against D-RR (%)")
        note = "mean over seeds with 95 % interval (below); ×: not stable; dotted: loss before training"
        finish(figure, "Final train loss against the learning rate", f"{note} · {study.caption()}")
    return figure


def _draw_losses(panel: Axes, measured: Measured, sorter: str, aside: float) -> None:
    """aside: by which factor rates are shifted where all are at the same height, not being stable."""
    rows = measured.rows[measured.rows["sorter"] == sorter]
    by_rate, stable = rows.groupby("rate")[LOSS], measured.stable_rates(sorter)
    mean, style = by_rate.mean().clip(upper=_highest(measured)), line_style(sorter)
    panel.plot(mean[stable], marker="o", ms=3.4, label=label(sorter), **style)
    unstable = mean.drop(stable)
    panel.plot(unstable.index * aside, unstable, "x", ms=5, color=style["color"])


def _highest(measured: Measured) -> float:
    """What is higher, having diverged, is drawn here: it would leave no room for the rest."""
    return measured.rows["start_loss"].mean() * 1.03


def _say_what_is_cut(panel: Axes, measured: Measured) -> None:
    means = measured.rows.groupby(["sorter", "rate"])[LOSS].mean()
    if (means > _highest(measured)).any():
        words = f"{(means > _highest(measured)).sum()} means cut off,\nup to {means.max():.3g}"
        panel.text(0.03, 0.86, words, transform=panel.transAxes, fontsize=6.5, color="0.35", va="top")


def _draw_differences(panel: Axes, measured: Measured, sorter: str) -> None:
    stable = measured.stable_rates(sorter, BASELINE)
    values = [estimate(measured.differences(rate, sorter)) for rate in stable]
    style = line_style(sorter)
    panel.plot(stable, [value.mean for value in values], marker="o", ms=3.4, **style)
    if all(np.isfinite(value.low) for value in values):
        low, high = [value.low for value in values], [value.high for value in values]
        panel.fill_between(stable, low, high, color=style["color"], alpha=0.18, lw=0)
