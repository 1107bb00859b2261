"""Part of `dropin_checks`: exchanges of DDP's buckets beside the backward pass, with two processes."""

import threading
import time
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from dropin_cases import dataset, gathered, network, parallel, sampler_of, train
from torch import nn

from cdgrab.runtime import flows, overlap
from cdgrab.runtime import group as workers


def results():
    return {
        "overlapped": overlapped(),
        "divided anew": divided_anew(),
        "held up": held_up(),
        "failed once": [failed_once(network(), late=0.2), failed_once(Stopped(late_on_the_first), late=0.05)],
    }


class Waiting(torch.autograd.Function):
    """Holds up the backward pass until `until` is set."""

    until, in_time = threading.Event(), []

    @staticmethod
    def forward(context, inputs):
        return inputs.clone()

    @staticmethod
    def backward(context, gradient):
        Waiting.in_time.append(Waiting.until.wait(120))
        return gradient


class Stopped(nn.Module):
    """The backward pass stops between the last layer and the first."""

    def __init__(self, stop):
        super().__init__()
        self.parts, self.stop = network(), stop

    def forward(self, inputs):
        return self.parts[2](self.stop(self.parts[:2](inputs)))


def overlapped():
    """Whether the last layer's gradient is averaged before the backward pass gets to the first layer, by step. In the
    first one, which is not held up, DDP has a single bucket."""
    workers.WHOLE, averaged = 0, overlap.OverlappingHook._completed
    Waiting.until.set()

    def noted(*arguments):
        yield from averaged(*arguments)
        Waiting.until.set()

    model = parallel(Stopped(Waiting.apply))
    with mock.patch.object(overlap.OverlappingHook, "_completed", noted):
        train(model, sampler_of().attach(model), 1, stop_after=4, note=lambda _: Waiting.until.clear())
    return gathered(Waiting.in_time)


def divided_anew():
    """Whether coordinates are divided as the buckets want it, by step: in an ordinary loop, in one that leaves out
    every second batch, and in one whose first steps are not observed."""
    return [divided_after(*how) for how in (((), 0), ((1, 3, 5, 7), 0), ((), 2))]


def divided_after(skip, paused):
    workers.WHOLE, after, model = 0, [], parallel()
    sampler = sampler_of().attach(model)
    dealt = sampler.sorter.division
    with sampler.paused():
        for _ in range(paused):
            model(dataset()[:3][1]).sum().backward()
    model.zero_grad()
    train(model, sampler, 1, stop_after=4, skip=skip, note=lambda _: after.append(sampler.sorter.division != dealt))
    return after


class Late(torch.autograd.Function):
    """The backward pass of one process takes a while."""

    @staticmethod
    def forward(context, inputs, rank):
        context.rank = rank
        return inputs.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(0.2 * (dist.get_rank() == context.rank))
        return gradient, None


def late_on_the_first(inputs):
    return Late.apply(inputs, 0)


def late_on_the_last(inputs):
    return Late.apply(inputs, dist.get_world_size() - 1)


class Uneven(nn.Module):
    """Two large layers and then, in the backward pass, a small one. Where one process gets there late, the others are
    ahead by the whole of it, or wait for it in the middle of it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(*sizes, bias=False).double() for sizes in ((6, 2), (2, 30), (30, 2)))

    def forward(self, inputs):
        small, large, last = self.layers
        return late_on_the_last(last(large(late_on_the_last(small(inputs)))))


def held_up():
    """Weights after steps in which one process is late again and again, and short buckets follow long ones. Nobody may
    wait for somebody who waits for him."""
    workers.WHOLE = 30
    group = dist.new_group(timeout=timedelta(seconds=120))
    model = parallel(Uneven(), process_group=group)
    train(model, sampler_of(process_group=group).attach(model), 1, stop_after=4)
    return gathered([parameter.detach().clone() for parameter in model.parameters()])


def failed_once(model, late):
    """The error of a step in which every process fails amid an exchange, the second one so many seconds late, or the
    first one before it gets to buckets that the other has sent; and gradients afterwards."""
    workers.WHOLE, group = 0, dist.new_group(timeout=timedelta(seconds=120))
    model, start = parallel(model, process_group=group), flows.Divided.start
    sampler = sampler_of(process_group=group).attach(model)
    train(model, sampler, 1, stop_after=2)

    def start_late(*arguments):
        time.sleep(late * dist.get_rank())
        start(*arguments)

    full = mock.patch.object(type(sampler.sorter), "make_room", side_effect=MemoryError("no room"))
    with full, mock.patch.object(flows.Divided, "start", start_late):
        try:
            train(model, sampler, 1, stop_after=1)
        except MemoryError as error:
            message = str(error)
    model.zero_grad()
    with sampler.paused():
        model(dataset()[:3][1]).sum().backward()
    return message, gathered([parameter.grad.clone() for parameter in model.parameters()])
