"""Sign rules, reordering, and the random streams behind the draws."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sorter_cases import assert_independent, make, normal, run, uniform

from cdgrab import streams
from cdgrab.balance import kernels, reference
from cdgrab.balance import rules as balance

DRAWS = 20_000


def assert_close_to_frequency(frequency, probability):
    """Within four standard deviations; the draws are seeded, so this never flickers."""
    assert abs(frequency - probability) <= 4 * math.sqrt(probability * (1 - probability) / DRAWS)


# -- sign rules -------------------------------------------------------------------------------------------------------


def signs_of(running, vectors, limits):
    """Those of the plain loop, each vector against a running sum of its own."""
    rows = torch.tensor(vectors, dtype=torch.float64)[None]
    sums = torch.tensor(running, dtype=torch.float64).repeat(len(vectors), 1)
    found = balance.balance(rows, sums, torch.as_tensor(limits, dtype=torch.float64).expand(1, len(vectors)))
    return found[0].tolist()


def test_greedy_signs_oppose_the_running_sum_and_ties_go_to_plus():
    assert signs_of([1.0, -2.0], [[1.0, 0.0], [0.0, 1.0], [2.0, 1.0], [0.0, 0.0]], 0.0) == [-1, 1, 1, 1]


@pytest.mark.parametrize("share", [-0.9, -0.3, 0.0, 0.5, 1.0])
def test_walk_takes_plus_with_probability_half_minus_inner_over_twice_the_width(share):
    width, running, vector = 4.0, [2.0, 0.0], [2.0 * share, 1.0]  # inner = share·width
    draws = streams.symmetric_uniform(DRAWS, 0, "walk", 0, 0)
    rows = torch.tensor(vector, dtype=torch.float64).expand(1, DRAWS, 2).contiguous()
    sums = torch.tensor(running, dtype=torch.float64).repeat(DRAWS, 1)  # as many workers as draws
    signs = kernels.balance(rows, sums, width * draws[None])[0]
    assert_close_to_frequency(float((signs == 1).double().mean()), 0.5 - share / 2)
    assert signs[:50].tolist() == signs_of(running, [vector] * 50, width * draws[:50])


def test_walking_sorters_follow_the_same_law():
    """With differences a, b the second sign agrees with the first with probability 1/2 − ab/(2w)."""
    a, b, width = 2.0, 3.0, 10.0
    sorter = make("id_grab_pair", DRAWS, 4, 1, initial="identity", rule="walk", walk_width=width)
    new = run(sorter, torch.tensor([a, 0.0, b, 0.0]).expand(1, DRAWS, 4)[..., None])[1]
    first, second = new[:, 0] == 0, new[:, 1] == 2
    assert_close_to_frequency(float(first.double().mean()), 0.5)
    assert_close_to_frequency(float((first == second).double().mean()), 0.5 - a * b / (2 * width))


def test_kh_threshold_and_penalties_by_hand():
    assert balance.kh_threshold(0.0, 4.0, 3.0) == (4.0, 8.0)  # rho = 0
    assert balance.kh_threshold(2.0, 6.0, 3.0) == (6.0, 12.0)  # rho = 1, still the first branch
    assert balance.kh_threshold(12.0, 1.0, 3.0) == (6.0, 12.0)  # rho = 36: max(3.5 − 6, 0) = 0
    assert balance.kh_threshold(3.0, 1.0, 3.0) == (3.0, 3.0 + 2.0 * 0.5 / 3.0)  # rho = 9: 3.5 − 3 = 0.5
    assert balance.kh_threshold(5.0, 0.0, 3.0) == (0.0, 5.0)  # equal gradients
    penalties = balance.kh_penalties(2, epoch=3, epochs=10, delta=0.25)
    inside = 16 * (math.log(10) + 1) * (math.log(2) + 1) * 3
    torch.testing.assert_close(penalties, torch.tensor([math.log(inside), math.log(2 * inside)], dtype=torch.float64))
    assert len(balance.kh_penalties(0, epoch=1, epochs=1)) == 0


# -- reordering -------------------------------------------------------------------------------------------------------


def test_reorder_by_hand():
    order = torch.tensor([[4, 2, 0, 1, 3], [0, 1, 2, 3, 4]])
    signs = torch.tensor([[1, -1, -1, 1, -1], [-1, -1, -1, -1, -1]], dtype=torch.int8)
    assert balance.reorder(order, signs).tolist() == [[4, 1, 3, 0, 2], [4, 3, 2, 1, 0]]
    pair_signs = torch.tensor([[1, -1], [-1, 1]], dtype=torch.int8)
    assert balance.reorder_pairs(order, pair_signs).tolist() == [[4, 1, 3, 0, 2], [1, 2, 4, 3, 0]]


@given(seed=st.integers(0, 2**32), workers=st.integers(1, 7), units=st.integers(1, 40))
def test_pair_form_equals_two_fingers_moving_inwards(seed, workers, units):
    rng = np.random.default_rng(seed)
    order = torch.from_numpy(np.stack([rng.permutation(units) for _ in range(workers)]))
    signs = torch.from_numpy(rng.choice([-1, 1], size=(workers, units // 2))).to(torch.int8)
    expected = [reference.place_pairs(*row) for row in zip(order.tolist(), signs.tolist(), strict=True)]
    assert balance.reorder_pairs(order, signs).tolist() == expected


@pytest.mark.parametrize("sums", [1, 3], ids=["shared", "own"])
def test_plain_balance_applies_the_sign_rule_one_by_one(sums):
    rows, draws = normal(20, 3, 4), uniform(20, 3)
    running, by_hand = torch.zeros(sums, 4, dtype=torch.float64), torch.zeros(sums, 4, dtype=torch.float64)
    signs = balance.balance(rows, running, 2.0 * draws)
    for k in range(20):
        for w in range(3):
            r = by_hand[w % sums]
            sign = (
                1 if sum(a * b for a, b in zip(r.tolist(), rows[k, w].tolist(), strict=True)) <= 2 * draws[k, w] else -1
            )
            assert sign == signs[k, w]
            r += sign * rows[k, w]
    assert torch.equal(running, by_hand)


# -- random streams ---------------------------------------------------------------------------------------------------


def test_streams_differ_by_seed_purpose_worker_and_epoch_and_repeat_themselves():
    keys = [(seed, purpose, w, e) for seed in (0, 1) for purpose in streams.PURPOSES for w in (0, 1) for e in (0, 1)]
    assert_independent([streams.permutation(500, *key) for key in keys])
    assert torch.equal(streams.permutation(500, *keys[0]), streams.permutation(500, *keys[0]))


def test_walk_draws_are_uniform_on_minus_one_to_one_and_uncorrelated_across_workers_and_epochs():
    draws = torch.stack([streams.symmetric_uniform(DRAWS, 0, "walk", w, e) for w in range(3) for e in range(3)])
    assert draws.min() >= -1 and draws.max() < 1
    moments = torch.stack([draws.mean(1), draws.pow(2).mean(1) - 1 / 3])
    assert moments.abs().max() < 4 / math.sqrt(DRAWS)
    assert (torch.corrcoef(draws) - torch.eye(9)).abs().max() < 4 / math.sqrt(DRAWS)
