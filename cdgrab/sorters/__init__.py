"""All sorters by name."""

from __future__ import annotations

from cdgrab.checks import look_up, refuse_unknown_options
from cdgrab.runtime.group import WorkerGroup
from cdgrab.sorters.balancing import KernelHalving, MeanBalance, PairBalance
from cdgrab.sorters.base import Sorter
from cdgrab.sorters.coordinated import CoordinatedPairBalance
from cdgrab.sorters.oblivious import DistributedRandomReshuffling, FlipFlop, Riffle, ShuffleOnce

# With one worker ID-GraB is GraB. With more, `grab` runs in every worker on its own, which is what ID-GraB means.
SORTERS: dict[str, type[Sorter]] = {
    "d_rr": DistributedRandomReshuffling,
    "shuffle_once": ShuffleOnce,
    "flip_flop": FlipFlop,
    "grab": MeanBalance,
    "grab_pair": PairBalance,
    "id_grab_bal": MeanBalance,
    "id_grab_pair": PairBalance,
    "cd_grab": CoordinatedPairBalance,
    "kh": KernelHalving,
    "riffle": Riffle,
}
LABELS = {name: cls.label for name, cls in SORTERS.items()} | {"grab": "GraB", "grab_pair": "GraB (PairBal)"}


def label(name: str) -> str:
    """The sorter's name in figures and tables; empty for one that is not known here."""
    return LABELS.get(name) or getattr(SORTERS.get(name), "label", "")


def sorter_options(name: str) -> tuple[str, ...]:
    """The names of the sorter's options beyond workers, units, dim, seed and group."""
    return look_up("sorter", name, SORTERS).options


def make_sorter(
    name: str, *, workers: int, units: int, dim: int, seed: int = 0, group: WorkerGroup | None = None, **options
) -> Sorter:
    """A sorter by name. Without a `group` (see `cdgrab.runtime.group`) this process hosts all workers.

    Options: `initial` (random | identity) for sorters that keep an order; `shared` for d_rr; `rule` (greedy | walk) and
    `walk_width` for the balancing sorters; `epochs`, `delta` for kh. For all that look at gradients: `sketch` (none |
    gaussian | countsketch) and `sketch_size`; `background` (auto | true | false): whether signs are decided beside the
    training; `buffer_mb`: how many rows may wait for that on a CPU (a GPU decides blocks of up to 64 MiB at once).
    """
    refuse_unknown_options("sorter", name, options, sorter_options(name))
    return SORTERS[name](workers=workers, units=units, dim=dim, seed=seed, group=group, **options)
