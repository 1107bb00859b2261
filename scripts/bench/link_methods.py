"""Models that are trained over links of limited speed, and the ways to average their gradients that take turns."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from cdgrab import OrderedBatchSampler
from cdgrab.runtime.connection import one_worker_per_process
from cdgrab.sparsify import Hook, sparsifier_of
from experiments.report.figures_link import ALONE, CD_GRAB, EARLY, EXDYNA, PLAIN, PUBLISHED
from experiments.tasks.cifar10_models import ResNet18
from experiments.tasks.lstm_wiki2 import TiedLstm
from experiments.tasks.tiny_gpt2 import TinyGpt2
from scripts.bench.models import Examples
from scripts.bench.sections import SectionedHook

BATCHES = 16  # of each process: an epoch of CD-GraB
FIRST_STEPS = 3  # of every method before it is measured: in the first two PowerSGD sends everything
SPARSIFIERS = {
    **{"Top-k": "topk", "CLT-k": "cltk", "DEFT": "deft", "SIDCo": "sidco", "MiCRO": "micro"},
    **{EXDYNA: "exdyna", PUBLISHED: "exdyna", EARLY: "exdyna"},
}
SECTIONS = {EARLY: 4}  # sent while the backward pass runs
SPARSER = ("Top-k", EXDYNA, PUBLISHED, EARLY)  # at the lower density, too
DENSITIES = (0.01, 0.001)
RANKS = (1, 4)  # of PowerSGD
Method = tuple[str, float | None]  # a name, and the density that is wanted


class Lstm(TiedLstm):
    """Word numbers [columns, time] -> scores [columns, time, words]; it begins without a state."""

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words.T, None)[0].transpose(0, 1)


@dataclass(frozen=True)
class Trained:
    """shape: of an example's input; words: there are so many, if inputs are words, each with a label."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    words: int = 0

    def examples(self) -> Examples:
        """Made up: what they say does not matter here."""
        shape = (BATCHES * dist.get_world_size(), *self.shape)
        if self.words:
            return Examples(torch.randint(self.words, shape), torch.randint(self.words, shape))
        return Examples(torch.randn(shape), torch.randint(10, shape[:1]))


MODELS = {  # batches of one small example: they leave little to compute between two exchanges
    "LSTM": Trained(lambda: Lstm(33_278, 32, 2), (8,), words=33_278),  # WikiText-2's words
    "ResNet-18": Trained(ResNet18, (3, 16, 16)),
    "transformer": Trained(lambda: TinyGpt2(5000, width=512, layers=7, heads=8), (8,), words=5000),
}


def methods() -> list[Method]:
    """In the order in which they take turns."""
    hooks = ["fp16", *(f"PowerSGD, rank {rank}" for rank in RANKS)]
    sparse = [(name, d) for d in DENSITIES for name in SPARSIFIERS if d == DENSITIES[0] or name in SPARSER]
    return [*((name, None) for name in (ALONE, PLAIN, *hooks, CD_GRAB)), *sparse]


class Training:
    """A model by DDP, its optimiser and its batches. hook: what averages its gradients; None: DDP itself."""

    def __init__(self, trained: Trained) -> None:
        torch.manual_seed(0)  # the same model and data on all processes
        self._data, self.hook = trained.examples(), None
        # as little beside the exchange as DDP allows: no second copy of the gradient, no constants sent around
        options = {"gradient_as_bucket_view": True, "broadcast_buffers": False}
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch 2.13 renames the second one
            self.model = DistributedDataParallel(trained.make(), **options)
        self._optimiser = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._load({"sampler": DistributedSampler(self._data)})
        self.around_backward: AbstractContextManager = nullcontext()

    def take_hooks(self) -> None:
        """DDP takes one hook for good: this one passes on to `hook`, which may change."""
        self.model.register_comm_hook(self, Training._pass_on)

    def _pass_on(self, bucket):  # DDP inspects the signature
        return self.hook(bucket)

    def let_cd_grab_order(self) -> None:
        sampler = OrderedBatchSampler(self._data, 1)
        sampler.attach(self.model)
        self._load({"batch_sampler": sampler})

    def step(self, exchange: bool = True) -> None:
        inputs, labels = next(self._batches)
        self._optimiser.zero_grad()
        self.model.require_backward_grad_sync = exchange  # as `no_sync` does
        loss = F.cross_entropy(self.model(inputs).flatten(0, -2), labels.flatten())
        with self.around_backward:
            loss.backward()
        self._optimiser.step()

    def _load(self, order: dict) -> None:
        loader = DataLoader(self._data, collate_fn=lambda batch: batch, **order)
        self._batches = itertools.chain.from_iterable(itertools.repeat(loader))


