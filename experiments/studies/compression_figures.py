"""Figures and tables of the study `compression`."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from experiments.report import plots, text
from experiments.report.kinds import Axes, DataFrame, Figure, Series
from experiments.report.names import BASELINE, LOSS, sorter_label
from experiments.report.statistics import estimate
from experiments.studies.base import Study
from experiments.studies.collection import verdicts
from experiments.studies.compression import (
    BOTH,
    CALM,
    CORRECTED,
    DENSITY_ERROR,
    IMBALANCE,
    SLOW,
    UNMASKED,
    Losses,
    cell_label,
    cells,
    compared,
    ends,
    gains_claim,
    looks_at_orders,
    ordered,
    reference,
    runs,
    seeds_of,
)
from experiments.studies.sparsification_figures import COLOURS
from experiments.studies.sparsifiers import DENSE, FORGETFUL, OURS, PUBLISHED, TOPK, method_label, options_of
from experiments.studies.verdicts import select

OWN_COLOURS = COLOURS | {"fp16": "#8a8a8a", "powersgd": "#8c6d46", PUBLISHED: "#e08a86", FORGETFUL: "#d66bb0"}
OWN_COLOURS |= {OURS + CALM: "#5b2a86", OURS + CALM + SLOW: "#5b2a86", OURS + SLOW: "#c2459a"}
OWN_COLOURS |= {CORRECTED: "#e07b39", BOTH: "#e07b39", UNMASKED: "#8c5a2b"}
HELP = {"momentum", "momentum_correction", "rate", "warm_up"}  # options
DASHES = {  # strokes and gaps, by option
    "momentum": (1, 1.2),
    "momentum_correction": (5, 1.2),
    "momentum_masking": (1, 1.2),
    "rank": (5, 1.2),
    "rate": (8, 1.2),
    "warm_up": (2, 1.2, 1, 1.2),
}
REMEDIES = (  # what is changed in ExDyna's training; in the dense one beside it; the claim about both, if there is one
    ("", "", "train loss with ExDyna / dense"),
    (SLOW, "", ""),
    (CALM, "", "train loss with ExDyna, no momentum / dense"),
    (CALM + SLOW, "", ""),
    (CALM, CALM, "train loss with ExDyna / dense, both without momentum"),
    (CALM + SLOW, CALM + SLOW, "train loss with ExDyna / dense, both without momentum and at half the rate"),
    (CALM + SLOW, SLOW, "train loss with ExDyna, no momentum / dense, both at half the rate"),
)


def densities(study: Study) -> list[float]:
    """Of the cells that were carried out, in their order."""
    found = (study.settings.cells[name].get("density") for name in cells(study.settings))
    return list(dict.fromkeys(density for density in found if density))


@plots.styled
def curves(study: Study, density: float) -> Figure:
    """Train loss by epoch, and against the bytes that a worker has sent: two panels for every model and worker count,
    and two more for what might help the methods, where that was tried."""
    settings, table = study.settings, compared(study.table, study.settings)
    chosen = [name for name in cells(settings) if settings.cells[name].get("density") == density]
    helped = {name: any(_helps(method) for method, _ in runs(settings, name)) for name in chosen}
    drawn = [(name, remedies) for name in chosen for remedies in ((False, True) if helped[name] else (False,))]
    rows = -(-len(drawn) // 2)
    figure, axes = plots.panels(rows, 4 if len(drawn) > 1 else 2, 17 if len(drawn) > 1 else 9, 3.3 * rows + 2.2)
    panels = axes.flatten()
    for panel in panels[2 * len(drawn) :]:
        panel.set_axis_off()
    for (name, remedies), by_epoch, by_bytes in zip(drawn, panels[::2], panels[1::2], strict=False):
        for cell in (reference(settings, name), name):
            for method, sorter in runs(settings, cell):
                if _belongs(method, sorter, remedies):
                    _draw(by_epoch, by_bytes, select(table, cell=cell, method=method, sorter=sorter), method, sorter)
        by_epoch.set_title(cell_label(settings, reference(settings, name)) + ": what might help" * remedies)
        by_epoch.set(xlabel="epoch", ylabel="full train loss")
        by_bytes.set(xlabel="bytes that a worker has sent", xscale="log")
        plots.whole_numbers(by_epoch.xaxis, 6)
    repeats = {settings.models[settings.cells[name].model].label: seeds_of(settings, name) for name in chosen}
    fewer = ", ".join(f"{seeds} of {label}" for label, seeds in repeats.items() if seeds < study.seeds)
    note = f"means over seeds that have not diverged{f' ({fewer})' * bool(fewer)}, from the first epoch on"
    title = f"Training with {density:g} of the gradient, against epochs and against bytes"
    return plots.finish(figure, title, f"{note} · {study.caption()}", entry=2.6)


@plots.styled
def orders(study: Study) -> Figure:
    """What CD-GraB's orders gain, dense and with ExDyna at every density: a panel for every model and worker count."""
    settings, losses = study.settings, ends(study.table, study.settings)
    bases = {base: alike for base, alike in _by_density(settings).items() if ordered(settings, base)}
    figure, axes = plots.panels(1, max(1, len(bases)), 15, 3.6, [cell_label(settings, base) for base in bases])
    for panel, (base, alike) in zip(axes[0], bases.items(), strict=False):
        for place, name in enumerate(alike):
            gain = Losses(losses, name, base).gain(DENSE if name == base else OURS)
            value, style = estimate(gain), {"color": OWN_COLOURS[DENSE if name == base else OURS]}
            label = "dense" if name == base else "ExDyna"
            panel.plot([place + 0.14] * len(gain), gain, ".", ms=4, alpha=0.45, **style)
            panel.errorbar(place, value.mean, [[value.mean - value.low], [value.high - value.mean]], fmt="o", ms=6,
                           capsize=4, label=label, **style)  # fmt: skip
        panel.axhline(0, color="0.6", lw=0.8)
        ticks = [f"{settings.cells[name].density:g}" if name != base else "dense" for name in alike]
        panel.set_xticks(range(len(alike)), ticks)
        panel.set(xlabel="density", xlim=(-0.5, len(alike) - 0.5))
    axes[0][0].set_ylabel("gain of CD-GraB's orders\nin % of D-RR's train loss")
    seeds = {settings.models[settings.cells[name].model].label: looks_at_orders(settings, name)[-1] for name in bases}
    most = max(seeds.values(), default=study.seeds)
    fewer = ", ".join(f"{count} of {label}" for label, count in seeds.items() if count < most)
    note = f"means, 95 % intervals (one by one, not adjusted) and every seed{f' ({fewer})' * bool(fewer)}"
    title = "Does CD-GraB's gain survive sparse gradients?"
    return plots.finish(figure, title, f"{note} · {study.caption(most)}")


