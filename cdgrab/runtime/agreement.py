"""Processes that must be given the same settings."""

from __future__ import annotations

from hashlib import sha256

import torch

from cdgrab.checks import shown
from cdgrab.errors import CdgrabError, CollectiveError, MissingError
from cdgrab.runtime.group import WorkerGroup


def refuse_different_ranks(group: WorkerGroup, settings: dict, what: str, device: torch.device | str = "cpu") -> None:
    """Refuse settings that are not the same everywhere, on all processes; what: that which all of them need alike."""
    numbers = [int.from_bytes(sha256(repr(value).encode()).digest()[:7], "big") for value in settings.values()]
    try:
        everybodys = group.gather(torch.tensor([numbers], device=device)).cpu()
    except CollectiveError as error:
        raise MissingError(f"rank {group.rank} waited in vain: every process needs {what}") from error
    for (name, value), column in zip(settings.items(), everybodys.T, strict=True):
        if len(column.unique()) > 1:
            here = f"{name} is {shown(value)} on process {group.rank}"
            raise CdgrabError(f"{here} and something else on others: every process needs {what}")
