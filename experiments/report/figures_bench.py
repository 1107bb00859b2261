"""Figures and tables of results/bench: what coordinated ordering costs in time, traffic and memory."""

from __future__ import annotations

import math

from experiments.report import plots
from experiments.report.kinds import Axes, DataFrame, Figure, Series
from experiments.report.names import BASELINE, sorter_colour, sorter_label, task_name
from experiments.report.names import OURS as OUR_SORTER
from experiments.report.published import PAPER
from experiments.report.text import markdown, plural
from experiments.store.bench import read_manifests, read_rows

AUTHOR, OURS, FLOOR = "#7b5ea7", sorter_colour(OUR_SORTER), "#777777"
PHASES = {  # of an epoch, with their colours
    "data": "#56a0c9",
    "gradients": "#3465a4",
    "communication": "#e69f00",
    "ordering": "#c4322b",
    "optimiser": "#8c6d46",
}
PAPERS_RATIOS = {"lr_hmda": 2.87, "lstm_wiki2": 1.49, "mlp_m4": 1.29}  # from the time axes of the paper's Figure 3
COMPARED = {"ls": "--", "lw": 1.1}  # lines to compare with
MIB = 2**20


def rows(name: str, device: str | None = None) -> DataFrame:
    """The rows of one benchmark, of one device or of all."""
    import pandas as pd

    found = pd.DataFrame(read_rows(name))
    return found if device is None else found[found["device"] == device]


def devices(name: str) -> list[str]:
    """Those on which it was measured, perhaps none."""
    return list(dict.fromkeys(row["device"] for row in read_rows(name)))


def caption(name: str, device: str) -> str:
    """On which machine, how and when it was measured."""
    made = read_manifests(name)[device]
    cores = made.get("host", made)["cores"]  # the first version of manifests had no `host`
    return (
        f"{made['machine']}, {cores} cores, load {made['load'][0]:g} · size {made['size']} · medians, bars: "
        f"quartiles · {made['ended'][:10]}, commit {made['commit'] or 'unknown'}"
    )


@plots.styled
def balancing(device: str) -> Figure:
    """Time per pair position against the length of the gradients, one panel per number of workers."""
    found = rows("balance", device)
    found = found[found["threads"] == found["threads"].max()]
    counts = sorted(found["workers"].unique())
    figure, axes = plots.panels(1, len(counts), 3.1 * len(counts), 3.2, sharey=True)
    timed = (("author_us", AUTHOR, "one worker after the other (published code)"), ("ours_us", OURS, "ours"))
    for panel, workers in zip(axes[0], counts, strict=True):
        some = found[found["workers"] == workers].sort_values("dim")
        for key, colour, label in timed:
            style = {"color": colour, "label": label, "marker": "o", "ms": 3.5, "capsize": 2}
            panel.errorbar(some["dim"], some[key], _quartiles(some, key), **style)
        panel.plot(some["dim"], some["floor_us"], color=FLOOR, label="reading the rows twice", **COMPARED)
        panel.set(xscale="log", yscale="log", xlabel="parameters", title=f"{workers} workers")
    axes[0][0].set_ylabel("µs per pair position")
    return _finish(figure, caption("balance", device))


@plots.styled
def epochs(device: str) -> Figure:
    """Seconds per epoch by phase, D-RR and CD-GraB beside each other, relative to D-RR."""
    found = rows("epoch", device)
    figure, axes = plots.panels(1, len(found), 2.9 * len(found), 3.4)
    for panel, row in zip(axes[0], found.to_dict("records"), strict=True):
        for place, sorter in enumerate((BASELINE, OUR_SORTER)):
            _stack(panel, place, row[f"{sorter}_phases"], row["d_rr_s"])
            spread = [[abs(end - row[f"{sorter}_s"]) / row["d_rr_s"]] for end in row[f"{sorter}_s_quartiles"]]
            panel.errorbar(place, row[f"{sorter}_s"] / row["d_rr_s"], spread, color="black", lw=0.9, capsize=3)
        panel.axhline(PAPERS_RATIOS[row["task"]], color=AUTHOR, label="CD-GraB, paper", **COMPARED)
        panel.set_xticks([0, 1], [sorter_label(BASELINE), f"{sorter_label(OUR_SORTER)}\n× {row['ratio']:.2f}"])
        panel.set_title(f"{task_name(row['task'])}\n{row['workers']} workers, {row['processes']} processes")
    axes[0][0].set_ylabel("time per epoch / D-RR's")
    return _finish(figure, caption("epoch", device))


