"""The study `sparsification`: its measures by hand, its verdicts on made-up results, and all of it at a tiny size."""

import json
import math
from itertools import product

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from torch.func import functional_call, grad, vmap

from cdgrab.sparsify import SparseAverager, make_sparsifier
from experiments import train
from experiments.store import files
from experiments.studies import base, sparsification_figures, sparsification_real_figures
from experiments.studies.sparsification import _converges, _holds, settling_time
from experiments.studies.sparsification_figures import ablation_table, time_table, training_table
from experiments.studies.sparsifiers import (
    MATCHED,
    PUBLISHED,
    layered,
    method_label,
    options_of,
    selection_seconds,
)
from experiments.studies.synthetic import LayeredGradients, SparseModel
from experiments.tasks import cifar10_models as models

TINY = ["study=sparsification", "size=smoke", "study.dim=4000", "study.iterations=20", "study.held_dim=4000"]
TINY += ["study.settling=60", "study.timed_dim=5000", "study.sparse_steps=3", "study.tasks.lstm_wiki2=null"]
TINY += ["study.methods=[topk,exdyna]", "study.trained=[dense,exdyna]", "study.tasks.cifar10.limit=32"]
TINY += ["study.real.cifar10.iterations=4", "study.real.cifar10.crowd_iterations=2"]


def test_methods_carry_options():
    assert options_of("exdyna,rule=static,error_feedback=false") == (
        "exdyna",
        {"rule": "static", "error_feedback": False},
    )
    assert [method_label(m) for m in ("topk", PUBLISHED, "exdyna,rule=static", "exdyna,error_feedback=false")] == [
        *("Top-k", "ExDyna as published", "ExDyna, rule static", "ExDyna, no error feedback")
    ]


def test_matched_top_k_has_the_wanted_density_where_the_plain_one_builds_up():
    found = {}
    for kind in ("topk", MATCHED):
        mean = SparseAverager(make_sparsifier(kind, workers=8, dim=10_000))
        gradients = LayeredGradients(8, 10_000)
        for step in range(50):
            if step == 30:
                mean.epoch_means()
            mean.average(gradients())
        found[kind] = mean.epoch_means()["density"]
    assert found[MATCHED] == pytest.approx(0.01, rel=0.1) and found["topk"] > 0.03
    assert mean.sparsifier.state_dict()["common"]["_largest"] < 100


def test_settling_times_by_hand():
    ratios = [3.0] * 5 + [1.0] * 10 + [2.0] + [0.95] * 30
    rows = pd.DataFrame({"iteration": range(len(ratios)), "ratio": ratios, "seed": 0})
    assert settling_time(rows, 0, 46)[0] == 16 and settling_time(rows, 20, 46)[0] == 0
    assert settling_time(rows, 0, 20)[0] == 20  # never: all of the time


def test_gradients_are_too_large_for_the_first_threshold_and_then_shrink():
    fixed = layered("exdyna,rule=relative,threshold=fixed", 2, 0.01, 4000, 30, seed=0, shrinks=True)["ratio"]
    assert fixed[0] > 2 and min(fixed[:10]) > 2 and max(fixed[20:]) < 1


def test_the_sparse_model_has_sparse_gradients_and_learns():
    model, seen = SparseModel(words=2000, width=4, length=10, seed=0), []

    def mean(gradients):
        seen.append(float((gradients != 0).double().mean()))
        return gradients.mean(0)

    losses = model.train(mean, workers=4, batch=8, steps=60, rate=1.0)
    assert len(losses) == 10 and losses[-1] < losses[0] < math.log(2) and max(seen) < 0.05


def test_times_are_those_of_selecting():
    found = selection_seconds(["exdyna", "topk"], 4, 0.01, 50_000, seed=0)
    assert found["timed"] == ["exdyna", "topk"] and min(found["selection"]) > 0
    assert 1 <= found["longest"][0] < 4 and found["longest"][1] is None
    assert 0.8 < found["ratio"][0] < 1.2 and found["ratio"][1] == 1  # workers have the same gradient: no build-up


