"""Situations in which the sampler cannot work. Each is refused in a sentence that says what to do instead."""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Sequence
from types import FrameType

import torch
from torch import nn
from torch.utils.data import IterableDataset, Sampler

from cdgrab.checks import differences
from cdgrab.errors import CdgrabError
from cdgrab.runtime.connection import one_worker_per_process
from cdgrab.runtime.group import WorkerGroup

REENTRANT = "activation checkpointing needs use_reentrant=False"
CYCLE = "itertools.cycle repeats the batches of one epoch: instead write a generator, `while True: yield from loader`"
ONCE = (
    "call backward once per batch (for several parts of one, make the sampler with a smaller batch_size and with "
    "accumulation_steps=…), and run other passes inside `with sampler.paused():`"
)
INSTEAD = (
    "prepare the model and the optimiser only, then call sampler.attach(model), and move batches to "
    "accelerator.device in the loop"
)
DIVIDED = f"accelerate's prepare(loader) would divide the batches a second time: {INSTEAD}"
WRAPPERS = {  # classes of accelerate
    "DataLoaderDispatcher": f"with dispatch_batches=True all processes would train with the share of one: {INSTEAD}",
    "SkipBatchSampler": "the sampler goes on by itself after load_state_dict: use no skip_first_batches, and "
    "ignore_data_skip=True with Trainer",
}


def refuse_dataset(dataset: object) -> None:
    """One without an order to choose, or a sampler: Lightning makes batch samplers anew, with one of its own in the
    place of the dataset."""
    if isinstance(dataset, Sampler):
        raise CdgrabError(
            f"this is a {type(dataset).__name__} in the place of the dataset: with Lightning give Trainer, or Fabric's "
            "setup_dataloaders, use_distributed_sampler=False"
        )
    try:
        examples = len(dataset)
    except TypeError:  # it has none
        examples = 0
    by_number = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")  # a DataLoader has neither
    if not examples or not by_number or isinstance(dataset, IterableDataset):  # which has __getitem__, that fails
        raise CdgrabError(
            "the dataset must have a length of at least 1, and examples by number: an iterable one has no order to "
            "choose (a list of its examples has)"
        )


def refuse_scaler(scaler: object) -> None:
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise CdgrabError(
            f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}: pass the one that it holds (in timm "
            "loss_scaler._scaler)"
        )


def refuse_gpu_only(group: WorkerGroup) -> None:
    """Signs and states are sent from CPU memory, which NCCL cannot do."""
    backends = group.backends()
    if backends and "cpu:" not in backends:
        raise CdgrabError(
            f"the processes are connected by {backends} only, and orders travel from the CPU too: call "
            'init_process_group() without a name, or with "cpu:gloo,cuda:nccl"'
        )


def refuse_other_processes(group: WorkerGroup, process_group: object) -> None:
    """DDP and the sampler must have the same processes."""
    theirs = one_worker_per_process(process_group)
    _refuse_other_processes(group, theirs.rank, theirs.world_size, "DDP")


def _refuse_other_processes(group: WorkerGroup, rank: int, processes: int, whose: str) -> None:
    if (rank, processes) != (group.rank, group.world_size):
        raise CdgrabError(
            f"this is process {group.rank} of {group.world_size} for the sampler and {rank} of {processes} for "
            f"{whose}: make the sampler after init_process_group, and with process_group=… if {whose} has one"
        )


def refuse_other_shards(group: WorkerGroup, parameters: Sequence[nn.Parameter]) -> None:
    """FSDP and the sampler must have the same processes, each with its own data."""
    for parameter in parameters:
        mesh, placements = parameter.device_mesh, parameter.placements
        if not placements[-1].is_shard() or not all(placement.is_replicate() for placement in placements[:-1]):
            raise CdgrabError(
                "parameters that are divided by tensor parallelism or by replicate are not supported: call fully_shard "
                "with a mesh of data-parallel processes only"
            )
        if mesh.size() == 1 < group.world_size:
            raise CdgrabError(
                "every process has all parameters, and its own data: call fully_shard with a mesh of all processes "
                "(Lightning: ModelParallelStrategy(data_parallel_size=…, tensor_parallel_size=1))"
            )
        _refuse_other_processes(group, mesh.mesh.flatten().tolist().index(mesh.get_rank()), mesh.size(), "FSDP")
        if mesh.size(mesh.ndim - 1) == 1 < mesh.size():
            raise CdgrabError("this mesh has whole replicas only: use DistributedDataParallel instead of fully_shard")


def refuse_replicas(parameters: Sequence[nn.Parameter]) -> None:
    """HSDP, for a sorter that balances everybody's gradients against each other."""
    if any(parameter.device_mesh.ndim > 1 for parameter in parameters):
        raise CdgrabError(
            "HSDP adds up the replicas' gradients before anybody can compare them: use a mesh of one dimension, or "
            "sketch='countsketch'"
        )


