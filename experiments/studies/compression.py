"""Training to an end with compressed gradients: what it loses and what it sends, and what helps.

A cell is a model with so many workers and one density; or without a density, for what has none (dense training, fp16,
PowerSGD) and for what the others are compared with. Losses are means over the last half of the epochs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from omegaconf import DictConfig, OmegaConf

from cdgrab.errors import CdgrabError
from cdgrab.sparsify.compressor import summed_bytes
from experiments.report.kinds import DataFrame, Series
from experiments.report.names import BASELINE, LOSS
from experiments.report.names import OURS as BALANCED
from experiments.report.statistics import SAME_LOSS, estimate, looking
from experiments.studies import sparsifiers
from experiments.studies.changes import methods_name
from experiments.studies.parts import Part, trained
from experiments.studies.sparsifiers import (
    CLOSE,
    DENSE,
    FORGETFUL,
    OURS,
    PUBLISHED,
    SAME_DENSITY,
    TOPK,
    by_epoch,
    method_label,
    options_of,
)
from experiments.studies.training import overrides
from experiments.studies.verdicts import Verdict, judge, keeps, looks_at, repeated, select
from experiments.training.config import flatten

CORRECTED, WARMED = "exdyna,momentum_correction=0.9", "exdyna,warm_up=true"
BOTH = "exdyna,momentum_correction=0.9,warm_up=true"
DGC = "topk,momentum_correction=0.9,warm_up=true"  # Deep Gradient Compression
UNMASKED = "exdyna,momentum_correction=0.9,momentum_masking=false"
CALM, SLOW = ",momentum=0", ",rate=0.5"  # a method without any momentum; with half the rate
OF_CELLS = ("label", "task", "seeds", "warm_up_steps", "ordered")  # settings of a model that its runs do not have
NEAR = 1.05  # times the dense loss
EVEN = 0.2  # imbalance of the workers' loads
SAME = 1.0  # per cent of a loss
FALLEN = 0.5  # of the untrained model's loss: training that ends higher has hardly begun
FLOAT = 4  # bytes
DENSITY_ERROR, IMBALANCE = (
    "relative error of an epoch's mean density, mean over the epochs",
    "imbalance, mean over the epochs",
)


def parts(settings: DictConfig) -> Iterator[Part]:
    """Cell by cell, the most valuable first, so that whoever stops early has whole ones."""
    for name in cells(settings):
        for seed in range(looks_at_orders(settings, name)[-1]):
            for method, sorter in runs(settings, name):
                if seed >= seeds_of(settings, name) and method not in ordered(settings, name):
                    continue
                key = {"cell": name, "method": method, "sorter": sorter, "seed": seed}
                yield trained(key, run_of(settings, name, method, sorter), seed, with_bytes)


def cells(settings: DictConfig) -> list[str]:
    """Those whose data is there. Each needs the one that it is compared with."""
    found = [name for name, own in settings.cells.items() if settings.models[own.model].task in settings.tasks]
    for name in found:
        if reference(settings, name) not in found:
            own = settings.cells[name]
            raise CdgrabError(f"cell {name} needs one without density: of {own.model} with {own.workers} workers")
    return found


def reference(settings: DictConfig, name: str) -> str | None:
    """The cell of the same model and workers that has no density."""
    own = settings.cells[name]
    alike = (other for other, its in settings.cells.items() if (its.model, its.workers) == (own.model, own.workers))
    return next((other for other in alike if "density" not in settings.cells[other]), None)


def runs(settings: DictConfig, name: str) -> Iterator[tuple[str, str]]:
    """Methods and sorters of a cell: all methods in random orders, some in CD-GraB's, too."""
    for method in methods(settings, name):
        yield method, BASELINE
        if method in ordered(settings, name):
            yield method, BALANCED


def methods(settings: DictConfig, name: str) -> list[str]:
    return list(settings[methods_name(settings.cells[name])])


def ordered(settings: DictConfig, name: str) -> list[str]:
    """The methods that have CD-GraB's orders, too."""
    return list(settings.ordered) if settings.models[settings.cells[name].model].get("ordered", True) else []


def run_of(settings: DictConfig, name: str, method: str, sorter: str) -> list[str]:
    """A run's overrides. Momentum that workers keep themselves is not the optimiser's, and neither weight decay nor
    clipping sees it: both are scaled to what they are in the long run with momentum. Without any, the rate is."""
    own = settings.cells[name]
    model = flatten(OmegaConf.to_container(settings.models[own.model]))
    changes = {key: value for key, value in model.items() if key not in OF_CELLS} | {"momentum": settings.momentum}
    (kind, options), longer = options_of(method), 1 / (1 - settings.momentum)
    if "momentum_correction" in options:
        changes["momentum"] = 0
        changes |= {key: longer * changes[key] for key in ("weight_decay", "clip") if changes.get(key)}
    if options.pop("momentum", None) == 0:
        changes |= {"momentum": 0, "lr": longer * changes["lr"]}
    changes["lr"] *= options.pop("rate", 1)
    if options.pop("warm_up", False):
        options["warm_up_steps"] = model["warm_up_steps"]
    chosen = ",".join([kind, *(f"{key}={value}" for key, value in options.items())])
    run = overrides(settings, model["task"], sorter, workers=own.workers, **changes)
    return [*sparsifiers.sparsified(run, chosen, own.get("density")), f"replicas={settings.replicas[own.model]}"]


