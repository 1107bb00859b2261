"""The walk of a gradient: which files two training steps of a warm run touch, and how often the walk changes file.

    python -m scripts.walk

CD-GraB on one process; the order that follows from the steps is a walk of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import groupby
from types import FrameType

import torch

from cdgrab.runtime.group import WorkerGroup
from experiments.store.files import ROOT
from experiments.tasks import make_task
from experiments.training.clock import Clock
from experiments.training.config import compose
from experiments.training.loop import alone

TWO_STEPS = ["task=lr_hmda", "data=embedded", "sorter=cd_grab", "workers=4", "task.batch=16", "task.limit=32"]
ROOMS = tuple(f"{ROOT / room}/" for room in ("cdgrab", "experiments"))


def walk(function: Callable[[], object]) -> list[str]:
    """The project's files in the order in which calls enter them and returns lead back to them; none twice in a row."""
    files: list[str] = []

    def note(frame: FrameType | None, event: str, _: object) -> None:
        if event == "return":  # into the caller: the next frame below that is the project's
            frame = frame.f_back
            while frame and not frame.f_code.co_filename.startswith(ROOMS):
                frame = frame.f_back
        if event in ("call", "return") and frame and frame.f_code.co_filename.startswith(ROOMS):
            files.append(frame.f_code.co_filename.removeprefix(f"{ROOT}/"))

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return [file for file, _ in groupby(files)]


@torch.no_grad()
def two_steps() -> tuple[list[str], list[str]]:
    """The walk of two training steps, and that of the order that follows from them."""
    run, device = compose(TWO_STEPS), torch.device("cpu")
    trainer = alone(run, make_task(run.config, run.source, device), WorkerGroup(4), device)
    assert trainer.steps == 2
    for epoch in range(2):  # the first one warms up
        order, clock, trainer.position = trainer.members[0].sorter.order(epoch), Clock(), 0
        steps = walk(lambda: trainer.train_epoch(order, clock))  # noqa: B023
    return steps, walk(lambda: trainer.members[0].sorter.order(2))


def main() -> None:
    for title, files in zip(("two steps", "the next order"), two_steps(), strict=True):
        print(f"{title}: {len(set(files))} files, {len(files) - 1} changes of file")
        print(*(f"  {file}" for file in files), sep="\n")


if __name__ == "__main__":
    main()
