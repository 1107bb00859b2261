"""Figures and tables of results/bench: what coordinated ordering costs in time, traffic and memory."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.report.figures import COLOURS, STYLE
from experiments.report.published import PAPER
from experiments.report.tables import markdown
from experiments.store.bench import read_meta, read_rows
from experiments.training.clock import PHASES

AUTHOR, OURS, FLOOR = "#7b5ea7", COLOURS["cd_grab"], "#777777"
PHASE_COLOURS = dict(zip(PHASES, ("#56a0c9", "#3465a4", "#e69f00", "#c4322b", "#8c6d46", "#cccccc"), strict=True))
TASKS = {"lr_hmda": "LR-HMDA", "lstm_wiki2": "LSTM-WikiText-2", "mlp_m4": "MLP-M4"}
PAPERS_RATIOS = {"lr_hmda": 2.87, "lstm_wiki2": 1.49, "mlp_m4": 1.29}  # from the time axes of the paper's Figure 3
MIB = 2**20


def rows(name: str, device: str | None = None) -> pd.DataFrame:
    """The rows of one benchmark, of one device or of all."""
    found = pd.DataFrame(read_rows(name))
    return found if device is None else found[found["device"] == device]


def devices(name: str) -> list[str]:
    return list(dict.fromkeys(rows(name)["device"]))


def caption(name: str, device: str) -> str:
    """What was measured on what, when."""
    meta = read_meta(name)[device]
    return (
        f"{meta['machine']}, {meta['cores']} cores, load {meta['load'][0]:g} · size {meta['size']} · medians, bars: "
        f"quartiles · {meta['ended'][:10]}, commit {meta['commit'] or 'unknown'}"
    )


def balancing(device: str) -> Figure:
    """Time per pair position against the length of the gradients, one panel per number of workers."""
    found = rows("balance", device)
    found = found[found["threads"] == found["threads"].max()]
    counts = sorted(found["workers"].unique())
    with plt.style.context(STYLE):
        figure, panels = plt.subplots(1, len(counts), figsize=(3.1 * len(counts), 3.2), sharey=True, squeeze=False)
        for panel, workers in zip(panels[0], counts, strict=True):
            some = found[found["workers"] == workers].sort_values("dim")
            _with_quartiles(panel, some, "author_us", AUTHOR, "one worker after the other (published code)")
            _with_quartiles(panel, some, "ours_us", OURS, "ours")
            panel.plot(some["dim"], some["floor_us"], color=FLOOR, ls="--", lw=1.1, label="reading the rows twice")
            panel.set(xscale="log", yscale="log", xlabel="parameters", title=f"{workers} workers")
        panels[0][0].set_ylabel("µs per pair position")
        _finish(figure, caption("balance", device))
    return figure


def epochs(device: str) -> Figure:
    """Seconds per epoch by phase, D-RR and CD-GraB beside each other, relative to D-RR."""
    found = rows("epoch", device)
    with plt.style.context(STYLE):
        figure, panels = plt.subplots(1, len(found), figsize=(2.9 * len(found), 3.4), squeeze=False)
        for panel, row in zip(panels[0], found.to_dict("records"), strict=True):
            for place, sorter in enumerate(("d_rr", "cd_grab")):
                _stack(panel, place, row[f"{sorter}_phases"], row["d_rr_s"])
                low, high = (abs(q - row[f"{sorter}_s"]) for q in row[f"{sorter}_s_quartiles"])
                height, spread = row[f"{sorter}_s"] / row["d_rr_s"], [[low / row["d_rr_s"]], [high / row["d_rr_s"]]]
                panel.errorbar(place, height, spread, color="black", lw=0.9, capsize=3)
            panel.axhline(PAPERS_RATIOS[row["task"]], color=AUTHOR, ls="--", lw=1.1, label="CD-GraB, paper")
            panel.set_xticks([0, 1], ["D-RR", f"CD-GraB\n× {row['ratio']:.2f}"])
            panel.set_title(f"{TASKS[row['task']]}\n{row['workers']} workers, {row['processes']} processes")
        panels[0][0].set_ylabel("time per epoch / D-RR's")
        _finish(figure, caption("epoch", device))
    return figure


def traffic(device: str) -> Figure:
    """Bytes per process and step, by processes and units per step, of gradients that are divided by coordinates."""
    found = rows("traffic", device)
    found = found[found["dim"] == found["dim"].max()]
    bars = (
        ("allreduce_bytes", FLOOR, "all-reduce"),
        ("bytes", OURS, "ours"),
        ("author_bytes", AUTHOR, "all-gather (published code)"),
    )
    with plt.style.context(STYLE):
        figure, panel = plt.subplots(figsize=(6.2, 3.2))
        for offset, (key, colour, label) in enumerate(bars):
            places = [place + 0.27 * (offset - 1) for place in range(len(found))]
            panel.bar(places, found[key] / MIB, 0.25, color=colour, label=label)
        labels = [f"{row.processes} processes\n{row.units_per_step} per step" for row in found.itertuples()]
        panel.set_xticks(range(len(found)), labels)
        panel.set_ylabel("MiB sent per process and step")
        _finish(figure, caption("traffic", device))
    return figure


def memory(device: str) -> Figure:
    """Extra memory of CD-GraB over D-RR per process, beside the paper's Figure 8."""
    found, paper = rows("memory", device), papers_extra_mib()
    with plt.style.context(STYLE):
        figure, panel = plt.subplots(figsize=(1.1 * len(found) + 2.1, 3.2))
        bottom = 0.0
        for (use, extra), colour in zip(paper.items(), ("#7b5ea7", "#b9a7d1"), strict=True):
            panel.bar(0, extra, 0.6, bottom=bottom, color=colour, label=f"{use.lower()}, paper")
            bottom += extra
        places = range(1, len(found) + 1)
        spread = [abs(found["extra_bytes"] - found["extra_bytes_quartiles"].str[end]) / MIB for end in (0, 1)]
        panel.bar(places, found["extra_bytes"] / MIB, 0.6, yerr=spread, color=OURS, label="ours", capsize=3)
        panel.axhline(3 * 4 * found["dim"].iloc[0] / MIB, color=FLOOR, ls="--", lw=1.1, label="3 floats per parameter")
        processes = [f"{count} process{'es' * (count > 1)}" for count in found["processes"]]
        labels = [f"{count} workers,\n{on}" for count, on in zip(found["workers"], processes, strict=True)]
        panel.set_xticks([0, *places], ["paper,\n4 workers", *labels])
        panel.set_ylabel("extra MiB per process")
        _finish(figure, caption("memory", device))
    return figure


