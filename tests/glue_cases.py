"""What the tests of GLUE share: files in its layouts, and what they need."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.data import glue

packaged_sentences = pytest.mark.skipif(
    not (Path(sys.prefix) / "share" / "cdgrab" / glue.PACKAGED_NAME).is_file(),
    reason="needs the embedded film reviews: `make setup`",
)


def use_counts(monkeypatch, count):
    """As if every file had been published with so many rows."""
    small = {n: replace(layout, rows=dict.fromkeys(layout.rows, count)) for n, layout in glue.LAYOUTS.items()}
    monkeypatch.setattr(glue, "LAYOUTS", small)


def write(root, dataset, text, names=None):
    (root / "glue" / dataset).mkdir(parents=True, exist_ok=True)
    for name in names or glue.LAYOUTS[dataset].rows:
        (root / "glue" / dataset / name).write_text(text, encoding="utf-8")