@plots.styled
def traffic(device: str) -> Figure:
    """Bytes per process and step, by processes and units per step, of gradients that are divided by coordinates."""
    found = rows("traffic", device)
    found = found[found["dim"] == found["dim"].max()]
    ours, author = ("bytes", OURS, "ours"), ("author_bytes", AUTHOR, "all-gather (published code)")
    figure, ((panel,),) = plots.panels(1, 1, 6.2, 3.2)
    for offset, (key, colour, label) in enumerate((("allreduce_bytes", FLOOR, "all-reduce"), ours, author)):
        places = [place + 0.27 * (offset - 1) for place in range(len(found))]
        panel.bar(places, found[key] / MIB, 0.25, color=colour, label=label)
    labels = [f"{row.processes} processes\n{row.units_per_step} per step" for row in found.itertuples()]
    panel.set_xticks(range(len(found)), labels)
    panel.set_ylabel("MiB sent per process and step")
    return _finish(figure, caption("traffic", device))


@plots.styled
def memory(device: str) -> Figure:
    """Extra memory of CD-GraB over D-RR per process, beside the paper's Figure 8."""
    found, bottom = rows("memory", device), 0.0
    figure, ((panel,),) = plots.panels(1, 1, 1.1 * len(found) + 2.1, 3.2)
    for (use, extra), colour in zip(papers_extra_mib().items(), (AUTHOR, "#b9a7d1"), strict=True):
        panel.bar(0, extra, 0.6, bottom=bottom, color=colour, label=f"{use.lower()}, paper")
        bottom += extra
    places, spread = range(1, len(found) + 1), [end / MIB for end in _quartiles(found, "extra_bytes")]
    panel.bar(places, found["extra_bytes"] / MIB, 0.6, yerr=spread, color=OURS, label="ours", capsize=3)
    panel.axhline(3 * 4 * found["dim"].iloc[0] / MIB, color=FLOOR, label="3 floats per parameter", **COMPARED)
    labels = [f"{row.workers} workers,\n{plural(row.processes, 'process')}" for row in found.itertuples()]
    panel.set_xticks([0, *places], ["paper,\n4 workers", *labels])
    panel.set_ylabel("extra MiB per process")
    return _finish(figure, caption("memory", device))


@plots.styled
def peers(device: str) -> Figure:
    """Time per step of our sorters and of grab-sampler."""
    found = rows("peers", device)
    figure, ((panel,),) = plots.panels(1, 1, 6.2, 0.42 * len(found) + 1.2)
    for offset, (key, colour, label) in enumerate((("ours_us", OURS, "ours"), ("peer_us", AUTHOR, "grab-sampler"))):
        places = [place + 0.38 * offset for place in range(len(found))]
        panel.barh(places, found[key], 0.36, xerr=_quartiles(found, key), color=colour, label=label)
    panel.set_yticks([place + 0.19 for place in range(len(found))], found["what"])
    panel.invert_yaxis()
    panel.set_xlabel("µs per step")
    return _finish(figure, caption("peers", device))


def papers_extra_mib() -> dict[str, float]:
    """MiB that CD-GraB needs and D-RR does not, by use, from the bars of the paper's Figure 8."""
    import pandas as pd

    bars = pd.read_csv(PAPER / "lstm_wiki2_memory.csv").pivot(index="x", columns="series", values="mean")
    extra = bars[sorter_label(OUR_SORTER)] - bars[sorter_label(BASELINE)]
    return extra[extra > 0].round(2).to_dict()


def summary(name: str, device: str, columns: tuple[str, ...]) -> str:
    """A Markdown table of those of the columns that were measured on this device."""
    found = rows(name, device).dropna(axis="columns", how="all")
    shown = found[[column for column in columns if column in found]].to_dict("records")
    table = markdown([{key: _shown(value) for key, value in row.items()} for row in shown])
    return f"{table}\n\n{caption(name, device)}."


def _shown(value: object) -> str:
    if isinstance(value, float):
        if math.isnan(value):  # not measured in this row
            return "–"
        return f"{value:,.0f}" if value.is_integer() else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _quartiles(found: DataFrame, key: str) -> list[Series]:
    """How far the quartiles are below and above the medians."""
    return [abs(found[key] - found[f"{key}_quartiles"].str[end]) for end in (0, 1)]


def _stack(panel: Axes, place: int, phases: dict[str, float], unit: float) -> None:
    bottom = 0.0
    for phase, colour in PHASES.items():
        panel.bar(place, phases[phase] / unit, 0.7, bottom=bottom, color=colour, label=phase if place else None)
        bottom += phases[phase] / unit


def _finish(figure: Figure, text: str) -> Figure:
    """One legend above all panels, the caption below; there is no title."""
    width, height = figure.get_size_inches()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    columns = min(len(labels), max(1, int(width / 1.5)))
    figure.legend(handles, labels, loc="upper center", ncols=columns)
    figure.text(0.5, 0.02, text, ha="center", **plots.SMALL)
    figure.tight_layout(rect=(0, 0.2 / height, 1, 1 - 0.24 * -(-len(labels) // columns) / height))
    return figure