class Contender:
    """A method. `step` trains for one step, `begin` is called before some."""

    def __init__(self, training: Training, hook: Callable | None = None, exchange: bool = True) -> None:
        self._training, self._hook, self._exchange = training, hook, exchange

    def begin(self) -> None:
        """With a step that is not measured: others had the caches and the links before."""
        self._training.hook = self._hook
        self._training.step(self._exchange)

    def step(self) -> None:
        self._training.step(self._exchange)


class Sparse(Contender):
    """sent: actual densities, step by step. working, selecting: seconds of a processor, for all that the hook does, and
    for selecting; neither counts waiting for others.

    A threshold of the paper's kind would take hundreds of steps to get near the wanted density. So it is counted in the
    step before every turn, which is not measured.
    """

    def __init__(self, training: Training, name: str, density: float) -> None:
        parameters, kind, group = list(training.model.parameters()), SPARSIFIERS[name], one_worker_per_process()
        self._published = name == PUBLISHED
        options = {"density": density} | ({"rule": "paper", "threshold": "paper"} if self._published else {})
        if name in SECTIONS:
            self._hooked = SectionedHook(parameters, kind, group.new_channel(), SECTIONS[name], **options)
            self.sparsifiers = self._hooked.sparsifiers
            for section in self._hooked.sections:  # which a thread does
                section.reduce = self._timed(section.reduce, "sending")
        else:
            self.sparsifiers = [sparsifier_of(parameters, kind, group, **options)]
            self._hooked = Hook(parameters, *self.sparsifiers)
        for one in self.sparsifiers:
            one.prepare = self._timed(one.prepare, "selecting")
            one.select = self._timed(one.select, "selecting")
        self.forget()
        super().__init__(training, self._timed(self._hooked.communicate, "working"))

    def forget(self) -> None:
        self.sent: list[float] = []
        self.working = self.sending = self.selecting = 0.0  # sending: in another thread

    def means(self) -> dict[str, float]:
        """Per step since `forget`."""
        steps, working = len(self.sent), self.working + self.sending
        by_step = {"hook_cpu_seconds": working / steps, "selecting_cpu_seconds": self.selecting / steps}
        return by_step | {"sent_density": sum(self.sent) / steps}

    def begin(self) -> None:
        before = self.working, self.sending, self.selecting
        if self._published:
            self.sparsifiers[0].threshold = "counted"
        super().begin()
        if self._published:
            self.sparsifiers[0].threshold = "paper"
        self.working, self.sending, self.selecting = before

    def step(self) -> None:
        super().step()
        self.sent.append(self._hooked.stats.density)

    def _timed(self, call: Callable, what: str) -> Callable:
        def timed(*arguments: object) -> object:
            start = time.thread_time()
            try:
                return call(*arguments)
            finally:
                setattr(self, what, getattr(self, what) + time.thread_time() - start)

        return timed


def _power_sgd(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future:
    """A bucket after the other: its hook starts collectives when others end, and over gloo those of several buckets
    would get into different orders on different processes."""
    mean = powerSGD_hook(state, bucket)
    mean.wait()
    return mean


def contenders(name: str) -> dict[Method, Contender]:
    """Three models: DDP's own, one for all hooks in turn, and CD-GraB's."""
    plain, hooked, ordered = (Training(MODELS[name]) for _ in range(3))
    hooked.take_hooks()
    ordered.let_cd_grab_order()
    made: dict[Method, Contender] = {
        (ALONE, None): Contender(plain, exchange=False),
        (PLAIN, None): Contender(plain),
        ("fp16", None): Contender(hooked, partial(default_hooks.fp16_compress_hook, None)),
        (CD_GRAB, None): Contender(ordered),
    }
    for rank in RANKS:
        state = PowerSGDState(None, rank, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8)  # gradients may be 0
        made[f"PowerSGD, rank {rank}", None] = Contender(hooked, partial(_power_sgd, state))
    for sparsifier, density in (method for method in methods() if method[1]):
        made[sparsifier, density] = Sparse(hooked, sparsifier, density)
    return {method: made[method] for method in methods()}
