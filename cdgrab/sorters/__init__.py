"""All sorters by name."""

from __future__ import annotations

from cdgrab.checks import look_up, refuse_unknown_options
from cdgrab.sorters.balancing import KernelHalving, MeanBalance, PairBalance
from cdgrab.sorters.base import Sorter
from cdgrab.sorters.coordinated import CoordinatedPairBalance
from cdgrab.sorters.oblivious import DistributedRandomReshuffling, FlipFlop, Riffle, ShuffleOnce

# GraB is ID-GraB with one worker; with more it runs in every worker on its own, which is what ID-GraB means.
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


def sorter_options(name: str) -> tuple[str, ...]:
    """Option names that the sorter takes beyond workers, units, dim, seed and group."""
    return look_up("sorter", name, SORTERS).options


def make_sorter(name: str, *, workers: int, units: int, dim: int, seed: int = 0, group=None, **options) -> Sorter:
    """A sorter by name. Without a `group` (see `cdgrab.runtime.group`) this process hosts all workers.

    Options: `initial` (random | identity) for those that keep an order; `shared` for d_rr; `rule` (greedy | walk) and
    `walk_width` for the balancing sorters; `epochs`, `delta` for kh; for all that look at gradients `sketch` (none |
    gaussian | countsketch) and `sketch_size`, and where signs are decided: `background` (auto | true | false) and how
    much may wait for it on a CPU, `buffer_mb`; on a GPU blocks of up to 64 MiB are decided at once.
    """
    refuse_unknown_options("sorter", name, options, sorter_options(name))
    return SORTERS[name](workers=workers, units=units, dim=dim, seed=seed, group=group, **options)
