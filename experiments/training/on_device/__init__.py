"""Sparsifiers of runs that train together, without a question to the device: a step can be captured as a CUDA graph.

On a GPU the sparsifiers of `cdgrab.sparsify` wait for it several times in a step, which is right where every worker has
its own; a study that hosts all workers of many small runs would do nothing but wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from cdgrab.sparsify import SparseAverager
from cdgrab.sparsify.compressor import UNSAID, Compressor
from cdgrab.sparsify.deft import DEFT
from cdgrab.sparsify.exdyna import ExDyna, MiCRO
from cdgrab.sparsify.peers import HalfPrecision, PowerSGD
from cdgrab.sparsify.simple import TopK
from experiments.training.compiled import side_by_side
from experiments.training.on_device.base import Kind
from experiments.training.on_device.exdyna import RULES, THRESHOLDS, ExDynas
from experiments.training.on_device.peers import Defts, TopKs
from experiments.training.on_device.whole import Halves, PowerSgds

KINDS: dict[type[Compressor], type[Kind]] = {
    ExDyna: ExDynas,
    MiCRO: ExDynas,
    TopK: TopKs,
    DEFT: Defts,
    HalfPrecision: Halves,
    PowerSGD: PowerSgds,
}
MAY_DIFFER = ("error_feedback", *UNSAID)


def supported(averagers: Sequence[SparseAverager], dtype: torch.dtype, device: torch.device) -> bool:
    if dtype != torch.float32 or (device.type != "cpu" and not find_spec("triton")):
        return False
    each = [averager.sparsifier for averager in averagers]
    return all(known(type(one), vars(one)) and one.dim >= one.workers for one in each)


def known(sparsifier: type[Compressor], options: Mapping[str, object]) -> bool:
    """Whether one with these options is of a kind that is here."""
    if KINDS.get(sparsifier) is not ExDynas:
        return sparsifier in KINDS
    rule, threshold = options.get("rule", "static"), options["threshold"]  # MiCRO has no other rule
    return rule in RULES and threshold in THRESHOLDS and not options.get("faithful")


class OnDevice:
    """Averages like `experiments.training.steps.SparseMeans`; `collect` hands the statistics to the runs' averagers.
    What else the runs' own sparsifiers know stays what it is: such runs cannot be saved."""

    asks = False  # nothing of the device, during a step

    def __init__(self, averagers: Sequence[SparseAverager], device: torch.device) -> None:
        self._averagers = averagers
        together: dict[str, list[int]] = {}
        for number, averager in enumerate(averagers):
            together.setdefault(_likeness(averager.sparsifier), []).append(number)
        self._rows = [torch.tensor(rows, device=device) for rows in together.values()]
        self._places = torch.cat(self._rows).argsort()  # of the runs, if their kinds come one after the other
        self._kinds = [
            KINDS[type(averagers[rows[0]].sparsifier)]([averagers[row].sparsifier for row in rows], device)
            for rows in together.values()
        ]

    def tensors(self) -> list[Tensor]:
        """All that a step changes, in place."""
        return [tensor for kind in self._kinds for tensor in kind.tensors()]

    def average(self, worker_means: Tensor, want_shard: bool = False) -> tuple[Tensor, None]:
        """The updates [..., dim] from the workers' mean gradients [..., workers, dim]; NaN for a run whose gradients
        are not finite, which ends it. There is no shard."""
        means = worker_means.view(-1, *worker_means.shape[-2:])
        ways = list(zip(self._kinds, self._rows, strict=True))
        found = side_by_side([partial(kind.average, means, rows) for kind, rows in ways], means.device)
        updates = torch.cat(found).index_select(0, self._places)
        return updates.view(*worker_means.shape[:-2], -1), None

    def collect(self) -> None:
        """Waits for the device."""
        for rows, kind in zip(self._rows, self._kinds, strict=True):
            steps, sums = int(kind.iteration), kind.sums.tolist()
            for row, its in zip(rows.tolist(), sums, strict=True):
                self._averagers[row].add(steps, its)
            kind.sums.zero_()


def _likeness(sparsifier: Compressor) -> str:
    """Of those that are computed together."""
    settings = {name: getattr(sparsifier, name, None) for name in sparsifier.options if name not in MAY_DIFFER}
    if isinstance(sparsifier, ExDyna):
        settings["rule"], settings["blocks"] = sparsifier.rule, sparsifier.blocks
    return f"{type(sparsifier).__name__} {settings}"
