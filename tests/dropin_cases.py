"""Data, networks and training loops shared by the tests of the drop-in sampler."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import cdgrab

EXAMPLES = 61
EPOCHS = 3


def dataset():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(EXAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(torch.arange(EXAMPLES), inputs, (inputs.sum(1) > 0).long())


def network(*layers, width=8):
    """Plain by default; the same weights in every call."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), *layers, nn.Linear(width, 2)).double()


class Awkward(nn.Module):
    """A frozen layer, one that is never used, one used every second time, and tied weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.frozen, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(3, 3)
        self.sometimes, self.tied, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.tied.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.calls = 0
        self.double()

    def forward(self, inputs):
        self.calls += 1
        hidden = self.tied(self.frozen(self.first(inputs)).tanh()).tanh()
        return self.last(self.sometimes(hidden) if self.calls % 2 else hidden)


class Mixed(nn.Module):
    """Parameters of two types, which DDP puts into different buckets."""

    def __init__(self):
        super().__init__()
        self.parts = network()
        self.parts[2].float()

    def forward(self, inputs):
        return self.parts[2](self.parts[:2](inputs).float())


class Ignoring(nn.Module):
    """With a parameter that DDP is told to ignore. Its gradient is zero, so that it has no effect on anything."""

    def __init__(self):
        super().__init__()
        self.parts, self.own = network(), nn.Linear(6, 2).double()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["own.weight"])

    def forward(self, inputs):
        return self.parts(inputs) + 0 * self.own(inputs)


def attached(model, batch_size=8, attach=None, **options):
    return cdgrab.OrderedBatchSampler(dataset(), batch_size, seed=3, **options).attach(model, **attach or {})


def seen_by(observer):
    """Gradients that a ledger or a sorter gets from now on, whole or in parts."""
    seen, observe, observe_parts = [], observer.observe, observer.observe_parts
    observer.observe = lambda *where, **more: (seen.append(where[-1].clone()), observe(*where, **more))
    observer.observe_parts = lambda parts: (seen.append(parts.vector()[None]), observe_parts(parts))
    return seen


def gradient(model):
    pieces = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters() if p.requires_grad]
    return torch.cat([piece.flatten() for piece in pieces])


def train(
    model, sampler, epochs=EPOCHS, loader=None, accumulate=1, stop_after=None, note=None, scaler=None, skip=(),
    factor=lambda step: 1.0, optimiser=None,
):  # fmt: skip
    """An ordinary loop. Returns the example numbers visited, by epoch and batch; `note(model)` after every backward.

    skip: batches of every epoch that are left out; factor: of the loss, by step.
    """
    loader = loader or DataLoader(dataset(), batch_sampler=sampler)
    optimiser = optimiser or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    visited, steps = [], 0
    for _ in range(epochs):
        visited.append([])
        for index, (numbers, inputs, labels) in enumerate(loader):
            visited[-1].append(numbers.tolist())
            synced = (index + 1) % accumulate == 0
            if index in skip:
                sampler.skip()
                continue
            if accumulate > 1 and hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(synced)
            with model.no_sync() if accumulate > 1 and not synced and hasattr(model, "no_sync") else nullcontext():
                scaler.scale(nn.functional.cross_entropy(model(inputs), labels) * factor(steps)).backward()
            if note:
                note(model)
            if synced:
                scaler.step(optimiser)
                scaler.update()
                optimiser.zero_grad()
            steps += 1
            if steps == stop_after:
                return visited
    return visited


def retrained(model, visited, accumulate=1, average=lambda gradient: gradient):
    """The same training by hand, from the batches visited. Returns the gradients of the units, [epochs, units, dim]."""
    _, inputs, labels = dataset().tensors
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for epoch in visited:
        found.append([])
        for first in range(0, len(epoch), accumulate):
            for batch in epoch[first : first + accumulate]:
                nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            found[-1].append(gradient(model))
            mean, start = average(gradient(model)), 0
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = mean[start : start + parameter.numel()].view_as(parameter).clone()
                    start += parameter.numel()
            optimiser.step()
            optimiser.zero_grad()
        found[-1] = torch.stack(found[-1])
    return torch.stack(found)


def sorted_alone(gradients, seed=3, sorter="cd_grab", **options):
    """Orders [epochs, workers, units] of the suite's own sorter fed with gradients [epochs, workers, units, dim]."""
    _, workers, units, dim = gradients.shape
    alone = cdgrab.make_sorter(sorter, workers=workers, units=units, dim=dim, seed=seed, **options)
    orders = []
    for epoch, some in enumerate(gradients):
        orders.append(alone.order(epoch))
        alone.observe(range(units), some)
    return torch.stack(orders)


def in_order(sampler, orders):
    """Batches that the units in these orders are, by epoch."""
    return [[batch for unit in order.tolist() for batch in sampler._own[unit]] for order in orders]


def parallel(model=None, bucket_bytes=100, **options):
    """Several buckets, which DDP regroups after the first step."""
    return DistributedDataParallel(model or network(), bucket_cap_mb=bucket_bytes / 2**20, **options)


def sampler_of(batch_size=3, seed=3, **options):
    return cdgrab.OrderedBatchSampler(dataset(), batch_size, seed=seed, **options)


def gathered(value):
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    return everybody
