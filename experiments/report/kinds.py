"""Types for annotations, without importing pandas or matplotlib, which takes longer than most commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from pandas import DataFrame, Series
else:
    Axes = Axis = Figure = DataFrame = Series = Any

__all__ = ["Axes", "Axis", "DataFrame", "Figure", "Series"]
