"""Studies: the engine against sorters and a plain loop, statistics and verdicts against known answers, whole runs."""

import json
import math
import re
import subprocess
import sys
import time
from functools import cache, partial

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

import cdgrab
from cdgrab import reference
from cdgrab.config import ROOT, choices, compose_config
from cdgrab.errors import CdgrabError
from cdgrab.published import published
from cdgrab.significance import t_quantile
from cdgrab.studies import collection, herding, rates
from cdgrab.studies.base import Part, Study, carry_out, compose_study
from cdgrab.studies.problems import KINDS, make_problem, sgd_epoch
from cdgrab.studies.replicas import ReplicatedSorter
from cdgrab.studies.verdicts import Claim, Estimate, estimate, judge, power_exponents
from experiments.study import main

REPLICATED = [name for name in cdgrab.SORTERS if name != "kh"]


@cache
def settings_of(name, size):
    return compose_study([f"study={name}", f"size={size}"]).settings


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_seconds(path):
    return [{key: value for key, value in line.items() if key != "seconds"} for line in read_lines(path)]


# -- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REPLICATED)
@pytest.mark.parametrize(("workers", "units"), [(1, 6), (3, 8), (4, 7)])
def test_many_seeds_at_once_give_the_orders_of_the_sorters(name, workers, units):
    replicas, epochs, dim = 3, 4, 5
    gradients = torch.randn(epochs, replicas, units, workers, dim, dtype=torch.float64)
    together = ReplicatedSorter(name, replicas=replicas, workers=workers, units=units, dim=dim)
    each = [cdgrab.make_sorter(name, workers=workers, units=units, dim=dim, seed=seed) for seed in range(replicas)]
    for epoch in range(epochs):
        order = together.order(epoch)
        together.observe(gradients[epoch])
        for seed, sorter in enumerate(each):
            assert torch.equal(order[seed], sorter.order(epoch))
            sorter.observe(range(units), gradients[epoch, seed].transpose(0, 1))


def test_sorters_without_a_form_for_many_seeds_are_refused():
    with pytest.raises(CdgrabError, match="no form for many seeds"):
        ReplicatedSorter("kh", replicas=2, workers=1, units=4, dim=1)


def loss_of_one(kind, x, y, weights, ridge):
    z = x @ weights
    value = {
        "least_squares": lambda: (z - y) ** 2 / 2,
        "logistic": lambda: torch.log1p(torch.exp(z)) - y * z,
        "tanh_neuron": lambda: (torch.tanh(z) - y) ** 2 / 2,
    }[kind]()
    return value + ridge / 2 * weights @ weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sorter", ["cd_grab", "d_rr", "grab_pair"])
