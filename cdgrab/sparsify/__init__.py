"""Sparsifiers by name, and a hook for DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

from torch import nn

from cdgrab.checks import look_up, refuse_unknown_options
from cdgrab.errors import CdgrabError
from cdgrab.runtime.agreement import refuse_different_ranks
from cdgrab.runtime.connection import one_worker_per_process
from cdgrab.runtime.ddp import BucketHook, common_dtype
from cdgrab.runtime.group import WorkerGroup
from cdgrab.sparsify.averager import SparseAverager as SparseAverager
from cdgrab.sparsify.base import Sparsifier as Sparsifier
from cdgrab.sparsify.compressor import Compressor, Stats
from cdgrab.sparsify.deft import DEFT
from cdgrab.sparsify.exdyna import ExDyna, MiCRO
from cdgrab.sparsify.peers import HalfPrecision, PowerSGD
from cdgrab.sparsify.sidco import SIDCo
from cdgrab.sparsify.simple import CyclicLocalTopK, Dense, HardThreshold, TopK

SPARSIFIERS: dict[str, type[Compressor]] = {
    "dense": Dense,
    "topk": TopK,
    "cltk": CyclicLocalTopK,
    "hard_threshold": HardThreshold,
    "sidco": SIDCo,
    "deft": DEFT,
    "micro": MiCRO,
    "exdyna": ExDyna,
    "fp16": HalfPrecision,
    "powersgd": PowerSGD,
}


def sparsifier_options(name: str) -> tuple[str, ...]:
    """The names of the sparsifier's options beyond workers, dim, density and group."""
    return look_up("sparsifier", name, SPARSIFIERS).options


def make_sparsifier(
    name: str, *, workers: int, dim: int, density: float = 0.01, group: WorkerGroup | None = None, **options
) -> Compressor:
    """A sparsifier by name. Without a `group` (see `cdgrab.runtime.group`) this process hosts all workers.

    Options: `error_feedback` (true | false) for all but dense and fp16; `momentum_correction` (0 is off; 0.9 is usual),
    `momentum_masking` (true | false), `warm_up_steps` (0 is off) and `warm_up_density` for all with a density; `value`
    for hard_threshold; `layers` for deft; `threshold` (counted | proportional | paper | fixed) for micro and exdyna;
    `rule` (balanced | paper | relative | static), `blocks` and `faithful` (to the published code) for exdyna; `rank`
    and `shapes` for powersgd.
    """
    refuse_unknown_options("sparsifier", name, options, sparsifier_options(name))
    return SPARSIFIERS[name](workers=workers, dim=dim, density=density, group=group, **options)


def sparsifier_of(parameters: Sequence[nn.Parameter], name: str, group: WorkerGroup, **options) -> Compressor:
    """A sparsifier for the gradient of these parameters, with one worker per process."""
    shapes = [list(parameter.shape) for parameter in parameters]
    options = known_of_a_model(name, shapes) | options
    return make_sparsifier(name, workers=group.workers, dim=sum(map(prod, shapes)), group=group, **options)


def known_of_a_model(name: str, shapes: Sequence[Sequence[int]]) -> dict[str, list]:
    """Options that follow from the shapes of a model's parameters: the layers of deft, the matrices of powersgd."""
    known = {"layers": [prod(shape) for shape in shapes], "shapes": [list(shape) for shape in shapes]}
    return {option: value for option, value in known.items() if option in sparsifier_options(name)}


class Hook(BucketHook):
    """Averages the gradients of a DistributedDataParallel model with a sparsifier; see `ddp_hook`.

    Thresholds and partitions only make sense for the whole gradient, so it waits for the last bucket. Residuals belong
    to coordinates of that vector, so DDP may regroup its buckets.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], sparsifier: Compressor) -> None:
        super().__init__(parameters, partial(sparsifier.reduce_parts, dtype=common_dtype(parameters)), sparsifier)
        self.sparsifier = sparsifier
        self.state_dict, self.load_state_dict = sparsifier.state_dict, sparsifier.load_state_dict

    @property
    def stats(self) -> Stats:
        """Statistics of the last backward pass that was not under `no_sync`."""
        return self.sparsifier.stats


def ddp_hook(model: nn.Module, name: str, *, density: float = 0.01, **options) -> Hook:
    """Let a DistributedDataParallel `model` average its gradients with the sparsifier of this name.

    Returns the hook, whose `stats`, `state_dict` and `load_state_dict` are those of its sparsifier. Residuals differ
    from rank to rank: every rank saves its own. For deft, the model's parameters are the layers.

    If a gradient is not finite on some rank, the backward pass fails on all ranks with a NotFiniteError: `.grad` is
    NaN, the residuals are unchanged, and training may continue after `zero_grad()`.
    """
    if not callable(getattr(model, "register_comm_hook", None)):
        raise CdgrabError(f"ddp_hook needs a DistributedDataParallel model, got {type(model).__name__}")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    group = one_worker_per_process(model.process_group)
    settings = {"name": name, "density": density, "options": sorted(options.items())}
    refuse_different_ranks(group, settings, "the same hook", parameters[0].device if parameters else "cpu")
    hook = Hook(parameters, sparsifier_of(parameters, name, group, density=density, **options))
    hook.register(model)
    return hook
