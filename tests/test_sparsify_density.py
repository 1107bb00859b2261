"""Density, imbalance and build-up of sparsifiers, also as their reference has them."""

import math

import numpy as np
import pytest
import torch

from cdgrab.sparsify import make_sparsifier
from experiments.studies.synthetic import LayeredGradients


def ratios(found, gradients, iterations, scale=lambda step: 1.0):
    """Actual density / target of every iteration."""
    kept = []
    for step in range(iterations):
        found.reduce(gradients() * scale(step))
        kept.append(found.stats.density / found.density)
    return np.array(kept)


def settled(kept, within=0.1, length=20):
    """The first iteration from which the density stays within 10 % for 20 iterations."""
    return next(t for t in range(len(kept)) if (abs(kept[t : t + length] - 1) <= within).all())


@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_density_holds_from_the_start_whatever_the_scale(scale):
    for density, dim in ((0.01, 20_000), (0.001, 100_000)):
        found = make_sparsifier("exdyna", workers=8, dim=dim, density=density)
        kept = ratios(found, LayeredGradients(8, dim), 15, lambda step: scale)
        assert (abs(kept[2:] - 1) <= 0.1).mean() >= 0.95


TIES = {
    "ones": lambda generator: torch.ones(4, 2000),
    "signs": lambda generator: torch.randint(2, (4, 2000), generator=generator) * 2.0 - 1,
    "counts": lambda generator: torch.poisson(torch.full((4, 2000), 0.3), generator=generator),
}


@pytest.mark.parametrize("case, feedback", [("ones", True), ("ones", False), ("signs", True), ("counts", True)])
def test_density_is_limited_and_mostly_holds_although_magnitudes_are_equal(case, feedback):
    """Never above the limit, and rarely far below it: when one worker's part alone has the largest residuals."""
    options = {"density": 0.05, "error_feedback": feedback}
    found, generator = make_sparsifier("exdyna", workers=4, dim=2000, **options), torch.Generator().manual_seed(0)
    kept = ratios(found, lambda: TIES[case](generator), 40)
    assert kept.max() <= 4 * round(1.1 * 25) / 100 + 1e-9 and (kept >= 0.9).mean() >= 0.95
    assert (kept.min() < 0.8) == (case == "ones" and feedback)


def test_targets_are_rounded_down_but_not_by_the_error_of_a_product():
    for density, dim, target in ((0.29, 100, 29), (0.01, 1_081_760, 10_817), (0.001, 5, 1), (1.0, 7, 7)):
        assert make_sparsifier("topk", workers=1, dim=dim, density=density).target == target


def test_nobody_selecting_is_no_imbalance():
    found = make_sparsifier("hard_threshold", workers=4, dim=100, value=2.0)
    found.reduce(torch.ones(4, 100))
    assert found.stats.counts == [0] * 4 and found.stats.imbalance == 0


def test_density_at_64_workers_and_loads_even_out():
    found, imbalances = make_sparsifier("exdyna", workers=64, dim=40_000, density=0.01), []
    gradients = LayeredGradients(64, 40_000)
    for _ in range(40):
        found.reduce(gradients())
        imbalances.append(found.stats.imbalance)
        assert found.stats.density <= 1.1 * 0.01 and max(found.stats.counts) <= 7
    assert found.stats.density >= 0.9 * 0.01 and np.mean(imbalances[20:]) <= 0.2


@pytest.mark.parametrize("density", [0.003, 0.02])
def test_density_holds_where_few_workers_have_all_that_is_large(density):
    """In each iteration others: no partition could share it out beforehand."""
    found = make_sparsifier("exdyna", workers=16, dim=16_000, density=density, blocks=64, error_feedback=False)
    generator = torch.Generator().manual_seed(0)

    def gradients():
        large = torch.randperm(64, generator=generator)[:5]
        sizes = torch.ones(64).index_fill(0, large, 30.0).repeat_interleave(250)
        return sizes * torch.randn(16, 16_000, generator=generator)

    kept = ratios(found, gradients, 60)
    assert kept[20:].mean() == pytest.approx(1, abs=0.05) and kept[20:].max() <= 1.5
    assert 2 < max(found.stats.counts) / (found.target / 16) <= 1.1 * 4


