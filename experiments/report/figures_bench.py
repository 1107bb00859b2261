"""Figures and tables of results/bench: what coordinated ordering costs in time, traffic and memory."""

from __future__ import annotations

import math

from cdgrab import sorters
from experiments.report import plots
from experiments.report.kinds import Axes, DataFrame, Figure, Series
from experiments.report.names import BASELINE, sorter_colour, sorter_label, task_name
from experiments.report.names import OURS as OUR_SORTER
from experiments.report.published import PAPER
from experiments.report.text import markdown, plural
from experiments.store.bench import cores, read_manifests, read_rows

AUTHOR, OURS, FLOOR = "#7b5ea7", sorter_colour(OUR_SORTER), "#777777"
PHASES = {  # of an epoch, with their colours
    "gradients": "#3465a4",
    "communication": "#e69f00",
    "ordering": "#c4322b",
    "optimiser": "#8c6d46",
}
PAPERS_RATIOS = {"lr_hmda": 2.87, "lstm_wiki2": 1.49, "mlp_m4": 1.29}  # from the time axes of the paper's Figure 3
COMPARED = {"ls": "--", "lw": 1.1}  # lines to compare with
MIB = 2**20
USES = {  # of memory, in the words of the paper's Figure 8
    "model": "Model",
    "optimiser": "Optimizer",
    "gradients": "Forward & Backward",
    "communication": "Communication",
    "ordering": "Dataset Sorter",
}


def rows(name: str, device: str | None = None) -> DataFrame:
    """The rows of one benchmark, of one device or of all."""
    import pandas as pd

    found = pd.DataFrame(read_rows(name))
    if name == "peers":
        found["what"] = found["what"].map(_readable)
    return found if device is None else found[found["device"] == device]


def devices(name: str) -> list[str]:
    """Those on which it was measured, perhaps none."""
    return list(dict.fromkeys(row["device"] for row in read_rows(name)))


