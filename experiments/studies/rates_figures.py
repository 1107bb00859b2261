"""Figures of the study `rates`."""

from __future__ import annotations

import numpy as np

from experiments.report import plots
from experiments.report.kinds import Axes, Figure, Series
from experiments.report.names import BASELINE, OURS, sorter_label, sorter_line, sorter_style
from experiments.report.statistics import estimate
from experiments.studies.base import Study
from experiments.studies.rates import BALANCED, END, LONGER, NAMES, NON_CONVEX, RANDOM, SWEEPS, Gaps

X_LABELS = {"workers": "workers", "units": "units per worker", "epochs": "epochs, rate ∝ 1/epochs"}
MARKERS = dict(zip(NAMES, "osD", strict=True))
SHADES = {BASELINE: "Blues", OURS: "Reds"}


@plots.styled
def gaps_by_setting(study: Study) -> Figure:
    """The final gap against workers, units and epochs, one row per problem."""
    problems = list(study.settings.problems)
    figure, axes = plots.panels(len(problems), len(SWEEPS), 9.6, 2.5 * len(problems) + 1.1, sharey="row")
    for row, problem in zip(axes, problems, strict=True):
        gaps = Gaps(study.table, study.settings, problem)
        for panel, x in zip(row, SWEEPS, strict=True):
            for sorter in study.settings.sorters:
                _draw_curve(panel, gaps, x, sorter)
            panel.set_yscale("log")
            plots.log_x(panel, sorted(gaps.sweep(x)[x].unique()), X_LABELS[x])
        row[0].set_ylabel(f"{gaps.name}\n{gaps.gap}")
    note = "geometric mean and std over seeds; slopes are fitted to the filled points"
    title = "Final gap against workers, units per worker and epochs"
    return plots.finish(figure, title, f"{note} · {study.caption()}")


@plots.styled
def exponents(study: Study) -> Figure:
    """All fitted exponents with their intervals; grey bands: what is accepted as the P.L. theory's −1 and −2."""
    sorters, problems = list(study.settings.sorters), list(study.settings.problems)
    figure, (row_of_panels,) = plots.panels(1, len(SWEEPS), 9.6, 0.42 * len(sorters) + 1.7, sharey=True)
    all_settled = True
    for panel, x in zip(row_of_panels, SWEEPS, strict=True):
        for offset, problem in zip(np.linspace(-0.22, 0.22, len(problems)), problems, strict=True):
            gaps = Gaps(study.table, study.settings, problem)
            for row, sorter in enumerate(sorters):
                all_settled &= _draw_exponent(panel, gaps, x, sorter, row + offset, MARKERS[problem])
        for limits in (BALANCED,) if x == "epochs" else (RANDOM, BALANCED):
            panel.axvspan(limits.get("least", -9), limits["most"], color="0.93", zorder=0)
        panel.set(title=f"in {x}", xlabel="exponent", xlim=(-4.1, 0.2), ylim=(len(sorters) - 0.5, -0.5))
        panel.set_yticks(range(len(sorters)), [sorter_label(sorter) for sorter in sorters])
    for problem in problems:
        row_of_panels[0].plot([], [], MARKERS[problem], ms=4.5, color="0.25", ls="none", label=NAMES[problem])
    hollow = "" if all_settled else "hollow: not at the noise floor; "
    note = f"mean, 95 % interval over seeds; {hollow}bands: accepted as the theory's −1 (narrow) and −2"
    return plots.finish(figure, "Exponents of the final gap", f"{note} · {study.caption()}")


@plots.styled
def noise_check(study: Study) -> Figure:
    """Is the non-convex problem limited by noise? Then it follows the noise, and training longer changes nothing.
    Darker lines have more workers."""
    gaps = Gaps(study.table, study.settings, NON_CONVEX)
    noise, longer = (gaps.sweep(name) for name in ("noise", "longer"))
    titles = ("less noise", f"{LONGER} times the epochs")
    figure, ((less, more),) = plots.panels(1, 2, 7.4, 4.2, titles, sharey=True)
    for panel, rows, x, words in ((less, noise, "noise", "label noise"), (more, longer, "epochs", "epochs, same rate")):
        for sorter, some in rows.groupby("sorter"):
            by_workers = list(some.groupby("workers"))
            for shade, (count, points) in zip(np.linspace(0.4, 1.0, len(by_workers)), by_workers, strict=True):
                label = f"{sorter_label(sorter)}, {count} workers"
                _draw_shade(panel, points.set_index(x)[END], SHADES[sorter], shade, label)
        panel.set_yscale("log")
        plots.log_x(panel, sorted(rows[x].unique()), words)
    ends = np.array([noise["noise"].min(), noise["noise"].max()])
    less.plot(ends, noise[END].max() * (ends / ends[1]) ** 2, color="0.5", lw=1, ls=":", label="∝ noise²")
    less.set_ylabel(gaps.gap)
    title = f"Is the {gaps.name} limited by noise?"
    return plots.finish(figure, title, f"geometric mean over seeds · {study.caption()}")


def _draw_curve(panel: Axes, gaps: Gaps, x: str, sorter: str) -> None:
    curve, style = gaps.curve(x, sorter), sorter_line(sorter) | {"lw": 1.3}
    plots.band(panel, curve.index, curve["mean"], curve["low"], curve["high"], alpha=0.15, **style)
    for fitted, some in curve.groupby("fitted"):
        face = style["color"] if fitted else "white"
        panel.plot(some.index, some["mean"], "o", ms=3.6, mfc=face, mec=style["color"], mew=0.9)


def _draw_exponent(panel: Axes, gaps: Gaps, x: str, sorter: str, y: float, marker: str) -> bool:
    """Returns whether its points have come to the noise floor: if not, the marker is hollow."""
    value, settled = estimate(gaps.exponents(x, sorter)), not gaps.unsettled(x, sorter)
    colour = sorter_style(sorter)["color"]
    plots.interval(panel, value, y, color=colour, lw=1.2)
    panel.plot(value.mean, y, marker, ms=4.5, mfc=colour if settled else "white", mec=colour, ls="none")
    return settled


def _draw_shade(panel: Axes, values: Series, colours: str, shade: float, label: str) -> None:
    from matplotlib import colormaps

    mean = np.exp(np.log(values).groupby(level=0).mean())
    panel.plot(mean, "o-", ms=3.2, color=colormaps[colours](shade), label=label)
