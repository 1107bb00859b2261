"""Herding bounds against the oracle and by hand, and what the theory says that sorters do to them."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sorter_cases import make

from cdgrab import CdgrabError
from cdgrab.balance import reference
from cdgrab.herding import herding_bound, parallel_herding_bound

both_maxima = pytest.mark.parametrize("per_vector", [False, True], ids=["per_step", "per_vector"])


def random_vectors(workers, units, dim=16, seed=0):
    """The paper's Figure 10 in small: Unif(0, 1), centred, then each of length 1."""
    vectors = torch.rand(workers * units, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    vectors -= vectors.mean(0)
    return (vectors / vectors.norm(dim=1, keepdim=True)).reshape(workers, units, dim)


def bounds_by_round(name, vectors, rounds):
    """Parallel herding bound of the first order and after every reorder round of the same vectors."""
    sorter, bounds = make(name, *vectors.shape), []
    for epoch in range(rounds + 1):
        order = sorter.order(epoch)
        bounds.append(parallel_herding_bound(vectors, order))
        sorter.observe(range(vectors.shape[1]), vectors.gather(1, order[..., None].expand_as(vectors)))
    return bounds


# -- the bounds -------------------------------------------------------------------------------------------------------


def test_bounds_by_hand():
    """Mean (2, 0). Worker 0 visits (5, 0), (1, 0); worker 1 visits (1, 3), (1, −3): centred (3, 0), (−1, 3), (−1, 0),
    (−1, −3), so that the partial sums are (3, 0), (2, 3), (1, 3), (0, 0)."""
    vectors = torch.tensor([[[1.0, 0.0], [5.0, 0.0]], [[1.0, 3.0], [1.0, -3.0]]])
    order = torch.tensor([[1, 0], [0, 1]])
    assert parallel_herding_bound(vectors, order) == 3.0
    assert parallel_herding_bound(2 * vectors[:, :, :1], order) == 4.0  # first coordinate: 2 after the step …
    assert parallel_herding_bound(2 * vectors[:, :, :1], order, per_vector=True) == 6.0  # … and 3 inside it
    assert herding_bound(vectors[1], torch.tensor([1, 0])) == 3.0
    assert herding_bound(vectors[0]) == 2.0


@both_maxima
@given(seed=st.integers(0, 2**32), workers=st.integers(1, 6), units=st.integers(1, 20), dim=st.integers(1, 5))
def test_bounds_equal_the_oracle(per_vector, seed, workers, units, dim):
    rng = np.random.default_rng(seed)
    vectors = rng.normal(1.0, 1.0, (workers, units, dim))
    order = [rng.permutation(units).tolist() for _ in range(workers)]
    bound = parallel_herding_bound(torch.from_numpy(vectors), torch.tensor(order), per_vector=per_vector)
    assert isinstance(bound, float)
    assert bound == pytest.approx(reference.parallel_herding_bound(vectors, order, per_vector), rel=1e-9, abs=1e-12)


@both_maxima
def test_no_order_means_as_given(per_vector):
    vectors = random_vectors(3, 10)
    as_given = parallel_herding_bound(vectors, torch.arange(10).expand(3, 10), per_vector)
    assert parallel_herding_bound(vectors, per_vector=per_vector) == as_given


def test_float32_vectors_are_summed_in_float64():
    """Around 1e4, sums of 2,000 float32 numbers are off by more than the bound itself."""
    vectors = (random_vectors(2, 1000) + 1e4).float()
    assert parallel_herding_bound(vectors) == parallel_herding_bound(vectors.double())


@pytest.mark.parametrize(
    "vectors, order", [((4, 2), None), ((2, 0, 3), None), ((2, 3, 1), (2, 4)), ((2, 3, 1), (3, 2))]
)
def test_wrong_shapes_are_refused(vectors, order):
    with pytest.raises(CdgrabError, match="shape"):
        parallel_herding_bound(torch.zeros(vectors), None if order is None else torch.zeros(order, dtype=torch.long))


@pytest.mark.parametrize(
    "wrong", ["vectors", None, {}, 10**30, [[1], [1, 2]], torch.ones(1, 2, 3).to_sparse(), torch.ones(1, 2, 3) * 1j]
)
def test_what_is_no_tensor_of_numbers_is_refused(wrong):
    """Found by make fuzz."""
    vectors = torch.ones(1, 2, 3)
    for bad in ({"vectors": wrong}, {"vectors": vectors, "order": wrong}, {"vectors": vectors, "per_vector": wrong}):
        if bad.get("order", "") is not None:  # that is the order as given
            with pytest.raises(CdgrabError, match="must be"):
                parallel_herding_bound(**bad)


# -- the theory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, workers", [("grab", 1), ("grab_pair", 1), ("cd_grab", 1), ("cd_grab", 10)])
def test_one_reorder_round_halves_the_bound_down_to_a_small_floor(name, workers):
    bounds = bounds_by_round(name, random_vectors(workers, 20_000 // workers), rounds=10)
    assert bounds[0] > 30
    assert all(after <= before / 2 + 2.5 for before, after in pairwise(bounds)), bounds
    assert bounds[-1] <= 3.5


def test_random_reshuffling_stays_where_it_is():
    vectors = random_vectors(10, 2000)
    sorter = make("d_rr", *vectors.shape)
    assert min(parallel_herding_bound(vectors, sorter.order(epoch)) for epoch in range(5)) > 30


def test_the_floor_grows_with_workers_for_id_grab_and_not_for_cd_grab():
    floors = {
        name: [min(bounds_by_round(name, random_vectors(workers, 20_000 // workers), rounds=10)) for workers in (4, 64)]
        for name in ("cd_grab", "id_grab_pair", "id_grab_bal")
    }
    assert max(floors["cd_grab"]) <= 3.5
    for name in ("id_grab_pair", "id_grab_bal"):  # √(64/4) = 4 in theory
        few, many = floors[name]
        assert many > 2.5 * few and many > 3 * floors["cd_grab"][1]
