"""Saving a run and continuing it, also in the middle of an epoch, on any number of processes.

What is saved is the trainer's state and what it belongs to: settings, data and the metrics written so far. No random
generator needs to be saved: every draw is a function of the run's seed (see `cdgrab.streams`).
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from cdgrab.errors import CdgrabError, first_line
from cdgrab.runtime.group import WorkerGroup
from experiments.store import checkpoint
from experiments.training import runlog
from experiments.training.config import Run, refuse_other_settings
from experiments.training.steps import Steps, stacked, unstacked


def save(run: Run, state: dict) -> None:
    """state: a trainer's, of all workers. Called by rank 0."""
    metrics = runlog.measured(run.directory)
    content = {"science": run.science, "data": dict(run.source.checksums), "metrics": metrics, **state}
    checkpoint.save(run.directory, content, run.config.checkpoint.keep)


def load(run: Run, group: WorkerGroup, say: Callable[[str], None]) -> dict | None:
    """The run's checkpoint, if there is one. Called by all ranks. Refuses a checkpoint that belongs to another run, or
    is not the same on all ranks."""
    first = group.rank == 0
    saved = checkpoint.load(run.directory, say if first else lambda _: None, mend=first)
    refuse_different(group, saved, run.directory)
    if saved is not None:
        with fitting([run]):
            refuse_other_settings(run, saved["science"], run.directory)
            refuse_other_data(saved["data"], run.source.checksums, run.directory)
            if not isinstance(saved["metrics"], dict):
                raise TypeError("not a measurement of metrics")
            if not (is_count(saved["metrics"]["bytes"]) and isinstance(saved["metrics"]["sha256"], str)):
                raise TypeError("not a measurement of metrics")
            progress(saved)
    return saved


@contextlib.contextmanager
def fitting(runs: Sequence[Run]) -> Iterator[None]:
    """Turn any error from loading an unsuitable checkpoint into one sentence."""
    try:
        yield
    except CdgrabError:
        raise
    except Exception as error:
        folders = " or ".join(str(run.directory) for run in runs)
        raise CdgrabError(
            f"the checkpoint in {folders} does not fit this run; move the folder away to start this run again"
        ) from error


def progress(state: dict | None) -> tuple[int, int]:
    """Epochs done, and units visited in the current one."""
    if state is None:
        return 0, 0
    if not (is_count(state["epochs_done"]) and is_count(state["position"])):
        raise TypeError("not the state of such a run")
    return state["epochs_done"], state["position"]


def split(loop: Steps, replicas: int, group: WorkerGroup) -> list[dict]:
    """Of every run: its parameters, its optimiser's state, and the carry of all workers. Called by all ranks."""
    carries = zip(*(map(group.collect, unstacked(part, replicas)) for part in loop.carry), strict=True)
    parts = unstacked(loop.parameters, replicas), loop.optimiser.split(loop.optimiser.state)
    return [
        {"parameters": parameters, "optimiser": optimiser, "carry": list(carry)}
        for parameters, optimiser, carry in zip(*parts, list(carries) or [()] * replicas, strict=True)
    ]


def joined(loop: Steps, states: Sequence[dict], group: WorkerGroup) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """From the states of runs, all at the same step: what `loop` must load to continue there."""
    parameters = stacked([state["parameters"] for state in states])
    optimiser = loop.optimiser.join([state["optimiser"] for state in states])
    carry = list(loop.first_carry)
    if states[0]["position"]:
        carries = zip(*(state["carry"] for state in states), strict=True)
        carry = [stacked([workers[group.local] for workers in part]) for part in carries]
    if not alike([parameters, *optimiser, *carry], [loop.parameters, *loop.optimiser.state, *loop.first_carry]):
        raise TypeError("not the state of such a run")
    optimiser, carry = ([tensor.to(loop.parameters.device) for tensor in part] for part in (optimiser, carry))
    return parameters.to(loop.parameters.device), optimiser, carry


def refuse_different(group: WorkerGroup, saved: dict | None, directory: Path) -> None:
    """All ranks must find the same checkpoint: hosts that do not share the folder would train different models."""
    found = group.gather(_fingerprint(saved)[None])
    if len(found.unique(dim=0)) > 1:
        words = "; ".join(f"rank {rank} {_words(*row)}" for rank, row in enumerate(found.tolist()))
        raise CdgrabError(f"the processes found different checkpoints in {directory} ({words}): do all hosts see it?")


def refuse_other_data(before: dict[str, str], now: dict[str, str], directory: Path) -> None:
    """before, now: checksums by name, when the checkpoint was made and now."""
    if changed := sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)):
        raise CdgrabError(
            f"the data changed since the checkpoint in {directory} was made ({', '.join(map(first_line, changed))}); "
            "choose another run_dir"
        )


def is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def alike(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether the tensors agree in number, shape and type."""
    return len(some) == len(others) and all(
        isinstance(one, Tensor) and one.shape == other.shape and one.dtype == other.dtype
        for one, other in zip(some, others, strict=True)
    )


def _fingerprint(saved: dict | None) -> Tensor:
    try:
        content = saved["parameters"].contiguous().view(torch.uint8).numpy().tobytes()
        return torch.tensor([int(saved["epochs_done"]), int(saved["position"]), zlib.crc32(content)])
    except Exception:  # there is none, or it will be refused later
        return torch.tensor([-1, 0, 0])


def _words(epochs: int, position: int, checksum: int) -> str:
    return "none" if epochs < 0 else f"epoch {epochs + 1}, unit {position}, checksum {checksum:08x}"
