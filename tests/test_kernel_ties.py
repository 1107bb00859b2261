"""Ties and near ties: signs are the same whichever kernel decides them, and whether rows are whole or divided."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_cases import dtypes, long_rows_by
from shards import Shards
from sorter_cases import nearly_tied, normal

from cdgrab.balance import kernels
from cdgrab.balance import rules as balance


def cancelling_rows(positions, workers, dim, dtype):
    """A zero row, then pairs of equal ones: the running sum is exactly zero after each. Blocks end inside a pair."""
    rows = normal(positions * workers, dim, dtype=dtype)
    rows[0], rows[2::2] = 0.0, rows[1:-1:2]
    signs = [1, *[1, -1] * ((len(rows) - 1) // 2), 1][: len(rows)]
    return rows.view(positions, workers, dim), torch.tensor(signs, dtype=torch.int8).view(positions, workers)


def assert_ties(module, device, rows, expected):
    limits = torch.zeros(expected.shape, dtype=torch.float64, device=device)
    running = torch.zeros(1, rows.shape[2], dtype=torch.float64, device=device)
    assert torch.equal(module.balance(rows.to(device), running, limits).cpu(), expected)


def test_rows_that_cancel_are_ties_on_a_gpu(on_gpu):
    for module, device in ((balance, "cpu"), on_gpu):
        assert_ties(module, device, *cancelling_rows(40, 1, 23, torch.float32))
        for workers, dim in ((1, 23), (6, 600)):
            assert_ties(module, device, *cancelling_rows(40 // workers, workers, dim, torch.float64))


@dtypes
@pytest.mark.parametrize("workers", [1, 4, 6])
@pytest.mark.parametrize("dim", [19, 600, 9000])
@pytest.mark.parametrize("how", ["plain", "numba", "gram", "gram without numba", "divided"])
def test_rows_that_cancel_are_ties(how, dim, workers, dtype, monkeypatch):
    """Also in blocks of rows, where inner products are sums that leave a few last bits instead of zero."""
    module = {"plain": balance, "gram": kernels.gram, "gram without numba": kernels.gram}.get(how)
    if how == "gram without numba":
        monkeypatch.setattr(kernels.gram, "fastest_recursion", lambda: kernels.gram.recursion)
    module = module or long_rows_by(how, monkeypatch)
    assert_ties(module, "cpu", *cancelling_rows(72 // workers, workers, dim, dtype))


def near_ties(kind, rng, shape):
    """Rows [positions, workers, dim] whose inner products are, or nearly are, zero."""
    if kind == "tiny":
        return nearly_tied(rng, *shape, tiny=10.0 ** rng.integers(-20, -5))
    if kind == "tenths":
        return rng.integers(-2, 3, size=shape) / 10
    signs = rng.choice([-1, 1], (*shape[:2], 1))
    if kind == "repeated":
        return rng.normal(size=(3, shape[2]))[rng.integers(3, size=shape[:2])] * signs
    rows = rng.normal(size=shape)
    return rows + signs * rows[..., ::-1] if kind == "mirrored" else rows


@given(
    st.sampled_from(["tiny", "tenths", "repeated", "mirrored", "random"]),
    st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 3, 4, 7, 33]), st.sampled_from([1, 5, 513, 2049, 9001])),
    st.integers(2, 4),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
    st.integers(0, 2**32),
)
@example("tiny", (20, 2, 40_000), 2, torch.float64, False, 0)
def test_shards_give_the_signs_of_whole_rows_also_at_near_ties(kind, shape, processes, dtype, walk, seed):
    rng = np.random.default_rng(seed)
    rows = torch.from_numpy(near_ties(kind, rng, shape)).to(dtype)
    limits = 1e-12 * walk * torch.from_numpy(rng.uniform(-1, 1, shape[:2]))
    alone = torch.zeros(1, shape[2], dtype=torch.float64)
    shards = Shards([part.shape[2] for part in rows.tensor_split(processes, 2)])
    signs, divided = shards.balance(kernels.balance_divided, rows, alone.clone(), limits)
    expected = kernels.balance(rows, alone, limits)
    assert all(torch.equal(its_signs, expected) for its_signs in signs) and torch.equal(divided, alone)
