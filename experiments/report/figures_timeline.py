"""Figure of results/bench/timeline: which buckets are averaged while the backward pass still computes."""

from __future__ import annotations

from experiments.report import plots
from experiments.report.figures_bench import FLOOR, OURS, caption, rows
from experiments.report.kinds import Axes, Figure
from experiments.report.text import plural

COMPUTING = "#3465a4"


@plots.styled
def timelines(device: str) -> Figure:
    """A panel for each method and link: a bar for the backward pass, and one for each bucket, from when DDP hands it
    over until its mean is there."""
    found = rows("timeline", device).to_dict("records")
    methods, links = (list(dict.fromkeys(row[key] for row in found)) for key in ("method", "link"))
    buckets = max(len(row["handed_ms"]) for row in found)
    size = (5.2 * len(links), (0.24 * buckets + 0.9) * len(methods) + 0.9)
    figure, axes = plots.panels(len(methods), len(links), *size, sharex="col")
    for row in found:
        panel = axes[methods.index(row["method"])][links.index(row["link"])]
        _draw(panel, row)
        panel.set_title(f"{row['method']}, {row['link']:g} Gbit/s")
    for panel in axes[-1]:
        panel.set_xlabel("milliseconds since the backward pass began")
    title = f"A step of the {found[0]['model']} on {plural(found[0]['processes'], 'process')}"
    shown = f"medians of {found[0]['steps']} steps, first process"
    return plots.finish(figure, title, caption("timeline", device, shown))


def _draw(panel: Axes, row: dict) -> None:
    computed, names = row["handed_ms"][-1], ["backward pass"]
    panel.barh(0, computed, 0.7, color=COMPUTING, label="gradients are computed")
    for number, (start, end) in enumerate(zip(row["handed_ms"], row["averaged_ms"], strict=True), 1):
        beside, late = min(end, computed) - start, max(0.0, end - max(start, computed))
        panel.barh(number, beside, 0.7, left=start, color=OURS, label="bucket is averaged meanwhile" * (number == 1))
        panel.barh(number, late, 0.7, left=start + beside, color=FLOOR, label="… and afterwards" * (number == 1))
        names.append(f"bucket {number}")
    panel.axvline(row["returned_ms"], color="black", lw=0.9, label="backward returns")
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()


def sentences(device: str) -> list[str]:
    return [sentence(row) for row in rows("timeline", device).to_dict("records")]


def sentence(row: dict) -> str:
    computed, buckets = row["handed_ms"][-1], len(row["handed_ms"])
    spans = list(zip(row["handed_ms"], row["averaged_ms"], strict=True))
    early, begun = sum(end < computed for _, end in spans), sum(start < computed for start, _ in spans)
    return (
        f"{row['method']} over {row['link']:g} Gbit/s: gradients are computed after {computed:.0f} ms; by then {begun} "
        f"of {buckets} buckets have been handed over and {early} averaged; `backward` returns after "
        f"{row['returned_ms']:.0f} ms."
    )
