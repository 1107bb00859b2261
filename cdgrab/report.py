"""Tables: what a group of runs says, in Markdown."""

from __future__ import annotations

import math

import pandas as pd

from .figures import AXIS_LABELS
from .results import RESULTS, Group, published


def summary(group: Group, metrics: tuple[str, ...], figure_name: str, baseline: str = "d_rr") -> str:
    """Final metrics per sorter, epochs to the baseline's final loss, seconds per epoch, and who wins on each seed."""
    loss = metrics[0]
    rows = []
    for sorter in group.sorters:
        curve = group.curve(sorter, loss)
        row = {"sorter": group.label(sorter), "seeds": str(len(group.final(sorter, loss)))}
        row |= {f"final {AXIS_LABELS[metric]}": _mean_std(group.final(sorter, metric)) for metric in metrics}
        if baseline in group.sorters:
            target = group.curve(baseline, loss)["mean"].iloc[-1]
            row["epochs to D-RR's final loss"] = _shown(first_crossing(curve["mean"], target))
        row["seconds per epoch"] = f"{curve['elapsed'].iloc[-1] / curve.index[-1]:.3f}"
        rows.append(row)
    notes = [group.caption() + "."]
    if baseline in group.sorters:
        others = [sorter for sorter in group.sorters if sorter != baseline]
        notes += [_paired(group, sorter, baseline, metric) for sorter in others for metric in metrics]
    notes += _published_finals(figure_name, metrics)
    return markdown(rows) + "\n\n" + "  \n".join(notes) + "\n"


def save(text: str, name: str) -> None:
    """Next to the figure of the same name."""
    path = RESULTS / "figures" / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def first_crossing(curve: pd.Series, target: float) -> float:
    """The epoch at which a falling curve first reaches `target`, linearly interpolated; NaN if it never does."""
    below = curve[curve <= target]
    if below.empty:
        return math.nan
    epoch = below.index[0]
    if epoch == curve.index[0]:
        return float(epoch)
    before = curve.loc[epoch - 1]
    return float(epoch - 1 + (before - target) / (before - curve.loc[epoch]))


def markdown(rows: list[dict[str, str]]) -> str:
    """A Markdown table; every row has the same keys."""
    header = list(rows[0])
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in header]
    line = [
        " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        for cells in (header, *([row[name] for name in header] for row in rows))
    ]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([f"| {line[0]} |", f"|{rule}|", *(f"| {cells} |" for cells in line[1:])])


def _paired(group: Group, sorter: str, baseline: str, metric: str) -> str:
    ours, theirs = group.final(sorter, metric), group.final(baseline, metric)
    difference = (ours - theirs).dropna()
    better = (difference > 0) if "accuracy" in metric else (difference < 0)
    return (
        f"{group.label(sorter)} − {group.label(baseline)}, final {AXIS_LABELS[metric]}: "
        f"{difference.mean():+.3g} ± {difference.std(ddof=0):.2g}, "
        f"better on {int(better.sum())} of {len(difference)} seeds."
    )


def _published_finals(figure_name: str, metrics: tuple[str, ...]) -> list[str]:
    parts = []
    for metric in metrics:
        finals = {series: curve["mean"].iloc[-1] for series, curve in published(figure_name, metric).items()}
        if finals:
            parts.append(
                f"{AXIS_LABELS[metric]} " + ", ".join(f"{series} {value:.6g}" for series, value in finals.items())
            )
    return [f"The paper, on its own data: {'; '.join(parts)}."] if parts else []


def _mean_std(values: pd.Series) -> str:
    spread = values.std(ddof=0)
    digits = 6 if values.abs().max() < 10 else 3
    return f"{values.mean():.{digits}f} ± {spread:.{digits}f}"


def _shown(value: float) -> str:
    return "not reached" if math.isnan(value) else f"{value:.1f}"
