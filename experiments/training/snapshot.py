"""Everything a run needs to go on from where it is, in the middle of an epoch too, on any number of processes.

There is no random generator to be saved: every draw is made anew from the run's seed (see `streams`).
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cdgrab.errors import CdgrabError
from cdgrab.runtime.group import WorkerGroup
from cdgrab.runtime.state import WorkerState, collected
from experiments.training import runlog
from experiments.training.clock import Clock
from experiments.training.config import refuse_other_settings

if TYPE_CHECKING:
    from pathlib import Path

    from experiments.training.loop import Trainer


def taken(trainer: Trainer) -> dict | None:
    """Called by all ranks: what belongs to workers comes together on rank 0. None on the others."""
    group, loop = trainer.group, trainer.loop
    states = {name: collected(holder.state_dict(), group) for name, holder in _holders(trainer).items()}
    carry = [group.collect(state) for state in loop.carry]
    sparsified = trainer.sparse_mean.running_sums() if trainer.sparse_mean else None
    if group.rank:
        return None
    return {
        "science": trainer.run.science,
        "epochs_done": trainer.epochs_done,
        "position": trainer.position,
        "metrics": runlog.measured(trainer.run.directory),
        "data": dict(trainer.run.source.checksums),
        "parameters": loop.parameters,
        "optimiser": list(loop.optimiser.state),
        "carry": carry,
        "first_parameters": trainer.first_parameters if trainer.position else None,
        "seconds": trainer.clock.seconds,
        "sparsified": sparsified,
        **states,
    }


def restore(trainer: Trainer, saved: dict | None) -> None:
    """Called by all ranks. Refuses what belongs to another run, is no snapshot, or not that of all ranks."""
    directory = trainer.run.directory
    refuse_different(trainer.group, saved, directory)
    if saved is None:
        return
    try:
        refuse_other_settings(trainer.run, saved["science"], directory)
        _refuse_other_data(trainer, saved["data"])
        _restore(trainer, saved)
    except CdgrabError:
        raise
    except Exception as error:  # whatever a content that does not fit makes of the loading
        raise CdgrabError(
            f"the checkpoint in {directory} does not fit this run; move the folder away to start this run again"
        ) from error


def refuse_different(group: WorkerGroup, saved: dict | None, directory: Path) -> None:
    """All ranks must have found the same: hosts that do not share the folder would train different models."""
    found = group.gather(torch.tensor([_fingerprint(saved)]))
    if len(found.unique(dim=0)) > 1:
        words = "; ".join(f"rank {rank} {_words(*row)}" for rank, row in enumerate(found.tolist()))
        raise CdgrabError(f"the processes found different checkpoints in {directory} ({words}): do all hosts see it?")


def _fingerprint(saved: dict | None) -> list[int]:
    try:
        content = saved["parameters"].contiguous().view(torch.uint8).numpy().tobytes()
        return [int(saved["epochs_done"]), int(saved["position"]), zlib.crc32(content)]
    except Exception:  # there is none, or it is refused later
        return [-1, 0, 0]


def _words(epochs: int, position: int, checksum: int) -> str:
    return "none" if epochs < 0 else f"epoch {epochs + 1}, unit {position}, checksum {checksum:08x}"


def _refuse_other_data(trainer: Trainer, before: dict) -> None:
    now = trainer.run.source.checksums
    if changed := sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)):
        raise CdgrabError(
            f"the data changed since the checkpoint in {trainer.run.directory} was made ({', '.join(changed)}); "
            "choose another run_dir"
        )


def _restore(trainer: Trainer, saved: dict) -> None:
    group, loop, device = trainer.group, trainer.loop, trainer.device
    metrics = saved["metrics"]
    counted = {"epochs_done": trainer.config.epochs, "position": trainer.units}
    right = all(type(saved[name]) is int and 0 <= saved[name] <= most for name, most in counted.items())
    right = right and type(metrics["bytes"]) is int and metrics["bytes"] >= 0 and isinstance(metrics["sha256"], str)
    right = right and _alike([saved["parameters"], *saved["optimiser"]], [loop.parameters, *loop.optimiser.state])
    if not right or (saved["position"] and not _alike([state[group.local] for state in saved["carry"]], loop.carry)):
        raise TypeError("not a snapshot of this run")
    trainer.epochs_done, trainer.position, trainer.metrics = saved["epochs_done"], saved["position"], metrics
    loop.load(saved["parameters"].to(device), [tensor.to(device) for tensor in saved["optimiser"]])
    for name, holder in _holders(trainer).items():
        holder.load_state_dict(saved[name])
    if not trainer.position:
        return
    loop.load_carry([state[group.local].to(device) for state in saved["carry"]])
    trainer.clock = Clock(saved["seconds"])
    if saved["first_parameters"] is not None:
        trainer.first_parameters = saved["first_parameters"].to(device)
    if trainer.sparse_mean:
        trainer.sparse_mean.load_running_sums(saved["sparsified"])


def _alike(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(
        isinstance(one, Tensor) and one.shape == other.shape and one.dtype == other.dtype
        for one, other in zip(some, others, strict=True)
    )


def _holders(trainer: Trainer) -> dict[str, WorkerState]:
    """What has a state of its own, by its name in the checkpoint."""
    sparsifier = {"sparsifier": trainer.sparse_mean.sparsifier} if trainer.sparse_mean else {}
    return {"sorter": trainer.sorter} | sparsifier
