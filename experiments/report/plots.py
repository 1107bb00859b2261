"""How every figure of the project is drawn: one style, lines with bands, axes, legends, captions, files.

matplotlib is imported when the first figure is drawn, so that code that only computes does not wait for it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path

import numpy as np

from experiments.report.kinds import Axes, Axis, Figure, Series
from experiments.report.statistics import Estimate, estimate
from experiments.store.files import figures_folder

STYLE = str(Path(__file__).with_name("paper.mplstyle"))
DASHED = (0, (4, 2))
PUBLISHED = {"ls": DASHED, "lw": 1.1}  # the paper's curves
DOTS = {"marker": "o", "ms": 3.4}
GREY = {"color": "0.6", "lw": 0.8}  # lines to compare with
SMALL = {"fontsize": 6.5, "color": "0.35"}
_drawing = ContextVar("drawing", default=True)


@contextmanager
def words_only() -> Iterator[None]:
    """Within it nothing is drawn, and figures are saved as empty files: for whoever wants the tables of a notebook."""
    token = _drawing.set(False)
    try:
        yield
    finally:
        _drawing.reset(token)


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Decorates a function that draws a figure, so that it uses the style of the project."""

    @wraps(draw)
    def drawn(*arguments, **options) -> Figure | None:
        if not _drawing.get():
            return None
        import matplotlib.pyplot as plt

        with plt.style.context(STYLE):
            return draw(*arguments, **options)

    return drawn


def panels(
    rows: int, columns: int, width: float, height: float, titles: Iterable[str] = (), **shared: object
) -> tuple[Figure, np.ndarray]:
    """A figure of so many inches and its panels, [rows, columns]; `titles`: of the columns."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=(width, height), squeeze=False, **shared)
    for panel, title in zip(axes[0], titles, strict=False):
        panel.set_title(title)
    return figure, axes


def band(panel: Axes, x: Iterable, mean: Iterable, low: Iterable, high: Iterable, alpha: float = 0.18, **style) -> None:
    """A line, and a band from `low` to `high` around it."""
    panel.plot(x, mean, **style)
    panel.fill_between(x, low, high, color=style["color"], alpha=alpha, lw=0)


def mean_std(panel: Axes, x: Iterable, mean: Series, std: Series, **style) -> None:
    band(panel, x, mean, mean - std, mean + std, **style)


def estimates(panel: Axes, by_x: Mapping[float, Series], alpha: float = 0.15, **style) -> None:
    """Means of values over seeds, with their 95 % intervals where every x has one."""
    x, values = list(by_x), [estimate(some) for some in by_x.values()]
    mean, low, high = ([getattr(value, name) for value in values] for name in ("mean", "low", "high"))
    if values and np.isfinite(low).all():
        band(panel, x, mean, low, high, alpha, **DOTS | style)
    else:
        panel.plot(x, mean, **DOTS | style)


def interval(panel: Axes, value: Estimate, y: float, **style) -> None:
    """A bar at height `y`; none if there is only one seed."""
    if np.isfinite(value.low):
        panel.plot([value.low, value.high], [y, y], **style)


def whole_numbers(axis: Axis, most: int | str = "auto", **options) -> None:
    """Ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(most, integer=True, **options))


def log_ticks(axis: Axis) -> None:
    """1, 2, 5, 10, … in plain numbers, on a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def log_x(panel: Axes, values: Iterable[float], label: str, **ticks: float) -> None:
    """A logarithmic axis with ticks at exactly these values, in plain numbers."""
    from matplotlib.ticker import NullLocator

    values = list(values)
    panel.set(xscale="log", xlabel=label)
    panel.xaxis.set_ticks(values, [f"{value:g}" for value in values])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.tick_params(axis="x", **ticks)


def finish(figure: Figure, title: str, caption: str, entry: float = 1.5) -> Figure:
    """Legend and title above the panels, caption below; sizes in inches, so that wide and tall figures look alike.
    entry: how wide one of the legend is, about."""
    width, height = figure.get_size_inches()
    entries = {
        label: handle for panel in figure.axes for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    rows = -(-len(entries) // max(1, int(width / entry)))
    columns = -(-len(entries) // max(1, rows))  # rows of about equal length
    figure.text(0.5, 1 - 0.06 / height, title, ha="center", va="top", fontsize="large", fontweight="bold")
    figure.legend(entries.values(), entries, loc="upper center", bbox_to_anchor=(0.5, 1 - 0.24 / height), ncols=columns)
    lines = textwrap.wrap(caption, int(width * 21))
    figure.text(0.5, 0.03 / height, "\n".join(lines), ha="center", **SMALL)
    bottom = 0.2 + 0.11 * max(0, len(lines) - 2)
    figure.tight_layout(rect=(0, bottom / height, 1, 1 - (0.26 + 0.2 * rows) / height))
    return figure


def save(figure: Figure, name: str, folder: Path | None = None) -> list[Path]:
    """PNG and PDF under results/figures, or in this folder; the same results give the same bytes."""
    folder = folder or figures_folder()
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.pdf"]
    if not _drawing.get():
        for path in paths:
            path.touch()
        return paths
    import matplotlib.pyplot as plt

    with plt.style.context(STYLE):
        figure.savefig(paths[0])
        figure.savefig(paths[1], metadata={"CreationDate": None})
    return paths


def show() -> None:
    """Show in a notebook what was drawn."""
    if _drawing.get():
        import matplotlib.pyplot as plt

        plt.show()
