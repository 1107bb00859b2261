"""How studies name and draw sorters, and their logarithmic axes."""

from __future__ import annotations

from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, NullLocator

from ..figures import COLOURS
from ..sorters import LABELS

ALONE = "grab_pair"  # one worker that holds the units of all: free to order them as it likes


def label(sorter: str) -> str:
    """As figures, tables and verdicts name it."""
    return "GraB, one worker with all" if sorter == ALONE else LABELS[sorter]


def line_style(sorter: str) -> dict:
    """Colour and dashes of a sorter's line."""
    return {"color": "0.25", "ls": (0, (1, 1.2))} if sorter == ALONE else {"color": COLOURS[sorter], "ls": "-"}


def plain_log_ticks(axis: Axis, subs: tuple[float, ...] = (1, 2, 5)) -> None:
    """1, 2, 5, 10, … in plain numbers."""
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def ticks_at(axis: Axis, values: list[float]) -> None:
    """Exactly these, in plain numbers."""
    axis.set_ticks(values, [f"{value:g}" for value in values])
    axis.set_minor_locator(NullLocator())