def caption(name: str, device: str, shown: str = "medians, bars: quartiles") -> str:
    """On which machine, how and when it was measured."""
    made = read_manifests(name)[device]
    return (
        f"{made['machine']}, {cores(made)} cores, load {made['load'][0]:g} · size {made['size']} · {shown} · "
        f"{made['ended'][:10]}, commit {made['commit'] or 'unknown'}"
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
    return plots.finish(figure, "Deciding the signs of a pair position", caption("balance", device))


@plots.styled
def epochs(device: str) -> Figure:
    """Seconds per epoch beside those of D-RR, pair by pair of neighbours in time; on a CPU by phase. On a GPU a phase
    ends before its work is done, so that its seconds mean nothing."""
    found, digits = rows("epoch", device), 2 if device == "cpu" else 3  # times of a GPU scatter less
    figure, axes = plots.panels(1, len(found), max(2.9 * len(found), 6.5), 3.9)
    for panel, row in zip(axes[0], found.to_dict("records"), strict=True):
        baseline = [end / row["d_rr_s"] for end in row["d_rr_s_quartiles"]]
        bars = {BASELINE: (1.0, baseline), OUR_SORTER: (row["ratio"], row["ratio_quartiles"])}
        for place, (sorter, (height, quartiles)) in enumerate(bars.items()):
            if device == "cpu":
                _stack(panel, place, row[f"{sorter}_phases"], height)
            else:
                panel.bar(place, height, 0.7, color=sorter_colour(sorter))
            spread = [[abs(end - height)] for end in quartiles]
            panel.errorbar(place, height, spread, color="black", lw=0.9, capsize=3)
        panel.axhline(PAPERS_RATIOS[row["task"]], color=AUTHOR, label="CD-GraB, paper", **COMPARED)
        panel.set_xticks([0, 1], [sorter_label(BASELINE), f"{sorter_label(OUR_SORTER)}\n× {row['ratio']:.{digits}f}"])
        processes = plural(row["processes"], "process")
        panel.set_title(f"{task_name(row['task'])}\n{row['workers']} workers, {processes}")
    axes[0][0].set_ylabel("time per epoch / D-RR's")
    shares = "phases: shares of their sum · " if device == "cpu" else ""
    return plots.finish(figure, "An epoch of CD-GraB over one of D-RR", shares + caption("epoch", device))


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
    parameters = f"{found['dim'].max() / 1e6:.2f} M parameters"
    return plots.finish(figure, f"What a process sends per step, {parameters}", caption("traffic", device, "counted"))


@plots.styled
def memory(device: str) -> Figure:
    """The paper's Figure 8, with what was measured of ours by use; and what a process of ours needs with CD-GraB beyond
    what it needs with D-RR."""
    found, by_use = rows("memory", device), papers_mib()
    measured, dim = ours_mib(found), found["dim"].iloc[0]
    whose = "" if len(measured) else "the paper, "
    titles = (f"{whose}4 workers: by use", "ours: with CD-GraB beyond D-RR")
    widths = {"width_ratios": (len(by_use), 0.8 * len(found) + 1)}
    figure, ((uses, ours),) = plots.panels(1, 2, 1.0 * len(found) + 5.5, 3.7, titles, gridspec_kw=widths)
    _draw_uses(uses, by_use, measured)
    floats, spread = found["extra_bytes"] / 4 / dim, [end / 4 / dim for end in _quartiles(found, "extra_bytes")]
    bars = ours.bar(range(len(found)), floats, 0.6, yerr=spread, color=OURS, label="CD-GraB − D-RR, ours", capsize=3)
    _name_bars(bars, "{:.3g}")
    extra = (by_use[sorter_label(OUR_SORTER)] - by_use[sorter_label(BASELINE)]).sum() * MIB / 4 / dim
    ours.axhline(extra, color=AUTHOR, label="CD-GraB − D-RR, paper", **COMPARED)
    ours.axhline(3, color=FLOOR, label="wanted: at most 3", **COMPARED)
    workers = [f"{row.workers} workers,\n{plural(row.processes, 'process')}" for row in found.itertuples()]
    ours.set_xticks(range(len(found)), workers)
    plots.log_ticks(ours.yaxis)
    ours.set(ylabel="floats per parameter", ylim=(1, 1.6 * max(extra, floats.max())))
    unit = f"one float per parameter: {4 * dim / MIB:.2f} MiB · "
    if missing := [_british(use) for use in by_use.index if use not in measured.index]:
        unit += f"not measured of ours: {', '.join(missing)} · "
    return plots.finish(figure, "Memory of a process that trains the LSTM", unit + caption("memory", device))


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
    return plots.finish(figure, "Our sorters beside grab-sampler", caption("peers", device))


def papers_mib() -> DataFrame:
    """MiB by use (rows) and sorter (columns), the bars of the paper's Figure 8."""
    import pandas as pd

    bars = pd.read_csv(PAPER / "lstm_wiki2_memory.csv")
    return bars.pivot(index="x", columns="series", values="mean").loc[bars["x"].unique()]


def ours_mib(found: DataFrame) -> DataFrame:
    """The same of ours, with 4 workers on as many processes; empty where it was not measured."""
    import pandas as pd

    like_theirs = found[(found["workers"] == 4) & (found["processes"] == 4)].to_dict("records")
    measured = [row for row in like_theirs if isinstance(row.get(f"{OUR_SORTER}_uses"), dict)]
    return pd.DataFrame(
        {
            sorter_label(sorter): {USES[use]: bytes_ / MIB for use, bytes_ in row[f"{sorter}_uses"].items()}
            for row in measured
            for sorter in (BASELINE, OUR_SORTER)
        }
    )


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


def _stack(panel: Axes, place: int, phases: dict[str, float], height: float) -> None:
    """A bar of this height, divided like the phases that can be seen: reading data takes no time to speak of."""
    bottom, unit = 0.0, sum(phases[phase] for phase in PHASES) / height
    for phase, colour in PHASES.items():
        panel.bar(place, phases[phase] / unit, 0.7, bottom=bottom, color=colour, label=phase if place else None)
        bottom += phases[phase] / unit


def _draw_uses(panel: Axes, papers: DataFrame, ours: DataFrame) -> None:
    """Bars by use and sorter, the paper's pale; of the model's memory it says nothing."""
    known = not ours.empty
    uses = ["Model"] * known + list(papers.index)
    series = [(papers, "paper", 0.55)] + [(ours, "ours", 1.0)] * known
    bars = [(table[sorter_label(s)], s, whose, alpha) for table, whose, alpha in series for s in (BASELINE, OUR_SORTER)]
    width = 0.76 / len(bars)
    for number, (values, sorter, whose, alpha) in enumerate(bars):
        values = values.reindex(uses).dropna()
        places = [uses.index(use) + width * (number - (len(bars) - 1) / 2) for use in values.index]
        style = {"color": sorter_colour(sorter), "alpha": alpha, "label": f"{sorter_label(sorter)}, {whose}"}
        _name_bars(panel.bar(places, values, 0.95 * width, **style), "{:.3g}", rotation=90 * known)
    panel.set_xticks(range(len(uses)), [_british(use).replace(" ", "\n", 1) for use in uses])
    most = max(values.max() for values, *_ in bars)
    panel.set(ylabel="MiB", ylim=(0, 1.12 * most))
    if known:  # ours are far apart
        plots.log_ticks(panel.yaxis)
        panel.set(ylim=(0.1, 8 * most))


def _british(use: str) -> str:
    return use.lower().replace("z", "s")


def _name_bars(bars: object, digits: str, **style: float) -> None:
    """The height of every bar above it."""
    heights = [bar.get_height() for bar in bars]
    words = [f"{height:,.0f}" if height >= 1000 else digits.format(height) for height in heights]
    bars[0].axes.bar_label(bars, words, padding=2, fontsize=7, **style)


def _readable(what: str) -> str:
    """lr_hmda grab_pair, same loop -> LR-HMDA, GraB (PairBal), same loop"""
    task, sorter, *loop = what.replace(",", "").split(maxsplit=2)
    return ", ".join([task_name(task), sorters.label(sorter), *loop])
