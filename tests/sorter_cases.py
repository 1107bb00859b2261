"""Sorters, gradients and oracles shared by the tests."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

import cdgrab
from cdgrab import streams
from cdgrab.balance import reference

ALL = list(cdgrab.SORTERS)
GRADIENT_AWARE = [name for name in ALL if cdgrab.SORTERS[name].needs_gradients]
OBLIVIOUS = [name for name in ALL if name not in GRADIENT_AWARE]
BALANCING = [name for name in GRADIENT_AWARE if "rule" in cdgrab.SORTERS[name].options]
SEED = 5


def make(name, workers=3, units=8, dim=5, **options):
    return cdgrab.make_sorter(name, **{"workers": workers, "units": units, "dim": dim, "seed": SEED} | options)


def make_gradients(kind, epochs, workers, units, dim, seed=0):
    """[epochs, workers, units, dim]. Those that are `repeated`, `tied` or `zero` are whole multiples of `units`: sums,
    means and inner products are then exact in floating point, so that exact ties are ties for every implementation.
    `cancelling`: neighbouring workers have the same fractions, so that an even number of them leaves a running sum of
    exactly zero. `nearly tied`: few coordinates differ from zero, and what units share is tiny."""
    rng = np.random.default_rng(seed)
    shape = (epochs, workers, units, dim)
    values = {
        "random": lambda: rng.normal(size=shape),
        "repeated": lambda: units * rng.integers(-3, 4, size=(3, dim))[rng.integers(3, size=shape[:3])],
        "tied": lambda: units * rng.integers(-1, 2, size=shape),
        "zero": lambda: np.zeros(shape),
        "cancelling": lambda: (
            rng.normal(size=(epochs, -(-workers // 2), units, dim)).repeat(2, axis=1)[:, :workers]
            * (np.arange(units) % 2 == 0)[:, None]
        ),
        "nearly tied": lambda: nearly_tied(rng, *shape),
    }[kind]()
    return torch.from_numpy(values.astype(np.float64))


def nearly_tied(rng, *shape, tiny=1e-8):
    """One number at random in every vector, and a tiny one in the first place of all."""
    values = np.zeros(shape)
    np.put_along_axis(values, rng.integers(shape[-1], size=(*shape[:-1], 1)), rng.normal(size=(*shape[:-1], 1)), -1)
    values[..., 0] = tiny * rng.normal(size=shape[:-1])
    return values


def feed(sorter, gradients, cuts=(), start=0):
    """The rest of an epoch in calls that end at `cuts`, all through one buffer that is overwritten after each call."""
    units = gradients.shape[1]
    buffer = torch.empty_like(gradients)
    for a, b in pairwise([start, *sorted(c for c in cuts if start < c < units), units]):
        view = buffer[:, : b - a].copy_(gradients[:, a:b])
        sorter.observe(range(a, b), view)
        assert torch.equal(view, gradients[:, a:b]), "observe changed the caller's gradients"
        buffer.fill_(torch.nan)


def run(sorter, gradients, cuts=(), feed=feed):
    """Orders of all epochs and of the one after, [epochs + 1, workers, units]."""
    orders = []
    for epoch, epoch_gradients in enumerate(gradients):
        orders.append(sorter.order(epoch))
        feed(sorter, epoch_gradients, cuts)
    return torch.stack([*orders, sorter.order(len(gradients))])


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype)


def uniform(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).uniform(-1.0, 1.0, shape))


def walk(width, draws, r, v):
    """Takes the place of the oracle's greedy rule."""
    return +1 if float(np.dot(r, v)) <= width * next(draws) else -1


def oracle(name, first_order, gradients, walk_width=None, kh_epochs=100):
    """The orders that `run` must give, from `cdgrab.balance.rules.reference` and the sorter's random streams."""
    _, workers, units, dim = gradients.shape
    orders, means = [first_order.tolist()], np.zeros((workers, dim))
    decisions = units if name in ("grab", "id_grab_bal") else units // 2
    for epoch, g in enumerate(gradients.double().numpy()):
        draws = np.stack([streams.symmetric_uniform(decisions, SEED, "walk", w, epoch) for w in range(workers)])
        visits = iter((draws.T if name == "cd_grab" else draws).ravel())
        with pytest.MonkeyPatch.context() as patch:
            if walk_width:
                patch.setattr(reference, "greedy", partial(walk, walk_width, visits))
            if name == "kh":
                new = reference.kh(orders[-1], g, draws, epoch + 1, kh_epochs)
            elif name == "cd_grab":
                new = reference.cd_grab(orders[-1], g)
            elif name in ("grab_pair", "id_grab_pair"):
                new = reference.id_grab_pair(orders[-1], g)
            else:
                new, means = reference.id_grab_bal(orders[-1], g, means)
        orders.append(new)
    return torch.tensor(orders)


def assert_independent(permutations):
    """Two independent permutations agree in one place on average, and in more than ten with probability 1e-8."""
    for i, one in enumerate(permutations):
        for other in permutations[i + 1 :]:
            assert int((one == other).sum()) <= 10 and int((one == other.flip(0)).sum()) <= 10