@pytest.mark.parametrize(("ratio", "answer"), [(1.05, "holds"), (1.2, "fails")])
@pytest.mark.parametrize("density", [0.01, 0.001])
def test_densities_are_judged(ratio, answer, density):
    ratio = ratio if density == 0.01 or ratio < 1.1 else 1.5
    rows = [
        {"seed": seed, "iteration": t, "ratio": ratio if t >= 100 else 9.0, "imbalance": 0.1}
        for seed in range(3)
        for t in range(200)
    ]
    lines = list(_holds(pd.DataFrame(rows), density, 8))
    assert [line.answer for line in lines] == [answer] * (len(lines) - 1) + ["holds"]


def test_losses_are_compared_where_the_densities_are_alike():
    def judged(density):
        densities = {"dense": 1.0, "exdyna": 0.01, "topk": density}
        rows = [
            {"method": method, "sorter": "cd_grab", "seed": seed, "epoch": 1, "density": densities[method] + seed / 1e5}
            | {"train_loss": (0.8 if method == "exdyna" else 1.0) + seed / 1000}
            for method, seed in product(densities, range(3))
        ]
        settings = OmegaConf.create({"sorters": ["cd_grab"], "trained": list(densities)})
        return {verdict.claim: verdict for verdict in _converges(pd.DataFrame(rows), "cifar10", settings)}

    alike, unlike = judged(0.011), judged(0.02)
    assert alike.keys() == unlike.keys()  # claims that come and go with the data would be lost between two looks
    _, density, loss = alike
    assert [(alike[claim].answer, unlike[claim].answer) for claim in (density, loss)] == [
        ("holds", "fails"),
        ("holds", "undecided"),
    ]
    assert (
        unlike[loss].note.startswith("the densities differ, with any number of seeds; ")
        and not unlike[loss].needs_seeds
    )


def test_a_resnet_does_not_mix_examples(narrow_resnet, tmp_path, capsys):
    model, images = models.ResNet18().double(), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    parameters = dict(model.named_parameters())
    together = vmap(grad(lambda p, x: functional_call(model, p, (x,)).square().sum()), (None, 0))(parameters, images)
    model(images)[1].square().sum().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(together[name][1], parameter.grad)
    assert train.main(["task=cifar10", "data=embedded", "task.model=vgg", f"run_dir={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err
    assert "task.model must be lenet" in error and "resnet18, got 'vgg'" in error


def test_a_resnet_has_its_usual_size():
    assert (
        sum(p.numel() for p in models.ResNet18().parameters()) == 11_172_170
    )  # 11,173,962 less the norms of its short cuts


def test_all_of_it_and_going_on_after_an_interruption(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "RESULTS", tmp_path)
    monkeypatch.delenv("CDGRAB_DATA", raising=False)
    study = base.compose_study(TINY)
    base.carry_out(study)
    lines = study.metrics_path.read_text().splitlines()
    assert len(lines) == len(study.parts())
    lost = max(i for i, line in enumerate(lines) if '"training"' in line)
    study.metrics_path.write_text("\n".join(lines[:lost] + lines[lost + 1 :]) + "\n")
    base.carry_out(study)
    again = study.metrics_path.read_text().splitlines()[lost]
    assert json.loads(again) | {"seconds": 0} == json.loads(lines[lost]) | {"seconds": 0}
    claims = {verdict.claim for verdict in study.verdicts()}
    assert "LeNet-CIFAR-10, CD-GraB: train loss with ExDyna / dense at density 0.01" in claims
    assert "ExDyna: actual density / target with 2 to 8 workers" in claims and len(claims) == len(study.verdicts())
    topk = study.table[(study.table["measure"] == "build-up") & (study.table["method"] == "topk")]
    assert topk[topk["workers"] == 8]["ratio"].mean() > topk[topk["workers"] == 2]["ratio"].mean() > 1.5
    drawn = (sparsification_figures.synthetic, sparsification_figures.trainings, sparsification_real_figures.real)
    for figure in (draw(study) for draw in drawn):
        assert all(panel.get_title() or panel.get_ylabel() for panel in figure.axes if panel.axison)
    for table in (training_table, ablation_table, time_table):
        assert "ExDyna" in table(study.table)
    assert "| LeNet-CIFAR-10 | Top-k " in sparsification_real_figures.crowd_table(study)