def with_bytes(epochs: list[dict]) -> dict[str, list]:
    """The metrics by epoch, and `sent`: the bytes that a worker has sent so far."""

    def in_one(line: dict) -> float:
        dense = summed_bytes(line["workers"], FLOAT * line["parameters"])
        return line["steps_per_epoch"] * line.get("sparsifier", {}).get("bytes", dense)

    return by_epoch(epochs) | {"sent": list(accumulate(map(in_one, epochs[1:]), initial=0.0))}


def seeds_of(settings: DictConfig, name: str) -> int:
    return _looks(settings, name)[-1]


def looks_at_orders(settings: DictConfig, name: str) -> list[int]:
    """After how many seeds the claims about orders are judged: methods that have CD-GraB's orders, too, may be given
    more seeds than the others. Whoever wants few seeds of anything has few of these."""
    usual = _looks(settings, name)
    if not ordered(settings, name):
        return usual
    return looks_at(settings, {"seeds": settings.get("order_seeds", {}).get(settings.cells[name].model, usual)})


def compared(table: DataFrame, settings: DictConfig) -> DataFrame:
    """The results on the seeds that all methods of a cell have."""
    return table[table["seed"] < table["cell"].map({name: seeds_of(settings, name) for name in settings.cells})]


def _looks(settings: DictConfig, name: str) -> list[int]:
    """After how many seeds the claims of a cell are judged: its model may have a number of its own."""
    return looks_at(settings, settings.models[settings.cells[name].model])


# -- what it says -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Losses:
    """Of a sparse cell and of the cell that it is compared with; by seed."""

    table: Series  # by cell, method, sorter, seed
    cell: str
    reference: str

    def __call__(self, method: str, sorter: str = BASELINE) -> Series:
        cell = self.reference if options_of(method)[0] == DENSE else self.cell
        return self.table.loc[(cell, method, sorter)]

    def excess(self, method: str) -> Series:
        """In per cent of the dense loss."""
        return 100 * (self(method) - self(DENSE)) / self(DENSE).mean()

    def gain(self, method: str) -> Series:
        """Of CD-GraB's orders, in per cent of D-RR's loss."""
        return 100 * (self(method, BASELINE) - self(method, BALANCED)) / self(method, BASELINE).mean()


def ends(table: DataFrame, settings: DictConfig, last: bool = False) -> Series:
    """Means over the last half of the epochs, or those of the last one: by cell, method, sorter and seed; NaN for runs
    that diverged."""
    epochs = table["cell"].map({name: settings.models[own.model].epochs for name, own in settings.cells.items()})
    counted = table[table["epoch"] == epochs] if last else table[2 * table["epoch"] > epochs]
    by = ["cell", "method", "sorter", "seed"]
    complete = table.groupby(by)["epoch"].max() == table.assign(epochs=epochs).groupby(by)["epochs"].max()
    return counted.groupby(by)[LOSS].mean().reindex(complete.index).where(complete)


def verdicts(table: DataFrame, settings: DictConfig) -> Iterator[Verdict]:
    by_seed, table = ends(table, settings), compared(table, settings)
    losses = ends(table, settings)
    for name in cells(settings):
        judged = _sparse_cell if "density" in settings.cells[name] else _reference_cell
        with looking(len(_looks(settings, name))):
            found = list(judged(table, settings, Losses(losses, name, reference(settings, name))))
        yield from (repeated(verdict, seeds_of(settings, name)) for verdict in found)
        looks = looks_at_orders(settings, name)
        with looking(len(looks)):
            found = list(_orders(settings, Losses(by_seed, name, reference(settings, name))))
        yield from (repeated(verdict, looks[-1]) for verdict in found)


def cell_label(settings: DictConfig, name: str) -> str:
    """LeNet-CIFAR-10, 8 workers, density 0.01"""
    own = settings.cells[name]
    density = f", density {own.density:g}" if "density" in own else ""
    return f"{settings.models[own.model].label}, {own.workers} workers{density}"


def _reference_cell(table: DataFrame, settings: DictConfig, losses: Losses) -> Iterator[Verdict]:
    where = cell_label(settings, losses.cell)
    first = table[(table["cell"] == losses.cell) & (table["epoch"] == 0) & (table["method"] == DENSE)]
    first = first[first["sorter"] == BASELINE].set_index("seed")[LOSS]
    words = f"{where}: dense training has learnt, last loss / first"
    yield judge(words, losses(DENSE) / first, most=FALLEN)
    for method in (method for method in methods(settings, losses.cell) if options_of(method)[0] != DENSE):
        yield _near(where, losses, method)


