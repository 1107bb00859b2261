"""When buckets are averaged: a timeline of the backward pass, with plain DDP and with the drop-in sampler.

4 processes in network namespaces (needs root) train a transformer over limited links. Milliseconds count from the
call of `backward`, are those of the first process, and medians over steps: when DDP handed over each bucket, when its
mean was there, and when `backward` returned. All gradients are computed when the last bucket is handed over.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from cdgrab.runtime.overlap import OverlappingHook
from experiments.report.figures_link import CD_GRAB, PLAIN
from experiments.report.figures_timeline import sentence
from scripts.bench import hosts
from scripts.bench.link_methods import MODELS, Training
from scripts.bench.measure import report, rounded

PROCESSES = 4
TRAINED = {"smoke": "LSTM", "quick": "transformer", "full": "transformer"}
LINKS = {"smoke": (10.0,), "quick": (10.0,), "full": (10.0, 1.0)}  # Gbit/s
STEPS = {"smoke": 2, "quick": 10, "full": 30}
FIRST_STEPS = 4  # in which DDP regroups its buckets


def measure(device: str, size: str) -> Iterator[dict]:
    if reason := "links are limited between processes on CPUs" if device != "cpu" else hosts.why_not():
        print(f"  skipped: {reason}")
        return
    for gigabits in LINKS[size]:
        with hosts.hosts(PROCESSES, gigabits * 1e9):
            first, *_ = hosts.run_on_hosts("scripts.bench.timeline", PROCESSES, (TRAINED[size], STEPS[size]))
        for method, found in first.items():
            where = {"device": device, "model": TRAINED[size], "processes": PROCESSES, "link": gigabits}
            yield where | {"method": method, "steps": STEPS[size], **found}


describe = sentence


# -- in every process --------------------------------------------------------------------------------------------------


class Clock:
    """Notes when buckets are handed over and averaged, in milliseconds since a backward pass began: use it around
    each."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        self.steps.append({})

    def __exit__(self, *_: object) -> None:
        """Whoever waits for a bucket may go on before its callback has run."""
        step = self.steps[-1]
        step["returned"] = self._now()
        while sum(what.startswith("handed") for what in step) > sum(what.startswith("averaged") for what in step):
            time.sleep(1e-4)

    def around(self, hook: Callable) -> Callable:
        """A communication hook that does the same, under the clock. DDP inspects its signature."""

        def timed(state, bucket):
            index, step = bucket.index(), self.steps[-1]
            step[f"handed {index}"] = self._now()
            promise = hook(state, bucket)
            promise.add_done_callback(lambda _: step.update({f"averaged {index}": self._now()}))
            return promise

        return timed

    def _now(self) -> float:
        return (time.perf_counter() - self._began) * 1e3

    def found(self) -> dict[str, float | list[float]]:
        middle = {what: rounded(statistics.median(step[what] for step in self.steps)) for what in self.steps[-1]}
        buckets = range(sum(what.startswith("handed") for what in middle))
        by_bucket = {f"{what}_ms": [middle[f"{what} {index}"] for index in buckets] for what in ("handed", "averaged")}
        return by_bucket | {"returned_ms": middle["returned"]}


def timed_training(name: str, ordered: bool) -> tuple[Training, Clock]:
    clock = Clock()
    training = Training(MODELS[name])
    if ordered:
        with mock.patch.object(OverlappingHook, "communicate", clock.around(OverlappingHook.communicate)):
            training.let_cd_grab_order()
    else:
        training.model.register_comm_hook(None, clock.around(default_hooks.allreduce_hook))
    training.around_backward = clock
    return training, clock


def main(target: str, name: str, steps: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    made = {method: timed_training(name, ordered=method == CD_GRAB) for method in (PLAIN, CD_GRAB)}
    for count in (FIRST_STEPS, int(steps)):
        for training, clock in made.values():
            clock.steps.clear()
            for _ in range(count):
                dist.barrier()
                training.step()
    report(target, {method: clock.found() for method, (_, clock) in made.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