def test_training_equals_a_plain_loop(kind, sorter):
    """One seed, one worker and one example at a time, gradients by autograd, orders by the library's sorters."""
    workers, units, epochs, rate, seed, ridge, dim = 3, 4, 8, 0.1, 1, 0.02, 5
    problem = make_problem(kind, seed + 1, workers * units, dim, noise=0.3, ridge=ridge)
    features, labels = problem.features[seed], problem.labels[seed]
    shape = (1, workers * units) if sorter == "grab_pair" else (workers, units)
    chosen = cdgrab.make_sorter(sorter, workers=shape[0], units=shape[1], dim=dim, seed=seed)
    weights, gaps = torch.zeros(dim, dtype=torch.float64), []

    def full_loss(at):
        return torch.stack([loss_of_one(kind, *data, at, ridge) for data in zip(features, labels, strict=True)]).mean()

    for epoch in range(epochs):
        order, seen = chosen.order(epoch), []
        for k in range(units):
            if sorter == "grab_pair":
                batch = order[0, k * workers : (k + 1) * workers].tolist()
            else:
                batch = [w * units + int(order[w, k]) for w in range(workers)]
            one = [torch.func.grad(lambda at, i=i: loss_of_one(kind, features[i], labels[i], at, ridge)) for i in batch]
            seen.append(torch.stack([gradient(weights) for gradient in one]))
            weights = weights - rate * seen[-1].mean(0)
        by_position = torch.stack(seen)  # [units, workers, dim]
        whole = by_position.reshape(1, -1, dim) if sorter == "grab_pair" else by_position.transpose(0, 1)
        chosen.observe(range(shape[1]), whole)
        slope = torch.func.grad(full_loss)(weights)
        gaps.append(float(slope @ slope if kind == "tanh_neuron" else full_loss(weights) - problem.minimum()[seed]))
    before, last = rates.final_gaps(problem, sorter, workers, units, epochs, rate)
    assert float(before[seed]) == pytest.approx(np.mean(gaps[4:6]), rel=1e-9)
    assert float(last[seed]) == pytest.approx(np.mean(gaps[6:]), rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_problems(kind):
    problem = make_problem(kind, 2, 40, 3, ridge=0.1)
    fewer = make_problem(kind, 1, 15, 3, ridge=0.1)
    assert torch.equal(problem.features[:1, :15], fewer.features) and torch.equal(problem.labels[:1, :15], fewer.labels)
    weights = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.func.grad(lambda at: problem.loss(at).sum())(weights)
    torch.testing.assert_close(problem.gradient(weights), expected)
    if kind == "tanh_neuron":
        with pytest.raises(CdgrabError, match="no minimum"):
            problem.minimum()
        return
    for _ in range(3000):
        weights -= 0.3 * problem.gradient(weights)
    torch.testing.assert_close(problem.minimum(), problem.loss(weights), rtol=1e-12, atol=0)


def test_labels_have_the_stated_noise_and_coins_the_stated_odds():
    exact, noisy = (make_problem("least_squares", 1, 20_000, 4, noise=noise) for noise in (0, 0.5))
    assert float((noisy.labels - exact.labels).std()) == pytest.approx(0.5, rel=0.03)
    coins = make_problem("logistic", 1, 20_000, 4)
    odds = torch.sigmoid(exact.labels)  # the same weights and features
    assert float((coins.labels * exact.labels).mean()) == pytest.approx(float((odds * exact.labels).mean()), abs=0.02)
    with pytest.raises(CdgrabError, match="the problems are least_squares, logistic, tanh_neuron"):
        make_problem("quadratic", 1, 2, 2)


def test_an_epoch_leaves_weights_where_its_own_gradients_lead():
    problem = make_problem("logistic", 2, 12, 3)
    weights = torch.zeros(2, 3, dtype=torch.float64)
    gradients = sgd_epoch(problem, weights, torch.arange(12).view(1, 4, 3).expand(2, 4, 3), rate=0.2)
    torch.testing.assert_close(weights, -0.2 * gradients.mean(2).sum(1))


# -- herding ----------------------------------------------------------------------------------------------------------


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


# -- statistics and verdicts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("freedom", "confidence", "t"), [(1, 0.95, 12.7062), (2, 0.95, 4.30265), (4, 0.99, 4.60409), (30, 0.95, 2.04227)]
)
def test_t_quantiles_are_the_tabulated_ones(freedom, confidence, t):
    assert t_quantile(freedom, confidence) == pytest.approx(t, rel=2e-5)


def test_estimates_by_hand():
    value = estimate([1.0, 2.0, 3.0])  # std 1, 4.30265 / √3 to both sides
    assert (value.mean, value.low, value.high) == pytest.approx((2.0, 2 - 2.48414, 2 + 2.48414), abs=1e-4)
    assert str(value) == "2 [−0.484, 4.48]"
    assert estimate([5.0]) == Estimate(5.0, -math.inf, math.inf, 1) and str(estimate([5.0])) == "5, one seed"
    assert estimate([math.nan, 5.0]).seeds == 1 and str(estimate([])) == "–"


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
    exponents = power_exponents(power_law([-1.0] * 1000, noise=0.3), "x", "y").to_numpy().reshape(200, 5)
    intervals = [estimate(some) for some in exponents]
    assert np.mean([e.low <= -1.0 <= e.high for e in intervals]) == pytest.approx(0.95, abs=0.05)


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
    assert judge(Claim("x", least, most), measured).answer == answer
    blocked = judge(Claim("x", least, most), measured, note="n", unless="no use")
    assert (blocked.answer, blocked.note) == ("undecided", "no use; n")


