"""Figures of the study `rates`."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.report.figures import STYLE, finish
from experiments.studies.base import Study
from experiments.studies.rates import BALANCED, BASELINE, LONGER, NAMES, NON_CONVEX, OURS, RANDOM, SWEEPS, Measured
from experiments.studies.style import label, line_style, ticks_at
from experiments.studies.verdicts import estimate

X_LABELS = {"workers": "workers", "units": "units per worker", "epochs": "epochs, rate ∝ 1/epochs"}
MARKERS = dict(zip(NAMES, "osD", strict=True))
SHADES = {BASELINE: "Blues", OURS: "Reds"}


def gaps(study: Study) -> Figure:
    """The final gap against workers, units and epochs, one row per problem."""
    problems = list(study.settings.problems)
    with plt.style.context(STYLE):
        size = (9.6, 2.5 * len(problems) + 1.1)
        figure, axes = plt.subplots(len(problems), len(SWEEPS), figsize=size, sharey="row", squeeze=False)
        for row, problem in zip(axes, problems, strict=True):
            measured = Measured(study.table, study.settings, problem)
            for panel, x in zip(row, SWEEPS, strict=True):
                for sorter in study.settings.sorters:
                    _draw_curve(panel, measured, x, sorter)
                panel.set(xscale="log", yscale="log", xlabel=X_LABELS[x])
                ticks_at(panel.xaxis, sorted(measured.sweep(x)[x].unique()))
            row[0].set_ylabel(f"{measured.name}\n{measured.gap}")
        note = "geometric mean and std over seeds; slopes are fitted to the filled points"
        finish(figure, "Final gap against workers, units per worker and epochs", f"{note} · {study.caption()}")
    return figure


def exponents(study: Study) -> Figure:
    """All fitted exponents with their intervals; grey bands are what is accepted as the P.L. theory's −1 and −2."""
    sorters, problems = list(study.settings.sorters), list(study.settings.problems)
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(1, len(SWEEPS), figsize=(9.6, 0.42 * len(sorters) + 1.7), sharey=True)
        for panel, x in zip(axes, SWEEPS, strict=True):
            for offset, problem in zip(np.linspace(-0.22, 0.22, len(problems)), problems, strict=True):
                measured = Measured(study.table, study.settings, problem)
                for row, sorter in enumerate(sorters):
                    _draw_exponent(panel, measured, x, sorter, row + offset, MARKERS[problem])
            for limits in (BALANCED,) if x == "epochs" else (RANDOM, BALANCED):
                panel.axvspan(limits.get("least", -9), limits["most"], color="0.93", zorder=0)
            panel.set(title=f"in {x}", xlabel="exponent", xlim=(-4.1, 0.2), ylim=(len(sorters) - 0.5, -0.5))
            panel.set_yticks(range(len(sorters)), [label(sorter) for sorter in sorters])
        for problem in problems:
            axes[0].plot([], [], MARKERS[problem], ms=4.5, color="0.25", ls="none", label=NAMES[problem])
        note = (
            "mean, 95 % interval over seeds; hollow: not at the noise floor; bands: accepted as the theory's −1 and −2"
        )
        finish(figure, "Exponents of the final gap", f"{note} · {study.caption()}")
    return figure


def noise_check(study: Study) -> Figure:
    """Is the non-convex problem limited by noise? It then follows the noise, and going on is no use; darker lines have
    more workers."""
    measured = Measured(study.table, study.settings, NON_CONVEX)
    noise, longer = (measured.sweep(name) for name in ("noise", "longer"))
    with plt.style.context(STYLE):
        figure, panels = plt.subplots(1, 2, figsize=(7.4, 4.2), sharey=True)
        for panel, rows, x in zip(panels, (noise, longer), ("noise", "epochs"), strict=True):
            for sorter, some in rows.groupby("sorter"):
                by_workers = list(some.groupby("workers"))
                shades = plt.get_cmap(SHADES[sorter])(np.linspace(0.4, 1.0, len(by_workers)))
                for shade, (count, points) in zip(shades, by_workers, strict=True):
                    by_x = np.log(points.set_index(x)["gap"]).groupby(level=0)
                    panel.plot(
                        np.exp(by_x.mean()), "o-", ms=3.2, color=shade, label=f"{label(sorter)}, {count} workers"
                    )
            panel.set(xscale="log", yscale="log")
            ticks_at(panel.xaxis, sorted(rows[x].unique()))
        ends = np.array([noise["noise"].min(), noise["noise"].max()])
        panels[0].plot(ends, noise["gap"].max() * (ends / ends[1]) ** 2, color="0.5", lw=1, ls=":", label="∝ noise²")
        panels[0].set(xlabel="label noise", ylabel=measured.gap, title="less noise")
        panels[1].set(xlabel="epochs, same rate", title=f"{LONGER} times the epochs")
        title = f"Is the {measured.name} limited by noise?"
        finish(figure, title, f"geometric mean over seeds · {study.caption()}")
    return figure


def _draw_curve(panel: Axes, measured: Measured, x: str, sorter: str) -> None:
    curve, style = measured.curve(x, sorter), line_style(sorter)
    colour = style["color"]
    panel.plot(curve.index, curve["mean"], lw=1.3, label=label(sorter), **style)
    panel.fill_between(curve.index, curve["low"], curve["high"], color=colour, alpha=0.15, lw=0)
    for fitted, some in curve.groupby("fitted"):
        face = colour if fitted else "white"
        panel.plot(some.index, some["mean"], "o", ms=3.6, mfc=face, mec=colour, mew=0.9)


def _draw_exponent(panel: Axes, measured: Measured, x: str, sorter: str, y: float, marker: str) -> None:
    value, settled = estimate(measured.exponents(x, sorter)), not measured.unsettled(x, sorter)
    colour = line_style(sorter)["color"]
    if np.isfinite(value.low):
        panel.plot([value.low, value.high], [y, y], color=colour, lw=1.2)
    panel.plot(value.mean, y, marker, ms=4.5, mfc=colour if settled else "white", mec=colour, ls="none")
