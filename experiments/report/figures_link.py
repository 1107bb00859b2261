"""Training over links of limited speed (`make bench BENCH=link`, with a delay: `BENCH=delay`): seconds per step by
bandwidth, which method wins, what stands in the way of ExDyna, and what it gains by sending while the backward pass
runs."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.report import plots
from experiments.report.figures_bench import caption
from experiments.report.kinds import Axes, Figure
from experiments.report.text import enumerated, table
from experiments.store.bench import read_rows

PLAIN, ALONE, CD_GRAB = "DDP", "no exchange", "CD-GraB"
EXDYNA, PUBLISHED, EARLY = "ExDyna", "ExDyna as published", "ExDyna in 4 sections"
LARGE, SPARSE, GIGABIT = "transformer", 0.001, 1.0  # where ExDyna should be so many
TIMES = 3.0  # times as fast as DDP
TOO_LITTLE = 0.85  # of the wanted density: who sends less is no rival
CLOSE = 1.1  # times as long: in so few rounds, less means nothing
CHOSEN = (PLAIN, "fp16", "PowerSGD, rank 1", "PowerSGD, rank 4", "ExDyna, 0.01", "ExDyna, 0.001", CD_GRAB)
COLOURS = {  # those of the studies, where these have the method
    **{PLAIN: "black", ALONE: "0.7", "fp16": "#8a8a8a", "PowerSGD, rank 1": "#8c6d46", "PowerSGD, rank 4": "#c4a578"},
    **{CD_GRAB: "#b5bd00", "Top-k": "#3465a4", "CLT-k": "#56a0c9", "DEFT": "#009e73", "SIDCo": "#7b5ea7"},
    **{"MiCRO": "#e69f00", EXDYNA: "#c4322b", PUBLISHED: "#e08a86", EARLY: "#7a1511"},
}


def measured(device: str = "cpu", **wanted: object) -> list[dict]:
    """Rows without those that were skipped."""
    rows = [row for row in _rows(device) if "skipped" not in row]
    return [row for row in rows if wanted.items() <= row.items()]


def skipped(device: str) -> list[str]:
    """What was not measured, and why: links that were skipped once may have been measured since."""
    known = {_link(row) for row in measured(device)}
    reasons = {_link(row): row["skipped"] for row in _rows(device) if "skipped" in row and _link(row) not in known}
    return [f"{link}: not measured, {reason}" for link, reason in reasons.items()]


def _rows(device: str) -> list[dict]:
    return [row for benchmark in ("link", "delay") for row in read_rows(benchmark) if row["device"] == device]


def name(row: dict) -> str:
    return f"{row['method']}, {row['density']:g}" if row["density"] else row["method"]


@plots.styled
def links(device: str) -> Figure:
    """How many times as fast as DDP a step is: a column of panels for every model, a row for every link, in them a line
    for every method."""
    rows = [row for row in measured(device, delay=0.0) if row["method"] != EARLY]
    models, speeds = (list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "link"))
    methods = [method for method in dict.fromkeys(map(name, rows)) if method not in (ALONE, PLAIN)]
    size = 1.3 + 3.2 * len(models), 1.6 + (0.5 + 0.16 * len(methods)) * len(speeds)
    figure, axes = plots.panels(len(speeds), len(models), *size, sharex=True, sharey=True)
    for its_panels, speed in zip(axes, sorted(speeds), strict=True):
        for panel, model in zip(its_panels, models, strict=True):
            here = [row for row in rows if (row["model"], row["link"]) == (model, speed)]
            _draw_link(panel, here, methods)
            above = "" if speed > min(speeds) else f"{model}, {_millions(here[0])}\n"
            panel.set_title(f"{above}fastest: {_winner(_ranked(here))}", fontsize=8)
        its_panels[0].set_ylabel(f"{speed:g} Gbit/s", fontweight="bold")
    for panel in axes[-1]:
        plots.log_ticks(panel.xaxis)
        panel.set_xlabel("times as fast as DDP")
    axes[0][0].set_yticks(range(len(methods)), methods)
    axes[0][0].set_ylim(len(methods) - 0.4, -0.6)
    note = "medians, bars: quartiles; open dots: density 0.001; ExDyna as published has its threshold counted before"
    title = "A step of 4 processes over limited links: right of the line is faster than DDP"
    return plots.finish(figure, title, caption("link", device, note), entry=2.7)


def _draw_link(panel: Axes, rows: list[dict], methods: list[str]) -> None:
    """One model over one link."""
    able = _ranked(rows)
    for row in rows:
        times, color = 1 / row["ratio"], COLOURS[row["method"]]
        if row["method"] in (PLAIN, ALONE):
            words = PLAIN if row["method"] == PLAIN else "no exchange at all: no more can be gained"
            panel.axvline(times, color=color, lw=1.2, ls="-" if row["method"] == PLAIN else ":", zorder=1, label=words)
            continue
        y, open_dot = methods.index(name(row)), {"markerfacecolor": "white"} if row["density"] == SPARSE else {}
        panel.plot([1 / ratio for ratio in row["ratio_quartiles"]], [y, y], lw=1, color=color)
        panel.plot(times, y, "o", ms=3.6, color=color, **open_dot)
        if not sends_enough(row):
            panel.plot(
                times, y, "x", color="black", ms=7, mew=1.3, zorder=5, label="sends less than is wanted: no rival"
            )
        elif row is able[0] or not _told_apart(row, able[0]):
            words = "the fastest, and those not told apart from it"
            panel.plot(times, y, "o", ms=10, mfc="none", mec="black", mew=1.2, label=words)


def _winner(able: list[dict]) -> str:
    first = name(able[0])
    if PLAIN in (first, *_equal(able)):
        return PLAIN if first == PLAIN else f"{first}, or {PLAIN}"
    return f"{first}, {1 / able[0]['ratio']:.3g} ×"


def winners(device: str) -> Iterator[str]:
    """A sentence for each model and link: the fastest method, and the fastest sparsifier."""
    for rows in together(measured(device)):
        able = _ranked(rows)
        first, sparse = able[0], next((row for row in able if row["density"]), able[0])
        sentence = f"{place(first)}: {_speed(first)}{_alike(able)}{_by_itself(able)}"
        yield sentence + ("." if sparse is first else f"; of the sparsifiers {_speed(sparse)}.")


def unmatched(device: str) -> Iterator[str]:
    """Who sends less than is wanted, and so cannot be the fastest."""
    for rows in together(measured(device)):
        if off := [f"{name(row)} ({row['sent_density']:.2g})" for row in rows if not sends_enough(row)]:
            yield f"{place(rows[0])}: not compared, since less is sent than is wanted: {enumerated(off)}."


def sends_enough(row: dict) -> bool:
    """So does whatever has no density. Who sends more than is wanted, and is faster all the same, is faster."""
    return not row["density"] or row["sent_density"] >= TOO_LITTLE * row["density"]


def _ranked(rows: list[dict]) -> list[dict]:
    """The methods that exchange gradients, and send enough of them, the fastest first."""
    able = (row for row in rows if row["method"] != ALONE and sends_enough(row))
    return sorted(able, key=lambda row: row["seconds_per_step"])


def _alike(able: list[dict]) -> str:
    """Those that may be as fast as the first one."""
    equal = _equal(able)
    return f" (not told apart from it: {enumerated(equal)})" if equal else ""


def _equal(able: list[dict]) -> list[str]:
    return [name(row) for row in able[1:] if not _told_apart(row, able[0])]


def _told_apart(row: dict, other: dict) -> bool:
    """Whether quartiles do not overlap, and times differ by more than a few per cent."""
    (low, high), (lowest, highest) = row["ratio_quartiles"], other["ratio_quartiles"]
    apart = max(row["ratio"], other["ratio"]) > CLOSE * min(row["ratio"], other["ratio"])
    return apart and (high < lowest or highest < low)


def _by_itself(able: list[dict]) -> str:
    """The fastest one that needs no help, where the fastest has its threshold counted for it before it is measured."""
    return f"; the fastest without a threshold counted beforehand is {_speed(_unaided(able))}" if _aided(able) else ""


def _aided(able: list[dict]) -> bool:
    return able[0]["method"] == PUBLISHED


def _unaided(able: list[dict]) -> dict:
    return next(row for row in able if row["method"] != PUBLISHED)


def standing_in_the_way(row: dict) -> str:
    """What the seconds of a step consist of. Steps, links and processors overlap, so they do not add up exactly."""
    here = measured(row["device"], model=row["model"], link=row["link"], delay=row["delay"], method=ALONE)
    beyond = "".join(f"{row['cpu_seconds'] - alone['cpu_seconds']:.3g} s beyond that step, " for alone in here)
    return (
        f"{row['seconds_per_step']:.3g} s a step: {row['alone_seconds']:.3g} s is a step without any exchange, "
        f"{row['link_seconds']:.3g} s is what the link takes for its {row['bytes_per_step'] / 1e6:.3g} MB; of a "
        f"processor each process takes {beyond}{row['hook_cpu_seconds']:.3g} s for the hook's own work, of which "
        f"{row['selecting_cpu_seconds']:.3g} s is selecting"
    )


def sent_early(device: str) -> Iterator[str]:
    """What sending while the backward pass runs brings ExDyna."""
    for rows in together(measured(device)):
        if gains := [f"{times} at {density:g}{doubt}" for density, (times, doubt) in _gains(rows).items()]:
            yield f"{place(rows[0])}, {EARLY}: times as fast as {EXDYNA}: {enumerated(gains)}."


def delayed(device: str) -> Iterator[str]:
    """How long the delay is in truth, and what is taken by the process that delays, if there is one."""
    for rows in together(measured(device)):
        if trip := rows[0].get("round_trip_ms"):
            taken = {name(row): row.get("delay_cpu_seconds") for row in rows if row["method"] in (PLAIN, EXDYNA)}
            parts = [f"{seconds:.3g} s in a step of {method}" for method, seconds in taken.items() if seconds]
            process = f"; of a processor, the process that delays takes {enumerated(parts)}" if parts else ""
            yield f"{place(rows[0])}: a round trip takes {trip:.3g} ms{process}."


def _gains(rows: list[dict]) -> dict[float, tuple[str, str]]:
    """How many times as fast ExDyna is if its sections are sent early, and whether that is doubtful, by density."""
    found = {(row["method"], row["density"]): row for row in rows if sends_enough(row)}
    both = [density for method, density in found if method == EARLY and (EXDYNA, density) in found]
    return {density: _gain(found[EXDYNA, density], found[EARLY, density]) for density in both}


def _gain(whole: dict, early: dict) -> tuple[str, str]:
    return f"{whole['ratio'] / early['ratio']:.3g}", "" if _told_apart(whole, early) else " (not told apart)"


def sought() -> Iterator[tuple[str, str, str]]:
    """Where ExDyna should be TIMES as fast as DDP: what was measured, what was wanted, and what came of it."""
    for row in measured(model=LARGE, link=GIGABIT, delay=0.0, method=EXDYNA, density=SPARSE):
        high, low = row["ratio_quartiles"]
        yield (
            f"a step of {place(row)} with {EXDYNA} at {SPARSE:g}, 4 processes, against DDP",
            f"at least {TIMES:g} times as fast",
            f"{1 / row['ratio']:.3g} times, quartiles {1 / low:.3g} and {1 / high:.3g}; {standing_in_the_way(row)}",
        )


def together(rows: list[dict]) -> Iterator[list[dict]]:
    """Those of one model and link, a model's links together."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    keys = dict.fromkeys((row["model"], row["link"], row["delay"]) for row in rows)
    for key in sorted(keys, key=lambda key: models.index(key[0])):
        yield [row for row in rows if (row["model"], row["link"], row["delay"]) == key]


