"""Figures of the study `sorters`."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.report.figures import STYLE, finish
from experiments.studies.base import Study
from experiments.studies.paired import BASELINE, difference
from experiments.studies.style import colour_of, label
from experiments.studies.training import TASK_NAMES
from experiments.studies.verdicts import estimate


def differences(study: Study) -> Figure:
    """How far every sorter ends from D-RR, one panel per task: left of the line is better."""
    sorters, tasks = [s for s in study.settings.sorters if s != BASELINE], list(study.settings.tasks)
    with plt.style.context(STYLE):
        size = (4.3 * len(tasks) + 1.2, 0.27 * len(sorters) + 1.8)
        figure, panels = plt.subplots(1, len(tasks), figsize=size, sharey=True, squeeze=False)
        for panel, task in zip(panels[0], tasks, strict=True):
            rows = study.table[study.table["task"] == task]
            for row, sorter in enumerate(sorters):
                _draw(panel, difference(rows, sorter), row, colour_of(sorter))
            panel.axvline(0, color="0.6", lw=0.8, zorder=0)
            panel.set(title=TASK_NAMES[task], xlabel="train loss against D-RR (%)", ylim=(len(sorters) - 0.5, -0.5))
            panel.set_yticks(range(len(sorters)), [label(sorter) for sorter in sorters])
        note = "dots: seeds; bar: mean and 95 % interval, paired over seeds; lower is better"
        finish(figure, "Where every sorter ends, against random reshuffling", f"{note} · {study.caption()}")
    return figure


def _draw(panel: Axes, values, row: int, colour: str) -> None:
    value = estimate(values)
    if np.isfinite(value.low):
        panel.plot([value.low, value.high], [row, row], color=colour, lw=2.2, solid_capstyle="butt")
    panel.plot(value.mean, row, "|", color=colour, ms=11, mew=2.2)
    panel.plot(values, np.full(len(values), row), "o", ms=2.6, mfc="white", mec=colour, mew=0.7)