def refuse_kinds(model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise CdgrabError(
            "a model of torch.jit.script takes no hooks: attach the module that it was made from and train it"
        )
    if any(parameter.is_complex() for parameter in parameters):
        raise CdgrabError("complex parameters are not supported: keep them as real ones, and use torch.view_as_complex")


def refuse_kinds_of_ddp(model: nn.parallel.DistributedDataParallel, accumulation_steps: int) -> None:
    for name, module in model.module.named_modules():
        if getattr(module, "sparse", False) is True:
            raise CdgrabError(f"DDP does not pass on sparse gradients, which {name} produces; use sparse=False")
    if model.static_graph and accumulation_steps > 1:  # a defect of PyTorch's, to this day
        raise CdgrabError("DDP with static_graph=True fails inside no_sync: accumulate with static_graph=False")
    if getattr(model, "_use_python_reducer", False):
        raise CdgrabError("optimize_ddp='python_reducer' leaves out DDP's communication hook: use 'ddp_optimizer'")


def refuse_new_parameters(model: nn.Module, known: Sequence[nn.Parameter], names: Collection[str] = ()) -> None:
    """Parameters that were frozen, or did not exist, when the sampler was attached. names: of those that may be others
    at the moment."""
    identities = {id(parameter) for parameter in known}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in identities and name not in names:
            raise CdgrabError(
                f"{name} needs a gradient now and did not when the sampler was attached: attach a new sampler when the "
                "model is complete and on its device"
            )


def refuse_wrappers(sampler: object, processes: int) -> None:
    """They use a sampler just as loaders do, so that only a search among all objects finds them."""
    library = sys.modules.get("accelerate.data_loader")
    names = WRAPPERS if processes > 1 else WRAPPERS.keys() - {"DataLoaderDispatcher"}  # it hands one process everything
    sentences = {kind: WRAPPERS[name] for name in names if (kind := getattr(library, name, None))}
    for found in gc.get_referrers(*sentences) if sentences else ():  # objects refer to their classes
        if type(found) in sentences and found.batch_sampler is sampler:
            raise CdgrabError(sentences[type(found)])


def refuse_division(reader: FrameType) -> None:
    """accelerate's prepare reads the settings of a batch sampler when it wraps it. To refuse it at that moment is to
    come before `loader.batch_sampler.attach(model)`, which would fail in the wrapper, without a word of ours."""
    wrapper, library = reader.f_locals.get("self"), sys.modules.get("accelerate.data_loader")
    if isinstance(wrapper, getattr(library, "BatchSamplerShard", ())):
        raise CdgrabError(DIVIDED)


def refuse_batches_of_batches(sampler: object, caller: FrameType) -> None:
    """DataLoader(sampler=…) makes batches of what the sampler hands out: it has a batch sampler of its own, which reads
    ours (of torchdata's loader, an iterator that is just being made)."""
    names = caller.f_locals
    reader = names.get("self")
    size = getattr(reader, "batch_size", names.get("batch_size"))
    if size is not None and getattr(reader, "sampler", None) is sampler:
        raise CdgrabError(
            "the loader would make batches of whole batches: it needs batch_sampler=sampler instead of sampler=sampler"
        )


def refuse_threads(group: WorkerGroup, in_a_thread: bool) -> None:
    """An order of an epoch whose gradients are not all in takes a decision of all processes, at one moment."""
    if in_a_thread and group.world_size > 1:
        raise CdgrabError(
            "batches of the next epoch are read in a thread while gradients of this one are still to come: with "
            "several processes let the thread end with the epoch, or read batches where the model is trained"
        )


def refuse_unaveraged(passes: int, wanted: int) -> None:
    """DDP has averaged nothing by the end of an epoch. (Where it does, too many passes are refused at that moment.)"""
    if passes > wanted:
        which = "them" if wanted == 1 else f"the last of every accumulation_steps={wanted}"
        raise CdgrabError(
            f"the last {passes} backward passes ran inside no_sync, and orders are learnt from gradients that DDP "
            f"averages: run {which} outside (local SGD, which averages weights instead, is not supported)"
        )


def same_layout(there: dict, here: dict, repartition: bool) -> bool:
    """Whether a state fits. One that does not is refused, unless `repartition` asks for a new start."""
    details = differences(there, here)
    if details and not repartition:
        raise CdgrabError(f"this state belongs to another sampler: {details}; repartition=True starts orders anew")
    return not details


def refuse_other_sparsifier(state: dict | None, sparsifier: object) -> None:
    if (state is None) != (sparsifier is None):
        there, here = ("with", "without") if state is not None else ("without", "with")
        raise CdgrabError(f"this state belongs to a sampler attached {there} a sparsifier, and this one is {here}")
