"""Sparsifiers against oracles that do the same one by one."""

import math
from itertools import pairwise

import numpy as np
import pytest
import sparsify_oracles as oracles
import torch
from hypothesis import given
from hypothesis import strategies as st
from sparsify_oracles import as_sets, gradients_of

from cdgrab.sparsify import make_sparsifier
from cdgrab.sparsify import threshold as thresholds
from cdgrab.sparsify.deft import allot, deal, pieces
from cdgrab.sparsify.partitions import balanced, block_edges, equal_runs, partition_edges

PAPER = {"threshold": "paper"}
FEEDBACK = [{}, {"error_feedback": False}, {"momentum_correction": 0.6, "warm_up_steps": 5, "warm_up_density": 0.3}]
ORACLES = {
    "dense": ("dense", {}, oracles.dense, {}),
    "topk": ("topk", {}, oracles.topk, {}),
    "cltk": ("cltk", {}, oracles.cltk, {}),
    "hard_threshold": ("hard_threshold", {}, oracles.hard_threshold, {}),
    "sidco": ("sidco", {}, oracles.sidco, {}),
    "deft": ("deft", {}, oracles.deft, {}),
    "deft, layers": ("deft", {"layers": 3}, oracles.deft, {"layers": 3}),
    "micro": ("micro", PAPER, oracles.exdyna, PAPER | {"rule": "static", "micro": True}),
    "exdyna, paper": ("exdyna", PAPER | {"rule": "paper", "blocks": 24}, oracles.exdyna, None),
    "exdyna, relative": ("exdyna", PAPER | {"rule": "relative", "blocks": 24}, oracles.exdyna, None),
    "exdyna, static": ("exdyna", PAPER | {"rule": "static", "blocks": 24}, oracles.exdyna, None),
    "exdyna, proportional": (
        "exdyna",
        {"threshold": "proportional", "rule": "relative", "blocks": 24},
        oracles.exdyna,
        None,
    ),
    "exdyna, counted": ("exdyna", {"threshold": "counted", "rule": "relative", "blocks": 24}, oracles.exdyna, None),
    "exdyna, fixed": ("exdyna", {"threshold": "fixed", "rule": "relative", "blocks": 24}, oracles.exdyna, None),
}
# workers, dim, density, iterations: unequal blocks, one worker, aligned blocks, fewer coordinates than workers
SHAPES = [(4, 120, 0.05, 40), (1, 101, 0.1, 8), (3, 1571, 0.02, 6), (8, 5, 0.2, 6)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", ORACLES)
def test_equals_its_oracle(case, shape):
    workers, dim, density, iterations = shape
    name, options, method, oracle_options = ORACLES[case]
    oracle_options = options if oracle_options is None else oracle_options
    if "layers" in options:
        options = oracle_options = {"layers": [1, dim // 2, dim - dim // 2 - 1]}
    for feedback in FEEDBACK[:1] if name == "dense" else FEEDBACK:
        found = make_sparsifier(name, workers=workers, dim=dim, density=density, **options, **feedback)
        oracle = oracles.Oracle(method, workers, dim, density, **oracle_options, **feedback)
        for step, gradients in enumerate(gradients_of(iterations, workers, dim)):
            update = found.reduce(torch.from_numpy(gradients))
            expected, sets = oracle.reduce(gradients)
            assert as_sets(found.selected) == sets, (step, feedback)
            np.testing.assert_allclose(update.numpy(), expected, rtol=1e-12, atol=1e-13)
            assert found.stats.density == len(set().union(*sets)) / dim
            assert found.stats.counts == [len(chosen) for chosen in sets]


def test_faithful_exdyna_is_the_published_one():
    size = {"workers": 5, "dim": 799, "density": 0.1, "blocks": 23}
    found, oracle = make_sparsifier("exdyna", **size, faithful=True), oracles.Oracle(oracles.exdyna_published, **size)
    for step, gradients in enumerate(gradients_of(60, 5, 799, scale=0.005)):
        update = found.reduce(torch.from_numpy(gradients))
        expected, sets = oracle.reduce(gradients)
        assert as_sets(found.selected) == sets, step
        np.testing.assert_allclose(update.numpy(), expected, rtol=1e-12, atol=1e-13)
    near_the_target = {(1.00125, True), (1.00125, False)}
    assert {"moved", "refused", (0.995, False), *near_the_target} <= oracle.memory["steps"]


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("rule", ["static", "balanced"])
def test_counted_threshold_is_the_quantile_that_sorting_gives(workers, rule):
    found = make_sparsifier("exdyna", workers=workers, dim=3000, density=0.02, rule=rule)
    residual, aim = np.zeros((workers, 3000)), 1.0
    for step, gradients in enumerate(gradients_of(30, workers, 3000)):
        accumulated, edges = residual + gradients, found.partitions()
        assert edges[0] == 0 and edges[-1] == 3000 and all(b > a for a, b in pairwise(edges))
        examined = {}
        for worker in range(workers):
            partition = (step + worker) % workers
            examined[worker] = range(edges[partition], edges[partition + 1])
        magnitudes = sorted(abs(accumulated[w, j]) for w, own in examined.items() for j in own)
        update = found.reduce(torch.from_numpy(gradients))
        assert found.stats.threshold == pytest.approx(magnitudes[-math.ceil(60 * min(aim, 2))], rel=0.01)
        most = max(math.ceil(60 / workers), round(1.1 * max(1, aim / 2) * 60 / workers))
        expected = [{j for j in own if abs(accumulated[w, j]) >= found.stats.threshold} for w, own in examined.items()]
        if rule == "balanced":
            ranked = [sorted(chosen, key=lambda j: -abs(accumulated[w, j])) for w, chosen in enumerate(expected)]
            expected = [set(chosen[:most]) for chosen in ranked]
        expected = [c or {examined[w][step % len(examined[w])]} for w, c in enumerate(expected)]
        assert as_sets(found.selected) == expected
        union = sorted(set().union(*expected))
        if rule == "balanced":  # more has to reach the threshold where workers are held back
            highest = 8 if max(map(len, expected)) >= most else max(aim, 2)
            aim = min(max(aim * (60 / len(union)) ** 0.5, 1), highest)
        np.testing.assert_allclose(update.numpy()[union], accumulated[:, union].mean(0), rtol=1e-12, atol=1e-13)
        residual = accumulated
        residual[:, union] = 0


@pytest.mark.parametrize("threshold", ["counted", "proportional"])
@pytest.mark.parametrize("feedback", [True, False])
def test_equal_magnitudes_pass_together_as_in_the_oracle(threshold, feedback):
    options = {"rule": "static", "threshold": threshold, "error_feedback": feedback}
    found = make_sparsifier("exdyna", workers=4, dim=500, density=0.1, blocks=24, **options)
    oracle = oracles.Oracle(oracles.exdyna, 4, 500, 0.1, blocks=24, **options)
    rng = np.random.default_rng(0)
    for step in range(40):
        gradients = rng.poisson(0.3, size=(4, 500)) * (1.0 if step < 20 else 0.01)
        found.reduce(torch.from_numpy(gradients))
        assert as_sets(found.selected) == oracle.reduce(gradients)[1], step


@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(0, 30))
def test_balanced_cuts_are_as_near_to_even_shares_as_blocks_allow(seed, workers, more):
    loads = np.random.default_rng(seed).exponential(size=workers + more).tolist()
    assert balanced(loads, workers) == oracles.balanced_cuts(loads, workers)


@given(st.integers(1, 70_000), st.integers(1, 40), st.integers(1, 1024))
def test_partitions_cover_the_vector_evenly(dim, workers, blocks):
    blocks = min(max(blocks, workers), dim)
    edges = block_edges(dim, blocks)
    lengths = [b - a for a, b in pairwise(edges)]
    assert len(lengths) == blocks and sum(lengths) == dim and min(lengths) >= 1
    assert max(lengths) - min(lengths) <= 64 and (max(lengths) <= 2 * min(lengths) or dim < 2 * blocks)
    partitions = partition_edges(edges, equal_runs(blocks, workers))
    assert partitions[0] == 0 and partitions[-1] == dim and len(partitions) == workers + 1
    assert balanced([0.0] * blocks, workers) == equal_runs(blocks, workers)


@given(st.integers(0, 10_000), st.integers(1, 12), st.booleans())
def test_deft_allots_everything_and_nothing_twice(seed, count, some_zero):
    rng = np.random.default_rng(seed)
    sizes, weights = rng.integers(1, 30, size=count), rng.exponential(size=count)
    if some_zero:
        weights[rng.integers(count, size=count)] = 0
    total = int(rng.integers(1, sizes.sum() + 1))
    counts = allot(total, weights, sizes)
    assert counts.sum() == total and (counts >= 0).all() and (counts <= sizes).all()
    workers = int(rng.integers(1, 6))
    spans = pieces(sizes.tolist(), workers)
    assert [a for a, _ in spans[1:]] == [b for _, b in spans[:-1]] and spans[-1][1] == sizes.sum()
    assert max(b - a for a, b in spans) <= math.ceil(sizes.sum() / workers)
    assert set(deal(np.array([b - a for a, b in spans], dtype=float), workers)) <= set(range(workers))


def test_deft_has_no_empty_pieces_however_many_workers_there_are():
    assert pieces([3, 1], 10**9) == [(0, 1), (1, 2), (2, 3), (3, 4)] and pieces([5, 1], 2) == [(0, 2), (2, 5), (5, 6)]


@pytest.mark.parametrize("together", [60, 59])
def test_counting_counts(together, monkeypatch):
    monkeypatch.setattr(thresholds, "TOGETHER", together)  # all at once, or one by one
    vectors = [torch.randn(57), torch.randn(0), torch.tensor([0.5, -0.5, 0.0])]
    values = [0.25, 0.5, 1.0, 7.0]
    expected = [sum(int((v.abs() >= value).sum()) for v in vectors) for value in values]
    assert thresholds.count_reaching(vectors, values).tolist() == expected


@pytest.mark.parametrize("together", [True, False])
def test_places_that_reach_a_threshold_are_the_same_one_by_one(together, monkeypatch):
    monkeypatch.setattr(thresholds, "TOGETHER", 1 << 20 if together else 0)
    vectors = [torch.randn(57), torch.randn(0), torch.tensor([0.5, -0.5, 0.0]), torch.zeros(4), torch.randn(31)]
    for threshold in (0.5, 1.0, 9.0):
        expected = [[place for place, value in enumerate(v.tolist()) if abs(value) >= threshold] for v in vectors]
        assert [found.tolist() for found in thresholds.reaching_each(vectors, threshold)] == expected
