"""Studies without a task: training against a plain loop."""

import numpy as np
import pytest
import torch

import cdgrab
from cdgrab.errors import CdgrabError
from experiments.studies import rates
from experiments.studies.problems import KINDS, make_problem, sgd_epoch


def loss_of_one(kind, x, y, weights, ridge):
    z = x @ weights
    value = {
        "least_squares": lambda: (z - y) ** 2 / 2,
        "logistic": lambda: torch.log1p(torch.exp(z)) - y * z,
        "tanh_neuron": lambda: (torch.tanh(z) - y) ** 2 / 2,
    }[kind]()
    return value + ridge / 2 * weights @ weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sorter", ["cd_grab", "d_rr", "riffle", "grab", "grab_pair"])
def test_training_equals_a_plain_loop(kind, sorter):
    """One seed, one worker and one example at a time, gradients by autograd, orders by the library's sorters."""
    workers, units, epochs, rate, seed, ridge, dim = 3, 4, 8, 0.1, 1, 0.02, 5
    problem = make_problem(kind, range(seed + 1), workers * units, dim, noise=0.3, ridge=ridge)
    features, labels = problem.features[seed], problem.labels[seed]
    shape = (1, workers * units) if sorter in ("grab", "grab_pair") else (workers, units)
    chosen = cdgrab.make_sorter(sorter, workers=shape[0], units=shape[1], dim=dim, seed=seed)
    weights, gaps = torch.zeros(dim, dtype=torch.float64), []

    def full_loss(at):
        return torch.stack([loss_of_one(kind, *data, at, ridge) for data in zip(features, labels, strict=True)]).mean()

    for epoch in range(epochs):
        order, seen = chosen.order(epoch), []
        for k in range(units):
            if sorter in ("grab", "grab_pair"):
                batch = order[0, k * workers : (k + 1) * workers].tolist()
            else:
                batch = [w * units + int(order[w, k]) for w in range(workers)]
            one = [torch.func.grad(lambda at, i=i: loss_of_one(kind, features[i], labels[i], at, ridge)) for i in batch]
            seen.append(torch.stack([gradient(weights) for gradient in one]))
            weights = weights - rate * seen[-1].mean(0)
        by_position = torch.stack(seen)  # [units, workers, dim]
        whole = by_position.reshape(1, -1, dim) if sorter in ("grab", "grab_pair") else by_position.transpose(0, 1)
        chosen.observe(range(shape[1]), whole)
        slope = torch.func.grad(full_loss)(weights)
        gaps.append(float(slope @ slope if kind == "tanh_neuron" else full_loss(weights) - problem.minimum[seed]))
    before, last = rates.final_gaps(problem, range(seed + 1), sorter, workers, units, epochs, rate)
    assert float(before[seed]) == pytest.approx(np.mean(gaps[4:6]), rel=1e-9)
    assert float(last[seed]) == pytest.approx(np.mean(gaps[6:]), rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_problems(kind):
    problem = make_problem(kind, range(2), 40, 3, ridge=0.1)
    fewer = make_problem(kind, range(1), 15, 3, ridge=0.1)
    assert torch.equal(problem.features[:1, :15], fewer.features) and torch.equal(problem.labels[:1, :15], fewer.labels)
    weights = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.func.grad(lambda at: problem.loss(at).sum())(weights)
    torch.testing.assert_close(problem.gradient(weights), expected)
    if kind == "tanh_neuron":
        with pytest.raises(CdgrabError, match="no minimum"):
            _ = problem.minimum
        return
    for _ in range(3000):
        weights -= 0.3 * problem.gradient(weights)
    torch.testing.assert_close(problem.minimum, problem.loss(weights), rtol=1e-12, atol=0)


def test_labels_have_the_stated_noise_and_coins_the_stated_odds():
    exact, noisy = (make_problem("least_squares", range(1), 20_000, 4, noise=noise) for noise in (0, 0.5))
    assert float((noisy.labels - exact.labels).std()) == pytest.approx(0.5, rel=0.03)
    coins = make_problem("logistic", range(1), 20_000, 4)
    odds = torch.sigmoid(exact.labels)  # the same weights and features
    assert float((coins.labels * exact.labels).mean()) == pytest.approx(float((odds * exact.labels).mean()), abs=0.02)
    with pytest.raises(CdgrabError, match="the problems are least_squares, logistic, tanh_neuron"):
        make_problem("quadratic", range(1), 2, 2)


def test_an_epoch_leaves_weights_where_its_own_gradients_lead():
    problem = make_problem("logistic", range(2), 12, 3)
    weights = torch.zeros(2, 3, dtype=torch.float64)
    gradients = sgd_epoch(problem, weights, torch.arange(12).view(1, 4, 3).expand(2, 4, 3), rate=0.2)
    torch.testing.assert_close(weights, -0.2 * gradients.mean(2).sum(1))