@pytest.mark.parametrize("threshold", ["counted", "paper"])
def test_who_had_nothing_to_send_soon_sends_no_more_than_others(threshold):
    options = {"density": 0.01, "threshold": threshold, "error_feedback": False}
    found, generator = make_sparsifier("exdyna", workers=8, dim=20_000, **options), torch.Generator().manual_seed(0)
    ratios(found, lambda: 1e-5 * torch.randn(8, 20_000, generator=generator) * (torch.arange(20_000) < 100), 30)
    kept = ratios(found, lambda: torch.randn(8, 20_000, generator=generator), 20)
    assert kept.max() <= 2.1 and kept[10:].max() <= 8 * round(1.1 * 25) / 200 + 1e-9


def test_threshold_rules_settle_as_fast_as_in_the_reference():
    """Reference, other made-up gradients: 33 iterations for the proportional rule, 232 for the paper's."""
    settling, scale = {}, 1.0
    for threshold, iterations in (("counted", 60), ("proportional", 80), ("paper", 420)):
        found = make_sparsifier("exdyna", workers=8, dim=60_000, threshold=threshold, rule="relative")
        settling[threshold] = settled(ratios(found, LayeredGradients(8, 60_000), iterations, lambda _, s=scale: s))
        if threshold == "counted":  # the paper's start is right for one scale; be off by a factor of three for the rest
            scale = 3 * 0.5 / math.sqrt(600) / found.stats.threshold
    assert settling["counted"] <= 2 and 10 <= settling["proportional"] <= 60 and 100 <= settling["paper"] <= 400


@pytest.mark.parametrize("factor", [100.0, 0.01])
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("threshold, within", [("counted", 0.15), ("proportional", 0.5)])
def test_survives_a_sudden_change_of_scale(factor, feedback, threshold, within):
    options = {"threshold": threshold, "error_feedback": feedback}
    found = make_sparsifier("exdyna", workers=4, dim=20_000, density=0.01, **options)
    kept = ratios(found, LayeredGradients(4, 20_000), 100, lambda step: factor if step >= 40 else 1.0)
    after = kept[40:] if threshold == "counted" else kept[60:]
    assert (abs(after - 1) <= within).mean() >= 0.9


def test_imbalance_by_rule_is_ordered_as_in_the_reference():
    """Reference, 8 workers: static 1.43, the paper's rule 0.91, the relative rule 0.09."""
    found = {}
    for rule in ("static", "paper", "relative", "balanced"):
        sparsifier, imbalances = make_sparsifier("exdyna", workers=8, dim=20_000, rule=rule), []
        gradients = LayeredGradients(8, 20_000, layers=24, decades=1.0)
        for _ in range(100):
            sparsifier.reduce(gradients())
            imbalances.append(sparsifier.stats.imbalance)
        found[rule] = np.mean(imbalances[60:])
    assert found["static"] > found["paper"] > found["relative"] > found["balanced"] and found["balanced"] <= 0.15


def test_build_up_is_that_of_the_reference():
    """Top-k's union grows with the workers, that of exclusive selection does not."""
    for workers, reference in ((2, 1.9), (4, 3.3), (8, 5.3), (16, 8.6)):
        topk = make_sparsifier("topk", workers=workers, dim=16_000)
        kept = ratios(topk, LayeredGradients(workers, 16_000), 30)
        assert kept[20:].mean() == pytest.approx(reference, rel=0.2)
    for name in ("exdyna", "micro", "deft", "cltk"):
        kept = ratios(make_sparsifier(name, workers=16, dim=16_000), LayeredGradients(16, 16_000), 30)
        assert kept[20:].mean() == pytest.approx(1.0, abs=0.1), name
    hard = make_sparsifier("hard_threshold", workers=16, dim=16_000)
    sidco = make_sparsifier("sidco", workers=16, dim=16_000)
    assert ratios(hard, LayeredGradients(16, 16_000), 20)[-1] > 2
    assert 1.7 <= ratios(sidco, LayeredGradients(16, 16_000), 60)[40:].mean() <= 12