def test_thresholds_are_printed():
    assert [
        Claim("", **limits).threshold for limits in ({"most": -1.8}, {"least": 2}, {"least": -1.4, "most": -0.7})
    ] == [
        "≤ −1.8",
        "≥ 2",
        "−1.4 … −0.7",
    ]


def answers(verdicts):
    return {verdict.claim: verdict.answer for verdict in verdicts}


def made_up_herding(settings, factor, growth, scale=1.0):
    """What is above the floor shrinks by `factor`; floors of sorters without coordination grow by `growth`."""
    rows = []
    for part in herding.parts(settings):
        key = part.key
        floor = scale * 2.5 * (key["workers"] ** growth if key["sorter"].startswith("id_") else 1)
        descends = cdgrab.SORTERS[key["sorter"]].needs_gradients
        wobble = 1 + 0.002 * key["seed"]
        for k in range(16):
            rows.append(key | {"round": k, "bound": wobble * (floor + 600 * factor**k) if descends else 340.0})
    return pd.DataFrame(rows)


def test_verdicts_of_herding():
    settings = settings_of("herding", "paper")
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


@pytest.mark.parametrize(("factor", "answer"), [(1.0, "holds"), (1.3, "fails")])
def test_floors_are_compared_with_the_papers(factor, answer):
    settings = settings_of("herding", "paper")
    rows = []
    for part in herding.parts(settings):
        workers = part.key["workers"]
        panel = f"m={workers} n={10**6 // workers:.0e}".replace("e+0", "e")
        series = {
            "cd_grab": "CD-GraB",
            "d_rr": "D-RR",
            "id_grab_bal": "ID-GraB (Bal)",
            "id_grab_pair": "ID-GraB (PairBal)",
        }
        curves = published("study_herding", "bound", column=panel)
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


THEORY = {name: (-1.0, -1.0, -2.0) for name in ("d_rr", "shuffle_once", "flip_flop")} | {
    "cd_grab": (-2.0, -2.0, -2.0),
    "grab_pair": (-2.0, -2.0, -2.0),
    "id_grab_pair": (-1.0, -2.0, -2.0),
    "id_grab_bal": (-0.5, -2.0, -2.0),
}


def test_verdicts_of_rates():
    settings = settings_of("rates", "quick")
    good = rates.verdicts(made_up_rates(settings, THEORY), settings)
    assert {v.claim for v in good if v.answer != "holds"} == {
        "tanh neuron: CD-GraB's squared gradient norm falls like workers^−2/3 and no faster"  # cannot be decided
    }
    swapped = THEORY | {"cd_grab": THEORY["d_rr"], "id_grab_pair": THEORY["cd_grab"]}
    bad = answers(rates.verdicts(made_up_rates(settings, swapped), settings))
    for problem in ("least squares", "ridge logistic regression"):
        assert bad[f"{problem}: exponent of CD-GraB's gap in workers"] == "fails"
        assert bad[f"{problem}: exponent of ID-GraB (PairBal)'s gap in workers"] == "fails"
        assert bad[f"{problem}: CD-GraB falls faster in workers than ID-GraB (PairBal)"] == "fails"
        assert bad[f"{problem}: exponent of D-RR's gap in workers"] == "holds"


def test_runs_that_are_still_falling_decide_nothing():
    settings = settings_of("rates", "quick")
    lines = rates.verdicts(made_up_rates(settings, THEORY, drift=2.0), settings)
    slopes = [v for v in lines if "times the epochs" not in v.claim]
    assert {v.answer for v in slopes} == {"undecided"}
    assert slopes[0].note == "not at the noise floor at 4 workers"


def test_a_problem_that_noise_does_not_limit_decides_nothing():
    settings = settings_of("rates", "quick")
    table = made_up_rates(settings, THEORY)
    table.loc[table["sweep"] == "noise", ["gap", "gap_before"]] = 1.0
    lines = [v for v in rates.verdicts(table, settings) if v.claim.startswith("tanh")]
    assert [v.answer for v in lines[:2]] == ["fails", "holds"]
    assert {v.answer for v in lines[2:]} == {"undecided"}
    assert all(v.note.startswith("not shown to be noise-limited") for v in lines[2:])


