"""Studies that train: their runs are those of the suite, verdicts of made-up results."""

import math

import pytest
import torch
from synthetic_studies import answers_of, made_up, settings_of

from cdgrab.errors import CdgrabError
from experiments.report.names import sorter_label as label
from experiments.report.statistics import holm, paired_p
from experiments.store.records import read_metrics
from experiments.studies import learning_rate, sorters, training
from experiments.studies.training import TrainingRun, alike, outcome, outcomes, overrides, train
from experiments.studies.verdicts import beyond_chance, difference
from experiments.tasks import make_task
from experiments.training.config import compose
from experiments.training.session import carry_out as ordinary_run

# -- runs -------------------------------------------------------------------------------------------------------------


def test_a_part_is_an_ordinary_run(tmp_path):
    run = overrides(settings_of("scaling", "smoke"), "lr_hmda", "cd_grab,rule=walk")
    ordinary_run(compose([*run, "seed=1", f"run_dir={tmp_path / 'run'}"]))
    ordinary, ours = read_metrics(tmp_path / "run" / "metrics.jsonl"), train([TrainingRun(tuple(run), seed=1)])[0]
    assert len(ours) == 1 + len(ordinary) and ours[0]["train_loss"] == pytest.approx(math.log(2))
    for mine, other in zip(ours[1:], ordinary, strict=True):
        assert {key: mine[key] for key in ("train_loss", "test_accuracy", "order_hash")} == {
            key: other[key] for key in ("train_loss", "test_accuracy", "order_hash")
        }


def test_processes_share_runs_in_small_portions_but_a_gpu_takes_many(monkeypatch):
    run = tuple(overrides(settings_of("scaling", "smoke"), "lr_hmda", "d_rr"))
    runs = [TrainingRun(run, seed) for seed in range(24)]
    assert alike(runs, 1) == [list(range(24))]
    assert alike(runs, 2) == [list(range(first, 24, 8)) for first in range(8)]
    many = [TrainingRun(run, seed) for seed in range(100)]
    assert alike(many, 1) == [list(range(32)), list(range(32, 64)), list(range(64, 96)), list(range(96, 100))]
    monkeypatch.setattr(training, "pick_device", lambda name: torch.device("cuda"))
    assert alike(runs, 2) == [list(range(24))] and alike(many, 2) == [list(range(96)), list(range(96, 100))]


def test_a_run_that_diverges_ends_early():
    run = overrides(settings_of("learning_rate", "smoke"), "lr_hmda", "d_rr", lr=1e308, epochs=4)
    (found,) = outcomes([TrainingRun(tuple(run), seed=0)])
    assert found["epochs_done"][0] < 4 and found["start_loss"] == [pytest.approx(math.log(2))]


def test_outcomes_by_hand():
    epochs = [{"train_loss": 9.0}] + [{"train_loss": float(k), "test_accuracy": 50.0, "seconds": 1.0} for k in range(8)]
    epochs[-1]["herding_per_step"] = 3.0
    assert outcome(epochs) == {
        "start_loss": [9.0],
        "train_loss": [5.5],  # of the last four of eight
        "test_accuracy": [50.0],
        "herding_per_step": [3.0],
        "epochs_done": [8],
    }


def test_tasks_take_part_of_their_data_and_another_model():
    def task(*settings):
        run = compose(["data=embedded", *settings])
        return make_task(run.config, run.source, torch.device("cpu"))

    hmda = task("task=lr_hmda", "task.limit=100")
    assert hmda.train_units == 100 and hmda.test_units == 398
    features, _ = hmda.fetch("train", torch.arange(100))
    torch.testing.assert_close(features.mean(0), torch.zeros_like(features[0]), atol=1e-9, rtol=0)
    linear = task("task=cifar10", "task.model=linear", "task.limit=64", "task.test_limit=32")
    assert (linear.train_units, linear.test_units) == (64, 32)
    assert sum(p.numel() for p in linear.model.parameters()) == 30_730
    images, _ = linear.fetch("test", torch.arange(5))
    assert linear.model(images).shape == (5, 10) and linear.model(images[0]).shape == (10,)
    with pytest.raises(CdgrabError, match="task.model must be lenet, linear or resnet18, got 'mlp'"):
        task("task=cifar10", "task.model=mlp")


def test_sorters_with_options_have_labels():
    assert label("cd_grab,sketch=countsketch,sketch_size=64") == "CD-GraB, sketch of 64"
    assert label("cd_grab,rule=walk") == "CD-GraB, random walk" and label("d_rr,shared=true") == "D-RR, shared order"
    assert len({label(sorter) for sorter in settings_of("sorters").sorters}) == 15


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


# -- verdicts ---------------------------------------------------------------------------------------------------------