def peers(device: str) -> Figure:
    """Time per step, ours and grab-sampler's."""
    found = rows("peers", device)
    with plt.style.context(STYLE):
        figure, panel = plt.subplots(figsize=(6.2, 0.42 * len(found) + 1.2))
        for offset, (key, colour, label) in enumerate((("ours_us", OURS, "ours"), ("peer_us", AUTHOR, "grab-sampler"))):
            spread = [abs(found[key] - found[f"{key}_quartiles"].str[end]) for end in (0, 1)]
            places = [place + 0.38 * offset for place in range(len(found))]
            panel.barh(places, found[key], 0.36, xerr=spread, color=colour, label=label)
        panel.set_yticks([place + 0.19 for place in range(len(found))], found["what"])
        panel.invert_yaxis()
        panel.set_xlabel("µs per step")
        _finish(figure, caption("peers", device))
    return figure


def papers_extra_mib() -> dict[str, float]:
    """MiB that CD-GraB needs and D-RR does not, by use, as the bars of the paper's Figure 8 say."""
    bars = pd.read_csv(PAPER / "lstm_wiki2_memory.csv").pivot(index="x", columns="series", values="mean")
    extra = bars["CD-GraB"] - bars["D-RR"]
    return extra[extra > 0].round(2).to_dict()


def summary(name: str, device: str, columns: tuple[str, ...]) -> str:
    """A Markdown table of some columns, those that were measured on this device."""
    found = rows(name, device).dropna(axis="columns", how="all")
    shown = found[[column for column in columns if column in found]].to_dict("records")
    return (
        markdown([{key: _shown(value) for key, value in row.items()} for row in shown])
        + f"\n\n{caption(name, device)}."
    )


def _shown(value: object) -> str:
    if isinstance(value, float):
        if pd.isna(value):  # measured elsewhere in the table only
            return "–"
        return f"{value:,.0f}" if value.is_integer() else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _with_quartiles(panel: Axes, found: pd.DataFrame, key: str, colour: str, label: str) -> None:
    spread = [abs(found[key] - found[f"{key}_quartiles"].str[end]) for end in (0, 1)]
    panel.errorbar(found["dim"], found[key], spread, color=colour, label=label, marker="o", ms=3.5, capsize=2)


def _stack(panel: Axes, place: int, phases: dict[str, float], unit: float) -> None:
    bottom = 0.0
    for phase, colour in PHASE_COLOURS.items():
        if phase != "evaluation":
            panel.bar(place, phases[phase] / unit, 0.7, bottom=bottom, color=colour, label=phase if place else None)
            bottom += phases[phase] / unit


def _finish(figure: Figure, text: str) -> None:
    """One legend above all panels, the caption below."""
    width, height = figure.get_size_inches()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    columns = min(len(labels), max(1, int(width / 1.5)))
    rows_above = -(-len(labels) // columns)
    figure.legend(handles, labels, loc="upper center", ncols=columns)
    figure.text(0.5, 0.02, text, ha="center", fontsize=6.5, color="0.35")
    figure.tight_layout(rect=(0, 0.2 / height, 1, 1 - 0.24 * rows_above / height))
