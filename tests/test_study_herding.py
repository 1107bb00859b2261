"""The study of herding: bounds against the oracle, verdicts of made-up bounds."""

import numpy as np
import pandas as pd
import pytest
import torch
from synthetic_studies import answers, settings_of

import cdgrab
from cdgrab.balance import reference
from experiments.report.published import published
from experiments.studies import herding


def test_random_vectors_are_centred_unit_vectors():
    vectors = herding.random_vectors(5000, 16, seed=3)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(5000, dtype=torch.float64))
    assert float(vectors.mean(0).abs().max()) < 0.01 and float(vectors.std()) == pytest.approx(0.25, rel=0.01)
    assert not torch.equal(vectors, herding.random_vectors(5000, 16, seed=4))


@pytest.mark.parametrize("sorter", ["cd_grab", "id_grab_pair", "id_grab_bal"])
def test_bounds_by_round_are_the_oracles(sorter):
    workers, units, rounds, seed = 3, 10, 4, 2
    vectors = herding.random_vectors(workers * units, 4, seed).view(workers, units, 4)
    orders = cdgrab.make_sorter(sorter, workers=workers, units=units, dim=4, seed=seed).order(0).tolist()
    expected, means = [], np.zeros((workers, 4))
    for _ in range(rounds + 1):
        expected.append(reference.parallel_herding_bound(vectors.numpy(), orders))
        visited = np.stack([vectors[w, order].numpy() for w, order in enumerate(orders)])
        if sorter == "id_grab_bal":
            orders, means = reference.id_grab_bal(orders, visited, means)
        else:
            orders = getattr(reference, sorter)(orders, visited)
    assert herding.bounds_by_round(vectors, sorter, seed, rounds) == pytest.approx(expected, rel=1e-9)


def made_up_herding(settings, factor, growth, ours=1.0):
    """What is above the floor shrinks by `factor`; floors of sorters without coordination grow by `growth`. `ours`:
    CD-GraB's floor beside that of one worker with all vectors."""
    rows = []
    for part in herding.parts(settings):
        key = part.key
        floor = 2.5 * (key["workers"] ** growth if key["sorter"].startswith("id_") else 1)
        floor *= ours if key["sorter"] == "cd_grab" else 1
        descends = cdgrab.SORTERS[key["sorter"]].needs_gradients
        wobble = 1 + 0.002 * key["seed"]
        for k in range(16):
            rows.append(key | {"round": k, "bound": wobble * (floor + 600 * factor**k) if descends else 340.0})
    return pd.DataFrame(rows)


def test_verdicts_of_herding():
    settings = settings_of("herding")
    good = answers(herding.verdicts(made_up_herding(settings, 0.4, 0.5), settings))
    bad = answers(herding.verdicts(made_up_herding(settings, 0.6, 1.0), settings))
    for sorter in ("CD-GraB", "ID-GraB (Bal)", "ID-GraB (PairBal)", "GraB, one worker with all"):
        halves = f"{sorter}: a round at least halves what the bound is above its floor"
        assert (good[halves], bad[halves]) == ("holds", "fails")
    for sorter in ("ID-GraB (Bal)", "ID-GraB (PairBal)"):
        root, linear = f"{sorter}'s floor grows like √workers", f"{sorter}'s floor grows linearly"
        linear = next(claim for claim in good if claim.startswith(linear))
        assert (good[root], good[linear]) == ("holds", "fails") and (bad[root], bad[linear]) == ("fails", "holds")
    assert good["CD-GraB's floor does not grow with the workers"] == "holds"


@pytest.mark.parametrize(("ours", "answer"), [(0.9, "holds"), (1.0, "holds"), (1.2, "fails")])
def test_our_floor_is_compared_with_that_of_one_worker(ours, answer):
    settings = settings_of("herding")
    found = answers(herding.verdicts(made_up_herding(settings, 0.4, 0.5, ours), settings))
    assert found["CD-GraB's floor is no higher than that of one worker with all vectors"] == answer


def test_a_growing_floor_is_noticed():
    settings = settings_of("herding")
    table = made_up_herding(settings, 0.4, 0.5)
    table["bound"] *= table["workers"].where(table["sorter"] == "cd_grab", 1) ** 0.2
    assert answers(herding.verdicts(table, settings))["CD-GraB's floor does not grow with the workers"] == "fails"


@pytest.mark.parametrize(("factor", "answer"), [(1.0, "holds"), (1.3, "fails")])
def test_floors_are_compared_with_the_papers(factor, answer):
    settings = settings_of("herding")
    rows = []
    for part in herding.parts(settings):
        workers = part.key["workers"]
        series = {
            "cd_grab": "CD-GraB",
            "d_rr": "D-RR",
            "id_grab_bal": "ID-GraB (Bal)",
            "id_grab_pair": "ID-GraB (PairBal)",
        }
        curves = published("study_herding", "bound", column=workers)
        if curves:
            curve = curves[series[part.key["sorter"]]]["mean"] * (1 + 0.001 * part.key["seed"])
            rows += [part.key | {"round": k, "bound": factor * bound} for k, bound in enumerate(curve)]
        else:
            rows += [part.key | {"round": k, "bound": 3.0 + 300 * 0.4**k} for k in range(16)]
    compared = [v for v in herding.verdicts(pd.DataFrame(rows), settings) if "published" in v.claim]
    assert [verdict.answer for verdict in compared] == [answer] * 4


def test_the_papers_floors_are_not_compared_with_other_numbers_of_vectors():
    settings = settings_of("herding", "quick")
    compared = [v for v in herding.verdicts(made_up_herding(settings, 0.4, 0.5), settings) if "published" in v.claim]
    assert {(v.answer, v.measured, v.note) for v in compared} == {
        ("undecided", "–", "nothing was published for 100,000 vectors")
    }