def _by_density(settings: DictConfig) -> dict[str, list[str]]:
    """By the cell that they are compared with: the cells of a model with so many workers, whole gradients first."""
    found: dict[str, list[str]] = {}
    for name in sorted(cells(settings), key=lambda name: -settings.cells[name].get("density", 1)):
        found.setdefault(reference(settings, name), []).append(name)
    return {base: found[base] for base in cells(settings) if base in found}


def _belongs(method: str, sorter: str, helped: bool) -> bool:
    """Into a column of methods, or of what might help; what is helped is in both."""
    if sorter == BASELINE and method in (DENSE, OURS, TOPK):
        return True
    return helped == _helps(method)


def _helps(method: str) -> bool:
    return bool(HELP & options_of(method)[1].keys())


def _draw(by_epoch: Axes, by_bytes: Axes, rows: DataFrame, method: str, sorter: str) -> None:
    means = rows[rows["epoch"] > 0].groupby("epoch")[[LOSS, "sent"]].mean()
    by_epoch.plot(means.index, means[LOSS], **_line(method, sorter))
    by_bytes.plot(means["sent"], means[LOSS], **_line(method, sorter))


def _line(method: str, sorter: str) -> dict:
    """Its colour is that of the method, its dashes are those of its options; dots: CD-GraB's orders."""
    kind, options = options_of(method)
    dashes = tuple(length for option in options for length in DASHES.get(option, ()))
    style = {"color": OWN_COLOURS.get(method, OWN_COLOURS[kind]), "ls": (0, dashes) if dashes else "-", "lw": 1.3}
    style |= {"marker": "o", "ms": 2.6} if sorter != BASELINE else {}
    if kind == "topk" and "momentum_correction" in options:
        return style | {"label": "Deep Gradient Compression"}
    return style | {"label": method_label(method) + f", {sorter_label(sorter)}" * (sorter != BASELINE)}


@text.table
def summary_table(table: DataFrame, settings: DictConfig) -> Iterator[dict[str, str]]:
    """In random orders: losses as multiples of the dense one, and what is sent for them, by density."""
    table = compared(table, settings)
    losses = ends(table, settings)
    for base, alike in _by_density(settings).items():
        in_order = sorted(alike, key=cells(settings).index)
        for method in dict.fromkeys(method for name in in_order for method, _ in runs(settings, name)):
            row = {"": cell_label(settings, base), "method": _line(method, BASELINE)["label"]} | _columns(settings)
            for name in (name for name in alike if (method, BASELINE) in runs(settings, name)):
                row[_column(settings, name)] = _end(table, losses, name, method, base)
            yield row


def _end(table: DataFrame, losses: Series, name: str, method: str, base: str) -> str:
    """1.45 [1.41, 1.49], 169 MB"""
    ratio = losses.loc[(name, method, BASELINE)] / losses.loc[(base, DENSE, BASELINE)]
    sent = select(table, cell=name, method=method, sorter=BASELINE).groupby("seed")["sent"].max().mean() / 1e6
    return f"{estimate(ratio)}, {sent:,.0f} MB"


