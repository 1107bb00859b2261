"""Committed figures as they go into the page."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

from experiments.store.files import RESULTS

COLOURS = 256  # as many as a file needs a byte for: a third of the bytes, and nobody sees it


@dataclass(frozen=True)
class Picture:
    name: str  # of its file under results/figures
    words: str
    width: int
    height: int
    data: str  # for src


def pictures(names: list[str], words: str) -> list[Picture]:
    return [picture(name, words) for name in names]


def picture(name: str, words: str) -> Picture:
    """One file of results/figures, with fewer colours."""
    from PIL import Image

    with Image.open(RESULTS / "figures" / f"{name}.png") as drawn:
        file = io.BytesIO()
        drawn.quantize(COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(file, "PNG")
        encoded = base64.b64encode(file.getvalue()).decode()
        return Picture(name, words, *drawn.size, f"data:image/png;base64,{encoded}")
