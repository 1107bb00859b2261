"""All sorters by name."""

from __future__ import annotations

import inspect

from ..errors import CdgrabError
from .balancing import CoordinatedPairBalance, KernelHalving, MeanBalance, PairBalance
from .base import Sorter
from .oblivious import DistributedRandomReshuffling, FlipFlop, Riffle, ShuffleOnce

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


def sorter_options(name: str) -> set[str]:
    """Option names that the sorter takes beyond workers, units, dim, seed and group."""
    options: set[str] = set()
    for cls in _class(name).__mro__[:-1]:
        parameters = inspect.signature(cls.__init__).parameters.values()
        options |= {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return options - {"workers", "units", "dim", "seed", "group"}


def make_sorter(name: str, *, workers: int, units: int, dim: int, seed: int = 0, group=None, **options) -> Sorter:
    """A sorter by name. Without a `group` (see `cdgrab.workers`) this process hosts all workers.

    Options: `initial` (random | identity) for all; `shared` for d_rr; `rule` (greedy | walk) and `walk_width` for the
    balancing sorters; `exchange_mb` for cd_grab; `epochs`, `delta` for kh.
    """
    unknown = set(options) - sorter_options(name)
    if unknown:
        known = ", ".join(sorted(sorter_options(name)))
        raise CdgrabError(f"sorter {name} has no option {', '.join(sorted(unknown))}; it takes {known}")
    return _class(name)(workers=workers, units=units, dim=dim, seed=seed, group=group, **options)


def _class(name: str) -> type[Sorter]:
    if name not in SORTERS:
        raise CdgrabError(f"unknown sorter {name!r}; the sorters are {', '.join(SORTERS)}")
    return SORTERS[name]
