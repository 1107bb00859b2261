"""Reports about orders, against the same sums one by one in float64."""

from itertools import chain, pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from dropin_cases import EPOCHS, attached, dataset, network, retrained, sorted_alone, train
from torch import nn

from cdgrab import CdgrabError, OrderedBatchSampler, make_sorter, streams
from cdgrab.dropin.diagnosis import Diagnosis
from cdgrab.dropin.report import PERMUTATIONS
from cdgrab.runtime.division import Division
from cdgrab.runtime.group import WorkerGroup


def herding(rows, order):
    """rows [workers, units, dim], order [workers, units]."""
    mean, total, worst = np.mean(rows, axis=(0, 1)), 0, 0
    for k in range(rows.shape[1]):
        total = total + sum(rows[w, order[w, k]] - mean for w in range(len(rows)))
        worst = max(worst, np.abs(total).max())
    return worst


def random_bounds(rows, seed):
    def order(number):
        return np.stack([streams.permutation(rows.shape[1], seed, "report", w, number) for w in range(len(rows))])

    return [herding(rows, order(number)) for number in range(PERMUTATIONS)]


def by_unit(gradients, order):
    """gradients [workers, units, dim], by position -> by unit."""
    placed = np.empty_like(gradients)
    for worker, units in enumerate(order):
        placed[worker, units] = gradients[worker]
    return placed


def share_right(rows, signs, common):
    """rows [decisions, workers, dim] and their signs: those that turn their row against the sum so far."""
    sums, right = np.zeros((1 if common else rows.shape[1], rows.shape[2])), []
    for k, worker in np.ndindex(signs.shape):
        total = sums[0 if common else worker]
        if k or (common and worker):
            right.append(signs[k, worker] * (total @ rows[k, worker]) <= 0)
        total += signs[k, worker] * rows[k, worker]
    return np.mean(right), len(right)


def check_report(report, gradients, orders, common, sorter="cd_grab", seed=3, chosen=slice(None)):
    """A report of the last epoch; gradients [epochs, workers, units, dim], by position in orders [epochs, workers,
    units]. The signs that made the last order are those of a sorter that gets the same gradients."""
    alone = make_sorter(sorter, workers=orders.shape[1], units=orders.shape[2], dim=gradients.shape[3], seed=seed)
    for epoch, some in enumerate(gradients[:-1]):
        alone.order(epoch)
        alone.observe(range(orders.shape[2]), some)
    alone.drain()
    signs, pairs = alone._signs.T.numpy().astype(int), alone.units_per_row == 2
    before, now = (by_unit(gradients[e].numpy()[:, :, chosen], orders[e].numpy()) for e in (-2, -1))
    old, new = orders[-2].numpy(), orders[-1].numpy()
    used, random = herding(now, new), random_bounds(gradients[-1].numpy()[:, :, chosen], seed)
    assert report.herding_used == pytest.approx(used, rel=1e-12)
    assert report.herding_random == pytest.approx(np.mean(random), rel=1e-12)
    assert report.better_than == np.mean([used < one for one in random])
    in_new_order = np.take_along_axis(before, new[:, :, None], 1)
    random = np.mean(random_bounds(in_new_order, seed))
    assert report.promised == pytest.approx(herding(before, new) / random, rel=1e-12)
    for rows, share in ((before, report.signs_right_when_made), (now, report.signs_right)):
        rows = np.take_along_axis(rows, old[:, :, None], 1).transpose(1, 0, 2)
        even = len(rows) // 2 * 2
        rows = rows[0:even:2] - rows[1:even:2] if pairs else (rows - rows.mean(0))[:-1]  # the last has either sign
        expected, judged = share_right(rows, signs[: len(rows)], common)
        assert share == pytest.approx(expected, rel=1e-12) and report.signs == judged
    assert (report.workers, report.units, report.epoch) == (*orders.shape[1:], len(orders) - 1)


