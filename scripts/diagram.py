"""Draws the method in one picture, docs/method.svg: from an epoch's order to the next one, as the library computes it.

python -m scripts.diagram
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch
from torch import Tensor

from cdgrab.balance import rules
from experiments.early import exit_status
from experiments.report.names import BASELINE, COLOURS, OURS
from experiments.store.files import ROOT

WORKERS, UNITS = 3, 6
FIRST, SECOND = COLOURS[OURS], COLOURS[BASELINE]  # of a pair: who goes to the left, and who to the right
LONG = 0.17  # half the length of an arrow for a difference of one
TITLES = (
    "1  each worker visits its examples\nin this epoch's order",
    "2  differences of neighbouring\ngradients, pair by pair",
    "3  one running sum for all workers:\neach sign keeps it small",
    "4  the next order: one of each pair\nto the left end, one to the right",
)


def main() -> int:
    return exit_status(lambda: draw(ROOT / "docs" / "method.svg"))


def draw(path: Path) -> None:
    """The numbers are made up; signs and orders are computed from them."""
    generator = torch.Generator().manual_seed(5)
    order = torch.stack([torch.randperm(UNITS, generator=generator) for _ in range(WORKERS)])
    gradients = torch.randn(WORKERS, UNITS, 2, generator=generator, dtype=torch.float64)
    differences = (gradients[:, 0::2] - gradients[:, 1::2]).movedim(0, 1).contiguous()  # [pairs, workers, 2]
    signs = rules.balance(differences, torch.zeros(1, 2, dtype=torch.float64), torch.zeros(differences.shape[:2]))
    left = torch.zeros(WORKERS, UNITS, dtype=torch.bool)
    left[:, 0::2], left[:, 1::2] = signs.T > 0, signs.T < 0
    following = rules.reorder_pairs(order, signs.T)
    with plt.rc_context({"font.size": 9, "svg.fonttype": "path", "svg.hashsalt": "cdgrab"}):
        figure, axes = plt.subplots(2, 2, figsize=(6.4, 4.4))  # not wide: it has to be read on a phone, too
        panels = axes.flat
        for panel, title in zip(panels, TITLES, strict=True):
            panel.set_title(title, fontsize=9, loc="left")
            panel.axis("off")
        _units(panels[0], order, left, pairs=True)
        _arrows(panels[1], differences, signs)
        _walk(panels[2], differences, signs)
        _units(panels[3], following, (torch.arange(UNITS) < UNITS // 2).expand(WORKERS, -1))
        figure.tight_layout(w_pad=2.5, h_pad=2.0)
        figure.savefig(path, metadata={"Date": None}, transparent=False)
        plt.close(figure)


def _units(panel: Axes, order: Tensor, left: Tensor, pairs: bool = False) -> None:
    for worker, (units, lefts) in enumerate(zip(order.tolist(), left.tolist(), strict=True)):
        panel.text(-0.75, -worker, f"worker {worker}", ha="right", va="center", color="0.35")
        for place, (unit, goes_left) in enumerate(zip(units, lefts, strict=True)):
            look = {"boxstyle": "round,pad=0,rounding_size=0.12", "linewidth": 0, "fc": FIRST if goes_left else SECOND}
            panel.add_patch(FancyBboxPatch((place - 0.4, -worker - 0.3), 0.8, 0.6, **look))
            panel.text(place, -worker, str(unit), ha="center", va="center_baseline", color="white", weight="bold")
        for place in range(0, UNITS, 2) if pairs else ():
            panel.plot([place - 0.4, place + 1.4], [-worker - 0.4] * 2, color="0.6", linewidth=1)
    panel.set(xlim=(-2.6, UNITS - 0.4), ylim=(-WORKERS + 0.3, 0.6))


def _arrows(panel: Axes, differences: Tensor, signs: Tensor) -> None:
    for pair, (rows, its) in enumerate(zip(differences.tolist(), signs.tolist(), strict=True)):
        for worker, ((x, y), sign) in enumerate(zip(rows, its, strict=True)):
            arrow = {"arrowstyle": "-|>", "color": "0.25", "shrinkA": 0, "shrinkB": 0}
            panel.annotate(
                "", (pair + LONG * x, -worker + LONG * y), (pair - LONG * x, -worker - LONG * y), arrowprops=arrow
            )
            panel.text(pair + 0.4, -worker, "+" if sign > 0 else "−", ha="center", va="center", fontsize=12)
    panel.set(xlim=(-0.6, UNITS // 2 - 0.4), ylim=(-WORKERS + 0.3, 0.6))


def _walk(panel: Axes, differences: Tensor, signs: Tensor) -> None:
    """The running sum with its signs, and what it would be without."""
    rows = differences.flatten(0, 1)
    for height, (steps, colour, label) in enumerate(
        ((rows, "0.65", "without signs"), (rows * signs.view(-1, 1), FIRST, "with signs"))
    ):
        path = torch.cat([torch.zeros(1, 2), steps.cumsum(0)])
        panel.plot(*path.T, color=colour, linewidth=1.5, marker="o", markersize=3)
        panel.text(1, 0.1 * height, label, color=colour, ha="right", transform=panel.transAxes)
    panel.plot(0, 0, "o", color="black", markersize=5)
    panel.set_aspect("equal", adjustable="datalim")
    panel.margins(0.1)


if __name__ == "__main__":
    sys.exit(main())