def place(row: dict) -> str:
    return f"{row['model']} ({_millions(row)}) over {_link(row)}"


def _speed(row: dict) -> str:
    faster = "" if row["method"] == PLAIN else f", {1 / row['ratio']:.3g} times as fast as DDP"
    return f"{name(row)}, {row['seconds_per_step']:.3g} s a step{faster}"


def _link(row: dict) -> str:
    return f"{row['link']:g} Gbit/s" + f" with a delay of {row['delay']:g} ms" * bool(row["delay"])


def _millions(row: dict) -> str:
    return f"{row['parameters'] / 1e6:.3g} M parameters"


# -- tables of the documentation --------------------------------------------------------------------------------------


@table
def fastest() -> Iterator[dict[str, str]]:
    """Which method is the fastest, model by model and link by link."""
    for rows in together(measured()):
        able = _ranked(rows)
        unaided = f"{name(_unaided(able))}, {1 / _unaided(able)['ratio']:.3g} times" if _aided(able) else "the same"
        yield _head(rows) | {
            "fastest": name(able[0]),
            "times as fast as DDP": f"{1 / able[0]['ratio']:.3g}",
            "not told apart from it": "; ".join(_equal(able)) or "–",
            "fastest without a threshold counted beforehand": unaided,
        }


@table
def steps() -> Iterator[dict[str, str]]:
    """What a step takes and sends with the methods that one would choose from."""
    for rows in together(measured()):
        found = {name(row): f"{row['seconds_per_step']:.3g} s, {row['bytes_per_step'] / 1e6:.3g} MB" for row in rows}
        alone = next(row for row in rows if row["method"] == ALONE)
        yield _head(rows) | {ALONE: f"{alone['seconds_per_step']:.3g} s"} | {key: found.get(key, "–") for key in CHOSEN}


@table
def early() -> Iterator[dict[str, str]]:
    """How many times as fast ExDyna is if its sections are sent early."""
    for rows in together(measured()):
        gains = {density: "".join(words) for density, words in _gains(rows).items()}
        yield _head(rows) | {f"density {density:g}": gains.get(density, "–") for density in (0.01, SPARSE)}


def _head(rows: list[dict]) -> dict[str, str]:
    return {"model": f"{rows[0]['model']}, {_millions(rows[0])}", "link": _link(rows[0])}
