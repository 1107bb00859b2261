"""The study of rates: verdicts of made-up gaps."""

import pandas as pd
import pytest
from omegaconf import OmegaConf
from synthetic_studies import answers, settings_of

from experiments.studies import rates


def made_up_rates(settings, exponents, drift=1.0):
    rows = []
    for part in rates.parts(settings):
        key = part.key
        workers, units, epochs = exponents[key["sorter"]]
        for seed in range(3):
            gap = key["workers"] ** workers * key["units"] ** units * (1 + 0.01 * seed * key["workers"] ** 0.1)
            gap *= key["noise"] ** 2 if key["sweep"] == "noise" else 1
            gap *= key["epochs"] ** epochs if key["sweep"] == "epochs" else 1
            rows.append(key | {"seed": seed, "gap": gap, "gap_before": drift * gap})
    return pd.DataFrame(rows)


THEORY = {name: (-1.0, -1.0, -2.0) for name in ("d_rr", "shuffle_once", "flip_flop", "riffle")} | {
    "cd_grab": (-2.0, -2.0, -2.0),
    "grab": (-2.0, -2.0, -2.0),
    "grab_pair": (-2.0, -2.0, -2.0),
    "id_grab_pair": (-1.0, -2.0, -2.0),
    "id_grab_bal": (-0.58, -2.0, -2.0),
}


def test_verdicts_of_rates():
    settings = settings_of("rates", "quick")
    good = rates.verdicts(made_up_rates(settings, THEORY), settings)
    assert {v.claim: v.answer for v in good if v.answer != "holds"} == {
        "tanh neuron: CD-GraB's squared gradient norm falls like workers^−2/3 and no faster": "fails"  # much faster
    }
    swapped = THEORY | {"cd_grab": THEORY["d_rr"], "id_grab_pair": THEORY["cd_grab"]}
    bad = answers(rates.verdicts(made_up_rates(settings, swapped), settings))
    for problem in ("least squares", "ridge logistic regression"):
        assert bad[f"{problem}: exponent of CD-GraB's gap in workers"] == "fails"
        assert bad[f"{problem}: exponent of ID-GraB (PairBal)'s gap in workers"] == "fails"
        assert bad[f"{problem}: CD-GraB falls faster in workers than ID-GraB (PairBal)"] == "fails"
        assert bad[f"{problem}: exponent of D-RR's gap in workers"] == "holds"
    same = "least squares: exponent of ID-GraB (Bal)'s gap in workers is that of an independent reference computation"
    found = answers(rates.verdicts(made_up_rates(settings, THEORY | {"id_grab_bal": (-0.4, -2.0, -2.0)}), settings))
    assert (bad[same], found[same]) == ("holds", "fails")


def test_runs_that_are_still_falling_decide_nothing():
    settings = settings_of("rates", "quick")
    lines = rates.verdicts(made_up_rates(settings, THEORY, drift=2.0), settings)
    slopes = [v for v in lines if "times the epochs" not in v.claim]
    assert {v.answer for v in slopes} == {"undecided"}
    assert slopes[0].note == "not at the noise floor at 4 workers; fitted to 4 … 32 workers"


@pytest.mark.parametrize("sorter", ["d_rr", "cd_grab"])
def test_a_problem_that_noise_does_not_limit_decides_nothing(sorter):
    """Not about CD-GraB, where it is not shown for both; about D-RR where it is shown for D-RR."""
    settings = settings_of("rates", "quick")
    table = made_up_rates(settings, THEORY)
    table.loc[(table["sweep"] == "noise") & (table["sorter"] == sorter), ["gap", "gap_before"]] = 1.0
    lines = [v for v in rates.verdicts(table, settings) if v.claim.startswith("tanh")]
    expected = ["fails", "holds", "holds", "holds"] if sorter == "d_rr" else ["holds", "holds", "fails", "holds"]
    assert [v.answer for v in lines[:4]] == expected
    of_baseline = "tanh neuron: exponent of D-RR's squared gradient norm in workers"
    open_lines = [v for v in lines[4:] if sorter == "d_rr" or v.claim != of_baseline]
    assert {v.answer for v in open_lines} == {"undecided"} and len(open_lines) == 6 - (sorter == "cd_grab")
    name = "D-RR" if sorter == "d_rr" else "CD-GraB"
    assert all(v.note.startswith(f"{name} is not shown to be noise-limited") for v in open_lines)
    assert answers(lines)[of_baseline] == ("undecided" if sorter == "d_rr" else "holds")


def test_a_problem_that_is_still_falling_is_noticed():
    settings = settings_of("rates", "quick")
    table = made_up_rates(settings, THEORY)
    later = (table["sweep"] == "longer") & (table["sorter"] == "cd_grab") & (table["epochs"] > settings.epochs)
    table.loc[later, "gap"] /= 2
    found = answers(rates.verdicts(table, settings))
    assert found["tanh neuron: CD-GraB's squared gradient norm after 2 times the epochs, as a factor"] == "fails"


def test_the_table_shows_the_reference_beside_our_exponents():
    settings = settings_of("rates", "quick")
    table = rates.exponent_table(made_up_rates(settings, THEORY), settings)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    ours = next(line for line in lines if line[:2] == ["least squares", "CD-GraB"])
    assert (ours[3], ours[5]) == ("−2.6", "−2.9") and ours[2].startswith("−2 [")


def test_every_part_says_which_seeds_it_holds():
    settings = OmegaConf.merge(settings_of("rates", "smoke"), {"seeds": 7})
    parts = list(rates.parts(settings))
    assert {(part.key["first_seed"], part.key["last_seed"]) for part in parts} == {(0, 4), (5, 6)}
    assert parts[-1].compute()["seed"] == [5, 6]