def test_verdicts_of_sorters():
    levels = {"d_rr": 1.0, "id_grab_pair": 0.95, "cd_grab": 0.9, "cd_grab,rule=walk": 0.99}
    found = answers_of("sorters", *made_up("sorters", lambda key: levels.get(key["sorter"], 0.91)))
    assert found["LR-HMDA: CD-GraB ends lower than D-RR"] == "holds"
    assert found["MLP-M4: CD-GraB ends lower than ID-GraB (PairBal)"] == "holds"
    assert found["MLP-M4: CD-GraB, sketch of 64 keeps four fifths of CD-GraB's advantage"] == "holds"
    assert found["MLP-M4: CD-GraB, random walk keeps four fifths of CD-GraB's advantage"] == "fails"
    assert found["LR-HMDA: Shuffle once ends lower than D-RR"] == "holds"
    assert found["LR-HMDA: ID-GraB (PairBal) ends lower than D-RR"] == "holds"
    reverse = answers_of("sorters", *made_up("sorters", lambda key: 1.9 - levels.get(key["sorter"], 0.91)))
    assert reverse["LR-HMDA: CD-GraB ends lower than D-RR"] == "fails"
    assert reverse["LR-HMDA: CD-GraB, sketch of 64 keeps four fifths of CD-GraB's advantage"] == "undecided"


def test_the_table_of_sorters():
    metrics = {"test_accuracy": lambda key: 80.0, "test_smape": lambda key: 9.0}
    runs = made_up("sorters", lambda key: 0.9 if key["sorter"] == "cd_grab" else 1.0, **metrics)
    table = sorters.sorter_table(*runs)
    lines = [line for line in table.splitlines() if "| CD-GraB " in line]
    assert len(lines) == 2 and all("5 of 5" in line for line in lines) and len(table.splitlines()) == 32
    for line, task in zip(lines, ("lr_hmda", "mlp_m4"), strict=True):
        rows = runs[0][runs[0]["task"] == task]
        assert float(line.split("|")[-2]) == pytest.approx(paired_p(list(difference(rows, "cd_grab"))), rel=0.05)


def test_one_of_many_claims_may_come_out_by_chance():
    noise = {0: 0.0, 1: 1.0, 2: -1.0, 3: 0.5, 4: -0.5}
    less = {"riffle": lambda seed: 0.985 + 0.008 * noise[seed], "d_rr": lambda seed: 1.0}
    runs = made_up("sorters", lambda key: less.get(key["sorter"], lambda seed: 1 + 0.05 * noise[seed])(key["seed"]))
    claims = list(sorters.verdicts(*runs))
    number = next(n for n, v in enumerate(claims) if v.claim == "LR-HMDA: Riffle ends lower than D-RR")
    assert claims[number].answer == "holds" and claims[number].p == pytest.approx(0.0061, rel=0.01)
    riffle = beyond_chance(claims)[number]
    tested = sum(not math.isnan(claim.p) for claim in claims)
    assert riffle.note.endswith(f"holds by itself (p = 0.0061), not among {tested} claims")
    assert riffle.answer == "undecided" and riffle.needs_seeds and 0.05 < riffle.adjusted <= tested * riffle.p


def test_verdicts_of_learning_rates():
    def loss(key):
        """D-RR fails at the largest rate; CD-GraB's advantage grows with the rate."""
        rate, ours = key["rate"], key["sorter"] == "cd_grab"
        largest = {"lr_hmda": {"sgd": 5, "adamw": 2}, "cifar10": {"sgd": 0.05, "adamw": 0.02}}
        if rate == largest[key["task"]][key["optimiser"]] and not ours:
            return 3.0
        return 1.0 - 0.2 * ours * rate

    table, settings = made_up("learning_rate", loss)
    found = answers_of("learning_rate", table, settings)
    for name in ("LR-HMDA, SGD with momentum", "CIFAR-10, AdamW"):
        assert found[f"{name}: CD-GraB's largest stable rate is no smaller than D-RR's"] == "holds"
        assert found[f"{name}: each at its best rate, CD-GraB ends lower than D-RR"] == "holds"
        assert found[f"{name}: at no stable rate does CD-GraB end more than 0.5 % higher"] == "holds"
    grows = ": CD-GraB's advantage is larger at the largest stable rate than at the smallest"
    assert found[f"LR-HMDA, SGD with momentum{grows}"] == "holds"
    swapped = table.assign(sorter=table["sorter"].replace({"cd_grab": "d_rr", "d_rr": "cd_grab"}))
    bad = answers_of("learning_rate", swapped, settings)
    assert bad["LR-HMDA, AdamW: CD-GraB's largest stable rate is no smaller than D-RR's"] == "fails"
    assert bad["LR-HMDA, AdamW: each at its best rate, CD-GraB ends lower than D-RR"] == "fails"
    measured = learning_rate.RateSweep(table, settings, "lr_hmda", "sgd")
    assert measured.stable_rates("d_rr")[-1] == 2 and measured.stable_rates("cd_grab")[-1] == 5
    stopped = table.assign(epochs_done=table["epochs_done"].where(table["rate"] != 0.2, 1))
    assert learning_rate.RateSweep(stopped, settings, "lr_hmda", "sgd").stable_rates("cd_grab") == [0.01, 0.05]
