"""A training script as people write it, with the drop-in sampler or without: what the study of practice runs.

Models are small, so the script keeps its examples on the device and needs no loader.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler, RandomSampler

from cdgrab import OrderedBatchSampler, streams
from cdgrab.balance.rules import reorder_pairs
from cdgrab.runtime.connection import pick_device
from cdgrab.sorters import SORTERS
from cdgrab.sorters.base import Sorter
from cdgrab.sorters.coordinated import CoordinatedPairBalance
from experiments.data.sources import Source
from experiments.store.records import significant
from experiments.studies.practice_data import Examples, augmented
from experiments.studies.practice_models import build
from experiments.studies.timing import finish_on
from experiments.tasks import locate_data
from experiments.tasks.base import initialised
from experiments.training.composition import compose_config

# which batches are visited, and in which order
SHUFFLE, FIXED = "shuffle", "fixed"  # fresh ones in every epoch, as of DataLoader(shuffle=True); the same, at random
BATCH, EXAMPLE, REFORMED = "batch", "example", "reformed"  # ordered by CD-GraB
COIN = "coin"  # the same as `batch`, but coins decide the signs
ROTATED = "rotated"  # the same as `batch`, but every order begins at a random place
NEIGHBOURS = 4  # batches that exchange their examples when they are reformed
WARM_UP = 0.05  # of all steps, where the rate decays
MOMENTUM = 0.9  # of SGD
EVALUATED_AT_ONCE = {"gpt": 64}  # examples
ROUNDS = 9  # of timed steps; the first warms up


class Script:
    """One model and what it is trained on. settings: of one cell, see `experiments.studies.practice.cell`; diagnose:
    keep what the sampler's report needs."""

    def __init__(self, settings: Mapping, arm: str, seed: int, rate: float, diagnose: bool = False) -> None:
        self.settings, self.device = settings, pick_device(settings["device"])
        self.examples = Examples(_source(settings["task"], settings["data"]), settings, seed, self.device)
        self.model = initialised(partial(build, settings, self.examples), seed, "float32", self.device)
        torch.manual_seed(seed)  # of dropout and augmentation
        self.batches = batches(arm, self.examples.size("train"), settings["batch"], seed, self.model, diagnose)
        kind = {"sgd": partial(torch.optim.SGD, momentum=MOMENTUM), "adamw": torch.optim.AdamW}[settings["optimiser"]]
        fast = {"fused": True} if self.device.type == "cuda" else {}
        self.optimiser = kind(self.model.parameters(), lr=rate, weight_decay=settings["weight_decay"], **fast)
        steps = settings["epochs"] * len(self.batches)
        self._schedule = LambdaLR(self.optimiser, partial(share_of_rate, settings["schedule"], steps))

    @property
    def dim(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def epoch(self) -> None:
        self.model.train()
        for batch in self.batches:
            inputs, labels = self.examples.fetch("train", torch.as_tensor(batch).to(self.device))
            inputs = augmented(inputs) if self.settings["augment"] else inputs
            self._losses(inputs, labels)[0].mean().backward()
            self.optimiser.step()
            self._schedule.step()
            self.optimiser.zero_grad()

    @torch.no_grad()
    def measured(self, part: str) -> tuple[float, float]:
        """Mean loss and score over all examples of a part, as they are. The score: right answers in %; of words 100 ×
        the mean logarithm of their probability, of which one point is about 1 % of the perplexity."""
        self.model.eval()
        sums, many = torch.zeros(2, dtype=torch.float64, device=self.device), 0
        everything = torch.arange(self.examples.size(part), device=self.device)
        for numbers in everything.split(EVALUATED_AT_ONCE.get(self.settings["model"], 2000)):
            losses, right = self._losses(*self.examples.fetch(part, numbers))
            sums += torch.stack([losses.double().sum(), right.double().sum()])
            many += losses.numel()
        loss, right = (sums / many).tolist()
        return loss, -100 * loss if self.settings["model"] == "gpt" else 100 * right

    def _losses(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """One by one, and which answers are right."""
        half = self.settings["half"] and self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            scores = self.model(inputs)
        scores, labels = scores.flatten(0, -2).float(), labels.flatten()
        return F.cross_entropy(scores, labels, reduction="none"), scores.argmax(-1) == labels


@cache
def _source(task: str, data: str) -> Source:
    return locate_data(compose_config([f"task={task}", f"data={data}"]))


def share_of_rate(schedule: str, steps: int, step: int) -> float:
    """Of the learning rate in this step."""
    if schedule == "constant":
        return 1.0
    warm_up, done = min(1.0, (step + 1) / (WARM_UP * steps)), min(1.0, step / steps)
    return warm_up * {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[schedule]


def batches(
    arm: str, examples: int, size: int, seed: int, model: nn.Module, diagnose: bool = False
) -> Iterable[list[int]]:
    """What a loop over an epoch's batches iterates."""
    if arm == SHUFFLE:
        generator = torch.Generator().manual_seed(seed)
        return BatchSampler(RandomSampler(range(examples), generator=generator), size, drop_last=False)
    sorter = {FIXED: "d_rr", COIN: "shuffle_once", ROTATED: ROTATED}.get(arm, "cd_grab")
    unit = "example" if arm == EXAMPLE else "batch"
    with _registered(ROTATED, RotatedPairBalance):
        sampler = OrderedBatchSampler(range(examples), size, sorter=sorter, unit=unit, seed=seed, diagnose=diagnose)
        if arm not in (FIXED, COIN):
            sampler.attach(model)
    if arm == COIN:
        return CoinFlips(sampler, seed)
    return Reformed(sampler, examples, seed) if arm == REFORMED else sampler


@contextmanager
def _registered(name: str, sorter: type[Sorter]) -> Iterator[None]:
    """While a sampler is being made: it is this study's own."""
    SORTERS[name] = sorter
    try:
        yield
    finally:
        del SORTERS[name]


class CoinFlips:
    """Fixed batches, of which every order is made from the last one as pair balancing does it, with random signs: what
    is left of CD-GraB if it learns nothing."""

    def __init__(self, sampler: OrderedBatchSampler, seed: int) -> None:
        """sampler: whose order never changes."""
        self._batches, self._seed, self._epoch = list(sampler), seed, 0
        self._order = torch.arange(len(self._batches))[None]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        if self._epoch:
            coins = streams.stream(self._seed, "study", self._epoch).integers(0, 2, len(self._batches) // 2)
            self._order = reorder_pairs(self._order, torch.from_numpy(2 * coins - 1).to(torch.int8)[None])
        self._epoch += 1
        yield from (self._batches[number] for number in self._order[0].tolist())


class RotatedPairBalance(CoordinatedPairBalance):
    """CD-GraB whose orders begin at a random place and go on at the front after the end.

    What is at an end of an order is at one of the next, too, so that some batches come twice in a row and others late.
    Here no place is an end. The order is still balanced: a sum over its first batches is the difference of two such
    sums of CD-GraB's order, so at most twice as large.
    """

    def next_order(self, epoch: int) -> Tensor:
        order = super().next_order(epoch)
        return order.roll(-int(streams.stream(self.seed, "study", epoch).integers(self.units)), 1)


class Reformed:
    """Batches in CD-GraB's order, of which NEIGHBOURS at a time exchange their examples at random before they are used.

    Together they keep their mean gradient, so that the order stays balanced but for what lies between them; and no
    batch stays the same for long.
    """

    def __init__(self, sampler: OrderedBatchSampler, examples: int, seed: int) -> None:
        self._sampler, self._examples = sampler, torch.arange(examples)  # at the place of each of the sampler's numbers
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Tensor]:
        ordered = iter(self._sampler)
        while some := list(islice(ordered, NEIGHBOURS)):
            places = torch.tensor([place for batch in some for place in batch])
            exchanged = places[torch.randperm(len(places), generator=self._generator)]
            self._examples[places] = self._examples[exchanged]
            yield from (self._examples[batch] for batch in some)


def train(settings: Mapping, arm: str, seed: int, rate: float) -> dict[str, object]:
    """Losses and scores after every epoch of the second half, what was trained, and what the sampler's report says
    about ordered batches after the last epoch."""
    script, rows = Script(settings, arm, seed, rate, diagnose=arm == BATCH), []
    for epoch in range(1, settings["epochs"] + 1):
        script.epoch()
        if 2 * epoch > settings["epochs"]:
            rows.append((epoch, *script.measured("train"), *script.measured("valid")))
    names = ("epoch", "train_loss", "train_score", "valid_loss", "score")
    columns = {name: significant(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}
    columns |= {"examples": script.examples.size("train"), "dim": script.dim}
    if arm == BATCH:
        report = script.batches.report()
        columns |= {"bound": report.kept, "signs_right": report.signs_right, "advice": report.verdict}
    return columns


def cost(settings: Mapping, arm: str, seed: int, rate: float) -> dict[str, object]:
    """Microseconds of a step without an order (`plain_us`) and with one (`ours_us`), in turn, and the memory that the
    order takes, in floats per parameter; NaN on a CPU."""
    settings = {**settings, "examples": settings["timed_steps"] * settings["batch"]}
    peaks = {which: _peak(settings, which, seed, rate) for which in (SHUFFLE, arm)}
    scripts = {which: Script(settings, which, seed, rate) for which in (SHUFFLE, arm)}
    wait, times = finish_on(pick_device(settings["device"]).type), {which: [] for which in scripts}
    for _ in range(ROUNDS):
        for which, script in scripts.items():
            wait()
            start = time.perf_counter()
            script.epoch()
            wait()
            times[which].append(1e6 * (time.perf_counter() - start) / len(script.batches))
    plain, ours = (significant(times[which][1:], 4) for which in (SHUFFLE, arm))
    more = (peaks[arm] - peaks[SHUFFLE]) / 4 / scripts[arm].dim
    return {"round": list(range(1, ROUNDS)), "plain_us": plain, "ours_us": ours, "floats_per_parameter": round(more, 2)}


def _peak(settings: Mapping, arm: str, seed: int, rate: float) -> float:
    """Bytes of the device that a script takes at most."""
    if pick_device(settings["device"]).type != "cuda":
        return math.nan
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    Script(settings, arm, seed, rate).epoch()
    return torch.cuda.max_memory_allocated() - before
