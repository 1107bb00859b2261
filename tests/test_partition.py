"""Label-skewed partitions: every unit once, equal shares, and as skewed as they should be."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cdgrab.errors import CdgrabError
from experiments.tasks import make_task
from experiments.tasks.partition import apportion, class_counts, dirichlet, label_skewed
from experiments.training.config import compose


def split(labels, workers, alpha, seed=0):
    permutation = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return label_skewed(labels, workers, len(labels) // workers, alpha, permutation, seed)


def class_mix(labels, owned, classes):
    """Counts [workers, classes]."""
    return torch.stack([torch.bincount(labels[mine], minlength=classes) for mine in owned])


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    workers=st.integers(1, 7),
    alpha=st.sampled_from([1e-3, 0.05, 1.0, 100.0, 1e9]),
    seed=st.integers(0, 3),
)
def test_no_unit_twice_and_equal_shares(labels, workers, alpha, seed):
    labels = torch.tensor(labels)
    units = len(labels) // workers
    if not units:
        return
    owned = split(labels, workers, alpha, seed)
    assert owned.shape == (workers, units) and owned.flatten().unique().numel() == workers * units
    assert torch.equal(owned, split(labels, workers, alpha, seed))


@given(
    rows=st.integers(1, 6),
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(any),
    seed=st.integers(0, 99),
)
def test_counts_have_the_right_sums(rows, sizes, seed):
    sizes, draws = np.array(sizes), np.random.default_rng(seed)
    wanted = draws.random((rows, len(sizes))) * (draws.random((rows, len(sizes))) < 0.5)  # some want nothing at all
    units = sizes.sum() // rows
    counts = class_counts(wanted, sizes, units)
    assert (counts.sum(1) == units).all() and (counts.sum(0) <= sizes).all() and (counts >= 0).all()


def test_mixes_that_can_be_had_are_given():
    wanted = np.array([[0.5, 0.5, 0.0], [0.0, 0.25, 0.75]])
    assert class_counts(wanted, np.array([4, 6, 6]), 8).tolist() == [[4, 4, 0], [0, 2, 6]]
    # both want all of a class of 6: shared out, and the rest is what is left
    assert class_counts(np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([6, 10]), 8).tolist() == [[3, 5], [3, 5]]


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=8), st.integers(0, 50))
def test_apportioning_is_within_one_of_the_exact_shares(shares, total):
    whole, exact = apportion(np.array(shares), total), total * np.array(shares) / sum(shares)
    assert whole.sum() == total and (abs(whole - exact) < 1 + 1e-9).all()


def test_large_alpha_is_the_mix_of_all_data_and_small_alpha_is_not():
    labels = torch.arange(10).repeat_interleave(200)[torch.randperm(2000, generator=torch.Generator().manual_seed(1))]
    uniform = class_mix(labels, split(labels, 20, 1e9), 10)
    assert (uniform == 10).all()
    skews = [(class_mix(labels, split(labels, 20, alpha), 10).double().std(1).mean()) for alpha in (100, 1, 0.1, 0.02)]
    assert skews == sorted(skews) and skews[0] < 2 and skews[-1] > 20
    uneven = torch.tensor([0] * 300 + [1] * 100)
    assert class_mix(uneven, split(uneven, 4, 1e9), 2).tolist() == [[75, 25]] * 4


def test_draws_are_dirichlet():
    """Mean and variance against the formulas; and tiny concentrations, where plain gamma variables underflow."""
    concentrations = np.array([0.5, 1.0, 2.5])
    drawn, total = dirichlet(concentrations, 20_000, np.random.default_rng(0)), concentrations.sum()
    mean = concentrations / total
    np.testing.assert_allclose(drawn.mean(0), mean, atol=0.01)
    np.testing.assert_allclose(drawn.var(0), mean * (1 - mean) / (total + 1), rtol=0.05)
    tiny = dirichlet(np.full(10, 1e-4), 200, np.random.default_rng(0))
    np.testing.assert_allclose(tiny.sum(1), 1.0)
    assert (tiny.max(1) > 0.99).mean() > 0.95


def test_tasks_deal_out_by_label():
    settings = ["data=embedded", "task.partition=dirichlet", "task.alpha=0.05", "seed=3", "workers=16"]
    run = compose(["task=cifar10", *settings])
    task = make_task(run.config, run.source, torch.device("cpu"))
    permutation = torch.arange(task.train_units)
    owned = task.partition(permutation, seed=3)
    assert owned.shape == (16, task.train_units // 16) and owned.flatten().unique().numel() == owned.numel()
    most = class_mix(task.train_labels, owned, 10).amax(1) / owned.shape[1]
    assert most.mean() > 0.5  # a random split has 0.2
    assert torch.equal(owned, task.partition(permutation, seed=3))
    assert not torch.equal(owned, task.partition(permutation, seed=4))


def test_units_without_labels_are_refused():
    run = compose(["task=mlp_m4", "data=embedded", "+task.alpha=1.0", "task.partition=dirichlet"])
    task = make_task(run.config, run.source, torch.device("cpu"))
    with pytest.raises(CdgrabError, match="needs classes, which the units of mlp_m4 don't have"):
        task.partition(torch.arange(task.train_units))


def test_alpha_is_above_zero():
    with pytest.raises(CdgrabError, match="task.alpha must be a number above 0"):
        compose(["task=lr_hmda", "data=embedded", "task.alpha=0"])