def _sparse_cell(table: DataFrame, settings: DictConfig, losses: Losses) -> Iterator[Verdict]:
    where, there = cell_label(settings, losses.cell), set(methods(settings, losses.cell))
    for method in (method for method in (OURS, PUBLISHED, BOTH, OURS + CALM) if method in there):
        yield _near(where, losses, method)
    pairs = [(OURS, other) for other in (TOPK, "deft", "micro", PUBLISHED, FORGETFUL)]
    pairs += [(helped, OURS) for helped in (CORRECTED, UNMASKED, WARMED, BOTH, OURS + CALM)] + [(DGC, TOPK)]
    for method, other in (pair for pair in pairs if there.issuperset(pair)):
        gain = 100 * (losses(other) - losses(method)) / losses(other).mean()
        words = f"{where}: {method_label(method)} ends lower than {method_label(other)}"
        unless = _unmatched(table, settings, losses.cell, method, other)
        yield judge(words, gain, "gain in % of the loss", unless, least=0.0, margin=SAME)
    yield from _cause(where, there, losses)
    for method in (method for method in (OURS, PUBLISHED) if method in there):
        yield from _selected(where, select(table, cell=losses.cell, method=method, sorter=BASELINE), method, settings)
    alike = methods(settings, losses.reference)
    for changed, how in ((CALM, "both without momentum"), (CALM + SLOW, "both without momentum and at half the rate")):
        if OURS + changed in there and DENSE + changed in alike:
            words = f"{where}: train loss with ExDyna / dense, {how}"
            yield judge(words, losses(OURS + changed) / losses(DENSE + changed), most=NEAR)
    if OURS + CALM + SLOW in there and DENSE + SLOW in alike:
        words = f"{where}: train loss with ExDyna, no momentum / dense, both at half the rate"
        yield judge(words, losses(OURS + CALM + SLOW) / losses(DENSE + SLOW), most=NEAR)


def _unmatched(table: DataFrame, settings: DictConfig, cell: str, *methods: str) -> str:
    """Why their losses cannot be compared; empty if they can: in the last half of the epochs their densities agree."""
    rows = select(table, cell=cell, sorter=BASELINE)
    rows = rows[2 * rows["epoch"] > settings.models[settings.cells[cell].model].epochs]
    first, second = (select(rows, method=method)["density"].mean() for method in methods)
    alike = max(first, second) <= (1 + SAME_DENSITY) * min(first, second)
    return "" if alike else f"at other densities: {first:.3g} and {second:.3g}"


def _near(where: str, losses: Losses, method: str) -> Verdict:
    words = f"{where}: train loss with {method_label(method)} / dense"
    return judge(words, losses(method) / losses(DENSE), most=NEAR)


def _cause(where: str, there: set[str], losses: Losses) -> Iterator[Verdict]:
    """What is left of what ExDyna loses, where workers keep their own momentum, where there is none, and with smaller
    steps? If momentum on late values is to blame, little of it is left without momentum."""
    excess = losses.excess(OURS)
    unless = "" if estimate(excess).low > 0 else "ExDyna is not shown to end higher than dense"
    remedies = {
        CORRECTED: "momentum correction",
        UNMASKED: "momentum correction that is not masked",
        OURS + CALM: "training without momentum",
        OURS + SLOW: "half the rate",
    }
    for method, remedy in remedies.items():
        if method in there:
            left = losses.excess(method)
            note = f"{left.mean():.3g} − {excess.mean():.3g} / 2, excess in % of the dense loss"
            words = f"{where}: {remedy} leaves at most half of what ExDyna loses against dense training"
            yield judge(words, left - excess / 2, note, unless, most=0.0)


def _selected(where: str, rows: DataFrame, method: str, settings: DictConfig) -> Iterator[Verdict]:
    """How well the density is held, and how even the workers' loads are: means over the epochs, by seed."""
    rows = rows[rows["epoch"] > 0]
    density = settings.cells[rows["cell"].iloc[0]].density
    error = (rows["density"] / density - 1).abs().groupby(rows["seed"]).mean()
    words = f"{where}, {method_label(method)}"
    yield judge(f"{words}: {DENSITY_ERROR}", error, most=CLOSE)
    yield judge(f"{words}: {IMBALANCE}", rows.groupby("seed")["imbalance"].mean(), most=EVEN)


def _orders(settings: DictConfig, losses: Losses) -> Iterator[Verdict]:
    """Whether CD-GraB's orders gain anything in a cell, and whether sparse gradients leave it what it gains without."""
    where, with_orders = cell_label(settings, losses.cell), ordered(settings, losses.cell)
    of, note = "gain in % of D-RR's loss", "in dense training no gain is shown"
    method = DENSE if losses.cell == losses.reference else OURS
    if method in with_orders:
        yield judge(gains_claim(where, method), losses.gain(method), of, least=0.0, margin=SAME_LOSS)
    if method == OURS and {OURS, DENSE} <= set(with_orders):
        words = f"{where}: four fifths of CD-GraB's gain are left with ExDyna"
        yield keeps(words, losses.gain(OURS), losses.gain(DENSE), note)


def gains_claim(where: str, method: str) -> str:
    return f"{where}: CD-GraB ends lower than D-RR, {'dense' if method == DENSE else 'with ExDyna'}"