# -- carrying a study out ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", choices("study"))
@pytest.mark.parametrize("size", ["smoke", "quick", "paper"])
def test_every_study_has_parts_and_a_notebook_at_every_size(name, size):
    study = compose_study([f"study={name}", f"size={size}", "data=embedded"])
    parts = study.parts()
    keys = [json.dumps(part.key) for part in parts]
    assert len(set(keys)) == len(keys) >= 8 and len({tuple(part.key) for part in parts}) == 1
    folder = f"{size}-embedded" if study.data else size
    assert study.directory == ROOT / "results" / "studies" / name / folder
    assert (ROOT / "notebooks" / f"study_{name}.ipynb").exists()
    about = compose_config([f"study={name}"], "study").study
    assert about.name == name and about.title and about.question and set(about.sizes) == {"smoke", "quick", "paper"}


def test_changed_settings_have_a_folder_of_their_own():
    study = compose_study(["study=herding", "size=smoke", "study.seeds=5", "study.workers=[2, 4]"])
    assert study.directory.name == "smoke,seeds=5,workers=[2,4]" and study.settings.rounds == 10
    assert study.figure_name("x") == "study_herding_x-smoke,seeds=5,workers=[2,4]"
    assert compose_study(["study=herding", "size=paper"]).figure_name() == "study_herding"


def small(directory):
    settings = compose_study(["study=herding", "size=smoke", "study.vectors=40", "study.rounds=2"]).settings
    return Study(settings, "smoke", directory)


def interrupted_after(count):
    def progress(results, total):
        for done, result in enumerate(results, 1):
            yield result
            if done == count:
                raise KeyboardInterrupt

    return progress


def test_an_interrupted_study_goes_on_and_ends_with_the_same_results(tmp_path):
    whole, broken = small(tmp_path / "whole"), small(tmp_path / "broken")
    carry_out(whole)
    with pytest.raises(KeyboardInterrupt):
        carry_out(broken, interrupted_after(3))
    assert len(read_lines(broken.metrics_path)) == 3
    assert json.loads((broken.directory / "manifest.json").read_text())["status"] == "running"
    kept = broken.metrics_path.read_text()
    with open(broken.metrics_path, "a") as file:
        file.write('{"sorter": "cd_gr')  # killed while writing
    computed = []
    carry_out(broken, lambda results, total: computed.append(total) or results)
    assert computed == [len(whole.parts()) - 3]
    assert broken.metrics_path.read_text().startswith(kept)
    assert without_seconds(broken.metrics_path) == without_seconds(whole.metrics_path)
    assert json.loads((broken.directory / "manifest.json").read_text())["status"] == "finished"


def slow(seconds):
    time.sleep(seconds)
    return {"x": [seconds]}


def test_what_is_done_does_not_wait_for_what_takes_longer(tmp_path, monkeypatch):
    study, seconds = small(tmp_path), (60.0, 0.0, 0.01)
    parts = [Part({"part": number}, partial(slow, duration)) for number, duration in enumerate(seconds)]
    monkeypatch.setattr(Study, "parts", lambda self: parts)
    with pytest.raises(KeyboardInterrupt):
        carry_out(study, interrupted_after(2), jobs=2)
    assert sorted(line["part"] for line in read_lines(study.metrics_path)) == [1, 2]
    parts[0] = Part({"part": 0}, partial(slow, 0.0))
    carry_out(study)
    assert [line["part"] for line in read_lines(study.metrics_path)] == [0, 1, 2]


def test_several_parts_at_a_time_give_the_same_results(tmp_path):
    one, two = small(tmp_path / "one"), small(tmp_path / "two")
    carry_out(one)
    carry_out(two, jobs=2)
    assert without_seconds(two.metrics_path) == without_seconds(one.metrics_path)


