"""From measurements to verdicts: statistics against known answers, and what they say about a claim."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from experiments.report.statistics import Estimate, counted, estimate, looking, median, paired_p, power_exponents
from experiments.studies.verdicts import Verdict, beyond_chance, judge, judge_every, threshold


# two-sided 5 % points of Student's t, from printed tables
@pytest.mark.parametrize(("count", "t"), [(3, 4.30265), (5, 2.77645), (31, 2.04227), (121, 1.97993)])
def test_intervals_are_students(count, t):
    values = [1.0] * (count - 1) + [1.0 + count]  # mean 2, std √count
    value = estimate(values)
    assert (value.mean, value.seeds) == (2.0, count)
    assert (value.high - 2, 2 - value.low) == pytest.approx((t, t), rel=2e-5)


def test_estimates_by_hand():
    value = estimate([1.0, 2.0, 3.0])  # std 1, 4.30265 / √3 to both sides
    assert (value.mean, value.low, value.high) == pytest.approx((2.0, 2 - 2.48414, 2 + 2.48414), abs=1e-4)
    assert str(value) == "2 [−0.484, 4.48]"
    assert estimate([4.0, 6.0]) == Estimate(5.0, -math.inf, math.inf, 2) and str(estimate([5.0, 7.0])) == "6, 2 seeds"
    assert estimate([math.nan, 5.0]).seeds == 1 and str(estimate([])) == "–"


@pytest.mark.parametrize("looks", [1, 2, 4])
def test_every_look_has_its_share_of_the_errors(looks):
    from scipy.stats import ttest_1samp

    values = [0.5, 2.0, -0.25, 1.0, 3.0]
    with looking(looks):
        value, p = estimate(values), paired_p(values)
    expected = ttest_1samp(values, 0.0)
    assert (value.low, value.high) == pytest.approx(tuple(expected.confidence_interval(1 - 0.05 / looks)), rel=1e-9)
    assert p == pytest.approx(looks * expected.pvalue)


def test_looking_again_and_again_errs_no_more_often_than_looking_once():
    values = np.random.default_rng(0).normal(size=(400, 40))

    def wrong(looks):
        return sum(any(not value.low <= 0 <= value.high for value in map(estimate, some)) for some in looks) / 400

    looks = [[row[:seeds] for seeds in (5, 10, 20, 40)] for row in values]
    with looking(4):
        assert 0.005 < wrong(looks) <= 0.05
    assert wrong(looks) > 0.08  # as if each were the only one


def test_intervals_of_medians_by_hand():
    """Six tosses of a coin are alike in 2 of 64 cases; of twelve at most 2 are heads in 79 of 4,096, or tails."""
    assert median([3.0, 1.0, 2.0, 900.0, 5.0, 4.0]) == Estimate(3.5, 1.0, 900.0, 6)
    assert median(range(5)) == Estimate(2.0, -math.inf, math.inf, 5) and math.isnan(median([]).mean)
    assert median(range(12)) == Estimate(5.5, 2.0, 9.0, 12)
    with looking(4):
        assert median(range(12)) == Estimate(5.5, 1.0, 10.0, 12)


def power_law(exponents, x=(4, 8, 16, 32), noise=0.0):
    rng = np.random.default_rng(0)
    rows = [
        {"seed": seed, "x": value, "y": 7 * value**exponent * math.exp(noise * rng.normal())}
        for seed, exponent in enumerate(exponents)
        for value in x
    ]
    return pd.DataFrame(rows)


def test_exponents_of_power_laws_are_found():
    exponents = [-2.0, -1.5, 0.5, 0.0]
    assert power_exponents(power_law(exponents), "x", "y").tolist() == pytest.approx(exponents, abs=1e-12)
    assert power_exponents(power_law([1.0], x=(4,)), "x", "y").isna().all()  # one point has no slope


def test_the_interval_covers_the_true_exponent_as_often_as_it_says():
    """Not less often, and not more: an interval that is always right says too little."""
    exponents = power_exponents(power_law([-1.0] * 2000, noise=0.3), "x", "y").to_numpy().reshape(400, 5)
    below, above = np.transpose([(e.low > -1.0, e.high < -1.0) for e in map(estimate, exponents)])
    assert 0.01 < below.mean() < 0.04 and 0.01 < above.mean() < 0.04  # 0.025 ± 0.0078 each


@pytest.mark.parametrize(
    ("low", "high", "least", "most", "answer"),
    [
        (-2.7, -2.5, -math.inf, -1.8, "holds"),
        (-2.7, -1.7, -math.inf, -1.8, "undecided"),
        (-1.7, -1.5, -math.inf, -1.8, "fails"),
        (-1.2, -0.8, -1.4, -0.7, "holds"),
        (-1.5, -0.8, -1.4, -0.7, "undecided"),
        (-1.5, -0.5, -1.4, -0.7, "undecided"),
        (-0.6, -0.5, -1.4, -0.7, "fails"),
        (-2.0, -1.5, -1.4, -0.7, "fails"),
        (-0.6, -0.5, -1.4, math.inf, "holds"),
        (-math.inf, math.inf, -1.4, -0.7, "undecided"),
        (-math.inf, math.inf, -math.inf, math.inf, "undecided"),
    ],
)
def test_answers(low, high, least, most, answer):
    measured = Estimate((low + high) / 2 if math.isfinite(low) else -1.0, low, high, 5)
    assert judge("x", measured, least=least, most=most).answer == answer
    blocked = judge("x", measured, "n", "no use", least=least, most=most)
    assert (blocked.answer, blocked.note) == ("undecided", "no use; n")


@pytest.mark.parametrize(
    ("low", "high", "answer"),
    [
        (-0.4, 0.5, "equal"),
        (-0.4, -0.1, "holds"),
        (0.1, 0.4, "fails"),
        (-0.6, 0.1, "undecided"),
        (-0.1, 9, "undecided"),
    ],
)
def test_what_does_not_matter_is_equal(low, high, answer):
    """Around 0, and around 1; a claim that there is more than that is judged likewise."""
    measured = Estimate((low + high) / 2, low, high, 5)
    shifted, mirrored = (
        Estimate(sign * measured.mean, low, high, 5) for sign, low, high in ((1, 1 + low, 1 + high), (-1, -high, -low))
    )
    assert judge("x", measured, most=0.0, margin=0.5).answer == answer
    assert judge("x", shifted, most=1.0, margin=0.5).answer == answer
    assert judge("x", mirrored, least=0.0, margin=0.5).answer == answer
    assert judge("x", measured, least=-9.0, most=0.0, margin=0.5).answer == answer
    assert judge("x", measured, most=0.0).answer == answer.replace("equal", "undecided")
    assert judge("x", measured, unless="no use", most=0.0, margin=0.5).answer == "undecided"
    assert judge("x", measured, most=0.0, margin=0.5).needs_seeds == (answer == "undecided")


def test_both_ends_must_be_near_the_same_limit():
    across = Estimate(0.0, -1.05, 1.05, 5)
    assert judge("x", across, least=-1.0, most=1.0, margin=0.1).answer == "undecided"
    assert judge("x", across, least=-1.0, most=1.0, margin=2.1).answer == "equal"


def test_no_difference_is_called_one_as_rarely_as_it_says():
    """Where the truth lies at the end of the margin, at most 2.5 % are called equal; where it is zero, nearly all."""
    values = np.random.default_rng(0).normal(size=(400, 20))

    def called_equal(truth):
        return np.mean([judge("x", row + truth, most=0.0, margin=1.0).answer == "equal" for row in values])

    assert called_equal(1.0) <= 0.04 and called_equal(0.0) > 0.85


@pytest.mark.parametrize("looks", [1, 4])
@pytest.mark.parametrize("limits", [{"most": 0.0}, {"most": 0.0, "margin": 0.4}, {"least": -0.6, "most": 0.6}])
def test_p_values_decide_as_intervals_do(looks, limits):
    values, answers = np.random.default_rng(1), set()
    with looking(looks):
        for truth in np.linspace(-1.5, 1.5, 150):
            verdict = judge("x", truth + 0.5 * values.normal(size=values.integers(3, 20)), **limits)
            answers.add(verdict.answer)
            assert (verdict.p <= 0.05) == (verdict.answer != "undecided")
    assert {"holds", "fails", "undecided"} <= answers
    assert math.isnan(judge("x", [1.0, 2.0], **limits).p) and math.isnan(judge("x", counted(2.0), **limits).p)
    assert math.isnan(judge("x", [1.0, 2.0, 3.0], unless="no use", **limits).p)
    assert math.isnan(judge("x", [limits["most"]] * 3, **limits).p)  # on every seed: nothing to test


def test_claims_of_a_study_are_adjusted_for_each_other():
    """By hand: of p values 0.01, 0.02 and 0.03 the first is multiplied by 3, the second by 2."""
    claims = [Verdict(name, "holds", "", "", p=p) for name, p in (("a", 0.02), ("b", 0.01), ("c", 0.03))]
    told = beyond_chance([*claims, Verdict("counted", "fails", "", "")])
    assert [verdict.adjusted for verdict in told[:3]] == pytest.approx([0.04, 0.03, 0.04])
    assert [verdict.answer for verdict in told] == ["holds", "holds", "holds", "fails"]
    told = beyond_chance([*claims, *(Verdict("d", "undecided", "", "", "n", p=0.9) for _ in range(3))])
    assert [verdict.answer for verdict in told[:3]] == ["undecided"] * 3 and told[3].note == "n"
    assert told[0].note == "holds by itself (p = 0.02), not among 6 claims"
    assert beyond_chance([replace(claims[1], answer="equal")])[0].answer == "equal"


def test_that_one_of_many_cells_fails_may_be_chance():
    outside = [1.0, 1.4, 1.8, 1.2, 2.4]
    alone = judge("x", outside, most=0.0)
    assert judge_every("x", {"a": outside}, "", most=0.0).p == alone.p
    assert judge_every("x", {name: outside for name in "abc"}, "", most=0.0).p == pytest.approx(3 * alone.p)
    assert math.isnan(judge_every("x", {"a": counted(2.0)}, "", most=0.0).p)


def test_a_claim_about_every_cell_is_as_sure_as_its_least_sure_one():
    """Not always the one nearest to the limit: that may have hardly any spread."""
    near, unsure = [-1.0, -1.01, -0.99], [-9.0, -2.0, -5.0, -7.0]
    verdict = judge_every("x", {"near": near, "unsure": unsure}, "at {cell}", most=0.0)
    assert verdict.answer == "holds" and verdict.p == judge("x", unsure, most=0.0).p > judge("x", near, most=0.0).p


def test_thresholds_are_printed():
    limits = ((-math.inf, -1.8), (2, math.inf), (-1.4, -0.7), (-math.inf, 0.0, 0.5))
    assert [threshold(*some) for some in limits] == ["≤ −1.8", "≥ 2", "−1.4 … −0.7", "≤ 0 (± 0.5)"]


def test_what_is_counted_has_no_interval():
    assert str(counted(2.0)) == "2, counted"
    assert [judge("x", counted(2.0), most=most).answer for most in (2.0, 1.9)] == ["holds", "fails"]


INSIDE, NEARER, ACROSS, FURTHER, OUTSIDE = (
    Estimate(mean, mean - width, mean + width, 5)
    for mean, width in [(-3, 1), (-1, 0.5), (-0.5, 1), (-1, 4), (2, 1)]  # of at most 0
)


@pytest.mark.parametrize(
    ("cells", "answer", "deciding"),
    [
        ({"a": INSIDE, "b": NEARER}, "holds", "b"),
        ({"a": INSIDE, "b": ACROSS, "c": NEARER}, "undecided", "b"),
        ({"a": ACROSS, "b": FURTHER}, "undecided", "b"),  # the smaller mean, the interval that reaches further out
        ({"a": FURTHER, "b": OUTSIDE, "c": INSIDE}, "fails", "b"),
        ({"a": estimate([-1.0]), "b": INSIDE}, "undecided", "a"),
    ],
)
def test_a_claim_about_every_cell_is_decided_by_one(cells, answer, deciding):
    verdict = judge_every("x", cells, "at {cell}", most=0.0)
    note = verdict.note.partition(";")[0]
    assert (verdict.answer, note, verdict.measured) == (answer, f"at {deciding}", str(cells[deciding]))


@pytest.mark.parametrize(
    ("other", "answer", "deciding"), [(INSIDE, "equal", "a"), (FURTHER, "undecided", "b"), (OUTSIDE, "fails", "b")]
)
def test_a_claim_about_every_cell_is_equal_where_one_is_and_the_others_hold(other, answer, deciding):
    verdict = judge_every("x", {"a": ACROSS, "b": other}, "at {cell}", most=0.0, margin=1.5)
    assert (verdict.answer, verdict.note.partition(";")[0]) == (answer, f"at {deciding}")


def test_what_a_decision_would_take_is_said():
    """Twice as far from the limit as it is now: four times the values."""
    assert judge("x", Estimate(-0.5, -1.5, 0.5, 5), most=0.0).note == "about 20 values would decide"
    assert judge("x", Estimate(-0.05, -1.05, 0.95, 5), most=0.0).note == "even 1,000 values would not decide"
    assert judge("x", Estimate(0.95, 0.75, 1.15, 8), least=0.9, most=1.5).note == "about 130 values would decide"
    wide = Estimate(-0.1, -1.1, 0.9, 5)  # nearer to fitting between −0.5 and 0.5 than to excluding 0
    assert judge("x", wide, most=0.0, margin=0.5).note == "about 31 values would decide"
    assert (
        judge("x", wide, most=0.0, margin=0.1).note
        == judge("x", wide, most=0.0).note
        == "about 500 values would decide"
    )
    assert judge("x", [1.0], most=0.0).note == "" and judge("x", [-1.0] * 3, most=0.0).note == ""


def test_claims_with_two_limits_are_decided_by_whatever_is_further_out():
    cells = {"low": Estimate(0.5, 0.4, 0.6, 3), "high": Estimate(1.5, 1.45, 1.55, 3)}
    assert judge_every("x", cells, "{cell}", least=0.85, most=1.15).note == "high"
    cells["low"] = Estimate(0.3, 0.2, 0.4, 3)
    assert judge_every("x", cells, "{cell}", least=0.85, most=1.15).note == "low"
