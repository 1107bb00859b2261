"""Checkpoints at epoch ends: atomic, independent of the process count, loaded without executing anything."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import torch

from .errors import CdgrabError
from .state import WorkerState, collected
from .workers import WorkerGroup

FILE = "checkpoint.pt"


def save(
    directory: Path,
    group: WorkerGroup,
    science: dict,
    epochs_done: int,
    parameters,
    optimiser_state,
    holders: dict[str, WorkerState],
) -> None:
    """Called by all ranks; rank 0 writes. The per-worker state of sorter and sparsifier, of all processes, goes into
    the one file."""
    states = {name: collected(holder.state_dict(), group) for name, holder in holders.items()}
    if group.rank:
        return
    content = {
        "science": science,
        "epochs_done": epochs_done,
        "parameters": parameters,
        "optimiser": list(optimiser_state),
        **states,
    }
    temporary = directory / f".{FILE}.tmp"
    with open(temporary, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, directory / FILE)


def load(directory: Path, device: torch.device) -> dict | None:
    """The checkpoint of a run, None when there is none."""
    path = directory / FILE
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise CdgrabError(f"the checkpoint {path} cannot be read; move it away to start this run again") from error
