"""Claims about what ordering costs, answered by results/bench: medians with quartiles, not seeds with intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from experiments.report import figures_link
from experiments.report.claims import NEGLIGIBLE, TIMED
from experiments.report.curve_claims import overhead_said
from experiments.report.figures_bench import MIB, papers_mib
from experiments.report.judging import CONTRADICTED, REPRODUCED, UNDECIDED, Evidence, Row
from experiments.report.names import BASELINE, OURS, sorter_label, task_name
from experiments.report.statistics import estimate
from experiments.report.text import plural, signed
from experiments.store.bench import SIZES, read_manifests, read_rows

FIGURES = {"lr_hmda": TIMED[0], "lstm_wiki2": TIMED[1], "mlp_m4": TIMED[2]}


def overhead() -> Iterator[Row]:
    """Seconds of an epoch over D-RR's, the two taking turns."""
    for row in read_rows("epoch"):
        figure, low, high = FIGURES[row["task"]], *row["ratio_quartiles"]
        yield Row(
            f"overhead, {task_name(row['task'])}, {row['device']}, {plural(row['processes'], 'process')}",
            overhead_said(figure, figure.pairs[0]),
            *_verdict(low, high, NEGLIGIBLE),
            ours=f"{row['ratio']:.3g}, quartiles {low:.3g} and {high:.3g} (CD-GraB's / D-RR's)",
            evidence=Evidence(row["data"], f"overhead_epoch-{row['device']}", _command("epoch", row["device"])),
        )


def memory() -> Iterator[Row]:
    """Figure 8: what CD-GraB needs beyond D-RR, as many workers as in the paper, a process for each."""
    bars = papers_mib()
    theirs = (bars[sorter_label(OURS)] - bars[sorter_label(BASELINE)]).round(2)
    by_use, limit = ", ".join(f"{use.lower()} {mib:g}" for use, mib in theirs.items() if mib), theirs.sum()
    found = read_rows("memory")
    for row in [row for row in found if row["workers"] == row["processes"] == 4]:
        hosted = [
            some for some in found if (some["device"], some["workers"], some["processes"]) == (row["device"], 4, 1)
        ]
        low, high = (end / MIB for end in row["extra_bytes_quartiles"])
        beside = "".join(f"; one that hosts all workers needs {some['extra_bytes'] / MIB:.3g} MiB" for some in hosted)
        yield Row(
            f"Figure 8, {row['device']}, a process for each worker",
            f"CD-GraB needs at most {limit:.4g} MiB more than D-RR for the LSTM, 4 workers ({by_use})",
            *_verdict(low, high, limit),
            ours=f"{row['extra_bytes'] / MIB:.3g} MiB a process, quartiles {low:.3g} and {high:.3g}{beside}",
            evidence=Evidence("WikiText-2", f"fig8_memory-{row['device']}", _command("memory", row["device"])),
        )


def traffic() -> Iterator[Row]:
    """Bytes that a process sends per step, over D-RR's; the published code gathers all gradients."""
    for row in read_rows("traffic"):
        ratio, theirs = (row[whose] / row["d_rr_bytes"] for whose in ("bytes", "author_bytes"))
        per_step = f"{plural(row['workers'], 'worker')} on {plural(row['processes'], 'process')}"
        yield Row(
            f"overhead, bytes, {per_step}, {plural(row['units_per_step'], 'unit')} a step, {row['dim']:,} parameters",
            f"negligible overhead; gathering all gradients, as its code does, sends {signed(theirs)} times D-RR's",
            *_verdict(ratio, ratio, NEGLIGIBLE),
            ours=f"{ratio:.6g} times D-RR's bytes, counted",
            evidence=Evidence("any", f"overhead_traffic-{row['device']}", _command("traffic", row["device"])),
        )


def speed(method: str) -> Iterator[Row]:
    """The time of a kind of ExDyna over that of the fastest other sparsifier at the same density, which may be another
    one for every model and link, without a delay. Models count, not links: those of one model tell the same story."""
    found = list(figures_link.together(figures_link.measured(density=0.01, delay=0.0)))
    ratios = [(rows[0]["model"], _against_the_fastest_other(rows, method)) for rows in found]
    known = [(model, ratio) for model, ratio in ratios if ratio is not None]
    if not known:
        return
    models = dict.fromkeys(model for model, _ in known)
    by_model = [statistics.mean(math.log(ratio) for one, ratio in known if one == model) for model in models]
    logs = estimate(by_model)
    low, mean, high = (math.exp(each) for each in (logs.low, logs.mean, logs.high))
    interval = f" [{low:.3g}, {high:.3g}]" if math.isfinite(high) else ""
    cases = f"{sum(ratio < 1 for _, ratio in known)} of {plural(len(known), 'combination')} of model and link"
    left = f"; {plural(len(found) - len(known), 'combination')} left out, where it sends less than is wanted"
    device, links = found[0][0]["device"], sorted({row["link"] for rows in found for row in rows})
    yield Row(
        f"speed, {method}, 4 processes on one {device.upper()}, links of {links[0]:g} to {links[-1]:g} Gbit/s",
        "training is faster than with other sparsifiers, on a cluster of GPUs",
        *_verdict(
            low, high, 1.0, "the ends of the interval" if interval else f"what {plural(len(models), 'model')} can say"
        ),
        ours=f"{mean:.3g}{interval} of the time of the fastest other at 0.01, geometric mean over "
        f"{plural(len(models), 'model')}; faster in {cases}{left * (len(known) < len(found))}",
        evidence=Evidence("made-up examples", f"overhead_link-{device}", _command("link", device)),
    )


def _against_the_fastest_other(rows: list[dict], method: str) -> float | None:
    """None: it sends less than is wanted."""
    ratios = {row["method"]: row["ratio"] for row in rows if figures_link.sends_enough(row)}
    others = ratios.keys() - {figures_link.EXDYNA, figures_link.PUBLISHED, figures_link.EARLY}
    return ratios[method] / min(ratios[other] for other in others) if method in ratios and others else None


def _command(benchmark: str, device: str) -> str:
    """What gives these rows again, where they are: rows below the full size would go elsewhere by themselves."""
    size = read_manifests(benchmark)[device]["size"]
    there = "" if size == SIZES[-1] else "CDGRAB_BENCH=results/bench "
    return f"{there}python -m scripts.bench {benchmark} --size {size} --device {device}"


def _verdict(low: float, high: float, most: float, ends: str = "the quartiles") -> tuple[str, str]:
    """With the reason, if it cannot be decided."""
    if low <= most < high:
        return UNDECIDED, f"{most:.4g} is between {ends}"
    return (REPRODUCED if high <= most else CONTRADICTED), ""