@text.table
def order_table(study: Study) -> Iterator[dict[str, str]]:
    """What CD-GraB's orders gain, with the verdicts."""
    settings, losses, answers = study.settings, ends(study.table, study.settings), _answers(study)
    for base, alike in _by_density(settings).items():
        if ordered(settings, base):
            row = {"": cell_label(settings, base), "seeds": str(looks_at_orders(settings, base)[-1])} | _columns(
                settings
            )
            for name in alike:
                method = DENSE if name == base else OURS
                gain, claim = Losses(losses, name, base).gain(method), gains_claim(cell_label(settings, name), method)
                row[_column(settings, name)] = f"{estimate(gain)} %, {answers[claim]}"
            yield row


@text.table
def density_table(study: Study) -> Iterator[dict[str, str]]:
    """How far off the density is over a whole training, and how uneven the workers' loads are, with the verdicts."""
    settings, answers = study.settings, _answers(study)
    table = compared(study.table, settings)
    table = table[table["epoch"] > 0]
    for base, alike in _by_density(settings).items():
        for method in (OURS, PUBLISHED):
            row = {"": cell_label(settings, base), "method": method_label(method)} | _columns(settings, whole=False)
            there = [name for name in alike if name != base and (method, BASELINE) in runs(settings, name)]
            for name in there:
                rows = select(table, cell=name, method=method, sorter=BASELINE)
                error = 100 * (rows["density"] / settings.cells[name].density - 1).abs().mean()
                where = f"{cell_label(settings, name)}, {method_label(method)}"
                even = f"imbalance {rows['imbalance'].mean():.3g}, {answers[f'{where}: {IMBALANCE}']}"
                row[_column(settings, name)] = f"{error:.2g} %, {answers[f'{where}: {DENSITY_ERROR}']}; {even}"
            if there:
                yield row


@text.table
def remedy_table(study: Study) -> Iterator[dict[str, str]]:
    """ExDyna's loss over the dense one, without momentum and at half the rate, where all of that was tried."""
    settings, answers = study.settings, _answers(study)
    losses = ends(compared(study.table, settings), settings)
    sparse, dense = (
        {(method + remedy[which], BASELINE) for remedy in REMEDIES} for which, method in enumerate((OURS, DENSE))
    )
    for base, alike in _by_density(settings).items():
        tried = [name for name in alike if sparse <= {*runs(settings, name)} and dense <= {*runs(settings, base)}]
        for own, beside, claim in REMEDIES if tried else ():
            row = {"": cell_label(settings, base), "method": method_label(OURS + own)}
            row |= {"compared with": method_label(DENSE + beside)} | _columns(settings, whole=False)
            for name in tried:
                both = Losses(losses, name, base)
                answer = f", {answers[f'{cell_label(settings, name)}: {claim}']}" if claim else ""
                row[_column(settings, name)] = f"{estimate(both(OURS + own) / both(DENSE + beside))}{answer}"
            yield row


def _answers(study: Study) -> dict[str, str]:
    return {verdict.claim: verdict.answer for verdict in verdicts(study)}


def _columns(settings: DictConfig, whole: bool = True) -> dict[str, str]:
    """Empty ones, as the densities fall."""
    falling = sorted(cells(settings), key=lambda name: -settings.cells[name].get("density", 1))
    return {_column(settings, name): "" for name in falling if whole or "density" in settings.cells[name]}


def _column(settings: DictConfig, name: str) -> str:
    return f"density {settings.cells[name].density:g}" if "density" in settings.cells[name] else "whole gradients"


@text.table
def end_table(table: DataFrame, settings: DictConfig) -> Iterator[dict[str, str]]:
    """Where every run ended, and what it sent."""
    table = compared(table, settings)
    losses, last = ends(table, settings), ends(table, settings, last=True)
    for name in cells(settings):
        base = reference(settings, name), DENSE, BASELINE
        dense, dense_last = losses.loc[base], last.loc[base]
        for method, sorter in runs(settings, name):
            rows, own = select(table, cell=name, method=method, sorter=sorter), losses.loc[(name, method, sorter)]
            row = {"cell": cell_label(settings, name), "method": method_label(method), "orders": sorter_label(sorter)}
            row |= {"train loss": str(estimate(own)), "/ dense": str(estimate(own / dense))}
            row["last epoch, / dense"] = str(estimate(last.loc[(name, method, sorter)] / dense_last))
            row["MB sent"] = f"{rows.groupby('seed')['sent'].max().mean() / 1e6:.4g}"
            row["actual density"] = "1" if rows["density"].isna().all() else f"{rows['density'].mean():.4g}"
            yield row | {"diverged": str(int(own.isna().sum()))}
