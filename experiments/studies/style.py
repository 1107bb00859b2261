"""How studies name and draw sorters, and their logarithmic axes."""

from __future__ import annotations

from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, NullLocator

from cdgrab.sorters import LABELS
from experiments.report.figures import COLOURS

ALONE = "grab_pair"  # one worker that holds the units of all: free to order them as it likes
ONE_WORKER = {ALONE: "GraB, one worker with all", "grab": "GraB (Bal), one worker with all"}
OPTIONS = {"rule=walk": "random walk", "shared=true": "shared order", "sketch=countsketch": ""}


def name_of(sorter: str) -> str:
    """The sorter of a variant such as "cd_grab,rule=walk"."""
    return sorter.partition(",")[0]


def label(sorter: str) -> str:
    """As figures, tables and verdicts name it, with its options."""
    name, *options = sorter.split(",")
    words = [OPTIONS.get(option, option.replace("sketch_size=", "sketch of ")) for option in options]
    return ", ".join([ONE_WORKER.get(name) or LABELS[name], *filter(None, words)])


def colour_of(sorter: str) -> str:
    return COLOURS[name_of(sorter)]


def line_style(sorter: str) -> dict:
    """Colour and dashes of a sorter's line."""
    if sorter in ONE_WORKER:
        return {"color": "0.25" if sorter == ALONE else "0.6", "ls": (0, (1, 1.2))}
    return {"color": colour_of(sorter), "ls": "-"}


def plain_log_ticks(axis: Axis, subs: tuple[float, ...] = (1, 2, 5)) -> None:
    """1, 2, 5, 10, … in plain numbers."""
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def ticks_at(axis: Axis, values: list[float]) -> None:
    """Exactly these, in plain numbers."""
    axis.set_ticks(values, [f"{value:g}" for value in values])
    axis.set_minor_locator(NullLocator())
