"""Benchmarks as cards, from results/bench: those that were measured at full size."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

from markupsafe import Markup

from cdgrab.sorters import LABELS
from experiments.report.names import BASELINE, OURS, TASKS, task_name
from experiments.report.page import markup, tags
from experiments.report.page.card import Card
from experiments.report.page.pictures import pictures
from experiments.store.bench import SIZES, cores, folder, read_manifests, read_rows
from experiments.store.files import RESULTS

TITLES = {  # of benchmarks
    "balance": "Deciding the signs",
    "epoch": "An epoch of CD-GraB over one of D-RR",
    "traffic": "Bytes that a process sends per step",
    "memory": "Memory",
    "peers": "Beside grab-sampler, the authors’ package",
    "dropin": "The drop-in sampler",
    "fleet": "Runs that train together",
    "link": "Sparse gradients over a slow link",
    "delay": "Sparse gradients over a link with a delay",
    "timeline": "Which buckets are averaged beside the backward pass",
}
UNITS = {"us": "µs", "s": "s", "bytes": "bytes"}
FEW = 20  # rows of a table that is not folded
WORDS = {task: task_name(task) for task in TASKS} | {"dim": "parameters", "cpu": "CPU"}
WORDS |= {name: LABELS[name] for name in (BASELINE, OURS, "grab_pair", "grab")}


def cards() -> Iterator[Card]:
    """Those that were measured at full size, device by device."""
    for name, device, manifest in _measured():
        if manifest["size"] == SIZES[-1]:
            yield _benchmark(name, device, manifest)


def smaller() -> list[str]:
    """Those that were not, which the page leaves out."""
    return [f"{name} on {device}" for name, device, manifest in _measured() if manifest["size"] != SIZES[-1]]


def _measured() -> Iterator[tuple[str, str, dict]]:
    names = [path.name.removesuffix(".meta.json") for path in sorted(folder().glob("*.meta.json"))]
    for name in sorted(names, key=lambda name: list(TITLES).index(name) if name in TITLES else len(TITLES)):
        yield from ((name, device, manifest) for device, manifest in read_manifests(name).items())


def _benchmark(name: str, device: str, manifest: dict) -> Card:
    rows = [row for row in read_rows(name) if row["device"] == device]
    text = json.dumps(rows)
    began, ended = manifest.get("began") or manifest["started"], manifest["ended"]
    drawn = sorted(path.stem for path in (RESULTS / "figures").glob(f"*_{name}-{device}.png"))
    return Card(
        f"{name}-{device}",
        f"{TITLES.get(name, name)}, {'GPU' if device == 'cuda' else device.upper()}",
        tags.tasks(text),
        [BASELINE, OURS] if "d_rr" in text else [OURS],
        {
            "machine": f"{manifest['machine']}, {cores(manifest)} cores, load {manifest['load'][0]:g}",
            "measured": f"{began[:16].replace('T', ' ')} to {ended[11:16]} UTC",
            "commit": manifest["commit"] or "unknown",
        },
        ended,
        f"python -m scripts.bench {name} --size {manifest['size']} --device {device}",
        tables=Markup("").join(_tables(rows)),
        pictures=pictures(drawn, TITLES.get(name, name)),
    )


def _tables(rows: list[dict]) -> Iterator[Markup]:
    """One for rows of each kind; quartiles stand in brackets, lists and parts are left to the file."""
    by_columns: dict[tuple[str, ...], list[dict]] = {}
    for row in rows:
        shown = tuple(k for k, v in row.items() if not isinstance(v, list | dict) and k != "device")
        by_columns.setdefault(shown, []).append(row)
    for columns, some in by_columns.items():
        table = markup.table([_heading(name) for name in columns], [_cells(row, columns) for row in some])
        folded = Markup('<details class="more"><summary>All {} rows</summary>{}</details>').format(len(some), table)
        yield table if len(some) <= FEW else folded


def _cells(row: dict, columns: Iterable[str]) -> list[str]:
    values = [(row[name], row.get(f"{name}_quartiles", ())) for name in columns]
    return [_number(value) + f" [{', '.join(map(_number, ends))}]" * bool(ends) for value, ends in values]


def _heading(name: str) -> str:
    """Of a column: d_rr_s is D-RR (s)."""
    for unit, written in UNITS.items():
        name = re.sub(rf"_{unit}$", f" ({written})", name)
    return _words(name)


def _words(text: str) -> str:
    for word, written in WORDS.items():
        text = re.sub(rf"(?<![a-zA-Z]){word}(?![a-zA-Z])", written, text)
    return text.replace("_", " ")


def _number(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or (isinstance(value, float) and abs(value) >= 1000):
        return f"{value:,.0f}"
    return f"{value:.4g}" if isinstance(value, float) else _words(f"{value}")