@pytest.mark.parametrize("sorter, kept", [("cd_grab", 1000), ("cd_grab", 11), ("grab", 1000)])
def test_numbers_are_those_of_sums_one_by_one(sorter, kept):
    model, plain = network(), network()
    sampler = attached(model, 3, sorter=sorter, diagnose=kept)
    visited = train(model, sampler)
    assert visited == train(plain, attached(plain, 3, sorter=sorter))
    gradients = retrained(network(), visited)[:, None]
    report, dim = sampler.report(), gradients.shape[3]
    chosen = streams.permutation(dim, 3, "report")[:kept].sort().values.numpy()
    check_report(report, gradients, sorted_alone(gradients, sorter=sorter), True, sorter, chosen=chosen)
    assert (report.coordinates, report.dim) == (min(kept, dim), dim)
    assert 0 < report.seconds < report.epoch_seconds and report.memory_bytes > 3 * 8 * len(sampler) * report.coordinates
    assert sorter == "grab" or kept < dim or report.signs_right_when_made == 1


class Noted(nn.Module):
    """A gradient that is the mean of vectors of its examples, whatever the weights are."""

    def __init__(self, vectors):
        super().__init__()
        self.weight, self.vectors = nn.Parameter(torch.zeros(vectors.shape[1]).double()), vectors

    def forward(self, batch):
        return (self.vectors[batch] @ self.weight).mean()


@pytest.mark.parametrize("change", [False, True])
@mock.patch("cdgrab.dropin.report.DEAR", 1.0)  # next to nothing but orders takes time here
def test_gradients_that_stay_are_worth_an_order_and_those_that_change_are_not(change):
    generator = torch.Generator().manual_seed(1)
    model = Noted(torch.randn(160, 5, generator=generator, dtype=torch.float64))
    sampler = OrderedBatchSampler(range(160), 2, diagnose=True).attach(model)
    for epoch in range(4):
        for batch in sampler:
            model(batch).backward()
        assert epoch or sampler.report().verdict == "cannot tell yet"
        if change:
            model.vectors = torch.randn(160, 5, generator=generator, dtype=torch.float64)
    report = sampler.report()
    assert report.signs_right_when_made == 1 and str(report).startswith(f"{report.verdict}, after epoch 3: the learnt")
    if change:
        assert report.verdict in ("not worth it", "cannot tell yet") and 0.3 < report.signs_right < 0.7
    else:
        assert report.verdict == "worth it" and report.signs_right == report.better_than == 1
        assert report.kept < 0.6 and report.herding_used == pytest.approx(
            report.promised * report.herding_random, rel=0.2
        )


def test_reports_before_amid_and_without_epochs():
    model = network()
    with pytest.raises(CdgrabError, match="diagnose=True"):
        attached(network()).report()
    with pytest.raises(CdgrabError, match="diagnose must be a whole number"):
        attached(network(), diagnose=0)
    sampler = attached(model, 3, diagnose=True)
    assert "no epoch" in sampler.report().sentence
    train(model, sampler)
    done = sampler.report()
    train(model, sampler, 1, stop_after=4)
    again = sampler.report()
    assert (again.epoch, again.herding_used, again.promised) == (EPOCHS - 1, done.herding_used, done.promised)
    state = sampler.state_dict()
    sampler.load_state_dict(state)
    assert "no epoch" in sampler.report().sentence
    oblivious = attached(other := network(), 3, diagnose=True, sorter="d_rr")
    train(other, oblivious, 1)
    assert "not learnt" in oblivious.report().sentence and oblivious.report().herding_used > 0


def test_a_process_without_coordinates_keeps_nothing_of_them():
    group = WorkerGroup(2, 1, 2)
    diagnosis = Diagnosis(10, 0, group)
    for epoch in range(2):  # the first gradients tell how they are divided
        diagnosis.begin_epoch(epoch, torch.arange(2)[None])
        diagnosis.begin(Division(group, ((slice(0, 5),), ())), torch.empty(0))
        diagnosis.take(slice(0, 0), torch.empty(2, 0), add=False)
        diagnosis.end(0)
    assert diagnosis.records[-1].rows[0].shape == (2, 0)


def test_late_gradients_are_left_out_of_a_report():
    model = network()
    sampler = attached(model, 3, diagnose=1000)
    inputs, labels = dataset().tensors[1:]
    for now, _ in pairwise(chain(*[sampler] * 4)):
        nn.functional.cross_entropy(model(inputs[now]), labels[now]).backward()
        model.zero_grad()
    report = sampler.report()
    assert (report.epoch, report.units) == (2, len(sampler) - 1)
    assert report.signs_right == 1  # the same weights all the time