def test_what_is_complete_is_not_computed_again_and_never_mixed(tmp_path):
    study = small(tmp_path)
    carry_out(study)
    before = study.metrics_path.stat().st_mtime_ns

    def never(results, total):
        raise AssertionError

    carry_out(study, never)
    assert study.metrics_path.stat().st_mtime_ns == before
    other = Study(OmegaConf.merge(study.settings, {"rounds": 3}), "smoke", tmp_path)
    with pytest.raises(CdgrabError, match="holds results with other rounds; delete"):
        carry_out(other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study=nonsense"], "unknown study 'nonsense'; the studies are herding, heterogeneity"),
        (["study=herding", "size=huge"], "size must be smoke, quick or paper, got 'huge'"),
        (["study=herding", "study.seeds=0"], "study.seeds must be a whole number of at least 1, got 0"),
        (["study=herding", "study.nonsense=1"], "nonsense"),
        (["study=herding", "study.vectors=7"], "7 vectors cannot be split evenly over 5 workers"),
        (["study=herding", "jobs=0"], "jobs must be a whole number of at least 1, got 0"),
        (["study=sorters", "data=nonsense"], "data must be auto or embedded, got 'nonsense'"),
        (["herding"], "'herding' is not a setting of the form key=value"),
    ],
)
def test_refusals_are_one_sentence(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: [^\n]+\n", error) and message in error


def test_help_names_the_studies(capsys):
    assert main(["--help"]) == 0
    assert "studies: herding, heterogeneity, learning_rate, rates, scaling, sorters" in capsys.readouterr().out


def test_no_results_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(collection, "RESULTS", tmp_path)
    monkeypatch.delenv("CDGRAB_STUDY", raising=False)
    with pytest.raises(CdgrabError, match="no finished runs of study herding"):
        collection.best("herding")


def call(checkout, *runs):
    """Several runs of experiments.study in one process, since starting one takes seconds."""
    code = f"from experiments.study import main; exit(max(main(arguments) for arguments in {list(runs)}))"
    return subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, timeout=1800)


def test_studies_leave_results_executed_notebooks_figures_and_verdicts(checkout):
    done = call(checkout, ["study=herding", "size=smoke"], ["study=rates", "size=smoke"])
    assert done.returncode == 0, done.stderr
    assert "study herding: 100%" in done.stderr
    for name in ("herding", "rates"):
        folder = checkout / "results" / "studies" / name / "smoke"
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["status"] == "finished" and manifest["settings"]["name"] == name
        assert {"host", "versions", "commit", "started", "ended"} <= manifest.keys()
        executed = nbformat.read(checkout / "results" / "notebooks" / f"study_{name}.ipynb", as_version=4)
        outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
        assert any("image/png" in output.get("data", {}) for output in outputs)
        for suffix in ("png", "pdf"):
            assert (checkout / "results" / "figures" / f"study_{name}-smoke.{suffix}").stat().st_size > 5000
    page = (checkout / "results" / "STUDIES.md").read_text()
    sections = page.split("\n## ")
    assert [section.partition(":")[0] for section in sections[1:]] == ["herding", "rates"]
    for section in sections[1:]:
        table = section[section.index("| claim") : section.index("\n\nsize smoke")]
        assert table in done.stdout and re.search(r"\*\*(holds|fails|undecided)\*\*", table)
        assert "only shows that it runs" in section and "-smoke.png)" in section


def test_the_collection_is_made_again_from_what_is_saved(checkout, monkeypatch):
    """Without its own page, and with a larger size beside the smoke size."""
    results = checkout / "results"
    page = results / "STUDIES.md"
    before = page.read_text()
    page.unlink()
    monkeypatch.setattr(collection, "RESULTS", results)
    monkeypatch.delenv("CDGRAB_STUDY", raising=False)
    assert collection.write_collection() == page and page.read_text() == before
    subprocess.run(["cp", "-r", "smoke", "quick"], cwd=results / "studies" / "herding", check=True)
    manifest = results / "studies" / "herding" / "quick" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"size": "smoke"', '"size": "quick"'))
    text = collection.write_collection().read_text()
    assert text.count("\n## herding") == 1 and "size quick" in text and text.count("size smoke") == 1
    assert collection.best("herding").size == "quick"
