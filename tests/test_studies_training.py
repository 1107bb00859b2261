"""Studies that train: their runs are those of the suite, verdicts of made-up results, whole studies at smoke size."""

import json
import math
import subprocess
import sys
from functools import cache
from zlib import crc32

import numpy as np
import pandas as pd
import pytest
import torch

from cdgrab.config import ROOT, compose
from cdgrab.errors import CdgrabError
from cdgrab.runlog import read_metrics
from cdgrab.significance import holm
from cdgrab.studies import heterogeneity, learning_rate, scaling, sorters
from cdgrab.studies.base import compose_study
from cdgrab.studies.looks import label
from cdgrab.studies.training import outcome, overrides, train
from cdgrab.tasks import make_task
from experiments.train import train as ordinary_run

STUDIES = {"heterogeneity": heterogeneity, "learning_rate": learning_rate, "scaling": scaling, "sorters": sorters}


@cache
def settings_of(name, size="paper"):
    return compose_study([f"study={name}", f"size={size}", "data=embedded"]).settings


def answers(name, table, settings):
    return {verdict.claim: verdict.answer for verdict in STUDIES[name].verdicts(table, settings)}


# -- runs -------------------------------------------------------------------------------------------------------------


def test_a_part_is_an_ordinary_run(tmp_path):
    run = overrides(settings_of("scaling", "smoke"), "lr_hmda", "cd_grab,rule=walk")
    ordinary_run(compose([*run, "seed=1", f"run_dir={tmp_path / 'run'}"]))
    ordinary, ours = read_metrics(tmp_path / "run" / "metrics.jsonl"), train(run, seed=1)
    assert len(ours) == 1 + len(ordinary) and ours[0]["train_loss"] == pytest.approx(math.log(2))
    for mine, other in zip(ours[1:], ordinary, strict=True):
        assert {key: mine[key] for key in ("train_loss", "test_accuracy", "order_hash")} == {
            key: other[key] for key in ("train_loss", "test_accuracy", "order_hash")
        }


def test_a_run_that_diverges_ends_early():
    run = overrides(settings_of("learning_rate", "smoke"), "lr_hmda", "d_rr", lr=1e308, epochs=4)
    found = outcome(train(run, seed=0))
    assert found["epochs_done"][0] < 4 and found["start_loss"] == [pytest.approx(math.log(2))]


def test_outcomes_by_hand():
    epochs = [{"train_loss": 9.0}] + [{"train_loss": float(k), "test_accuracy": 50.0, "seconds": 1.0} for k in range(8)]
    epochs[-1]["herding_per_step"] = 3.0
    assert outcome(epochs) == {
        "start_loss": [9.0],
        "train_loss": [6.5],  # of the last two of eight
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
    with pytest.raises(CdgrabError, match="task.model must be lenet or linear, got 'mlp'"):
        task("task=cifar10", "task.model=mlp")


def test_sorters_with_options_have_labels():
    assert label("cd_grab,sketch=countsketch,sketch_size=64") == "CD-GraB, sketch of 64"
    assert label("cd_grab,rule=walk") == "CD-GraB, random walk" and label("d_rr,shared=true") == "D-RR, shared order"
    assert len({label(sorter) for sorter in settings_of("sorters").sorters}) == 15


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


# -- verdicts ---------------------------------------------------------------------------------------------------------


def made_up(name, loss, size="paper", **more):
    """All runs of a study; `loss` and `more` are functions of a part's key."""
    settings, rows = settings_of(name, size), []
    for part in STUDIES[name].parts(settings):
        if part.alone:
            continue
        noise = 1e-4 * np.random.default_rng(crc32(json.dumps(part.key).encode())).normal()
        value = loss(part.key) * (1 + 0.01 * part.key["seed"]) + noise  # seeds differ more than sorters
        epochs = settings.tasks[part.key["task"]].epochs
        others = {column: function(part.key) * (1 + 1e-3 * noise) for column, function in more.items()}
        rows.append(part.key | {"train_loss": value, "start_loss": 2.0, "epochs_done": epochs} | others)
    return pd.DataFrame(rows), settings


def test_verdicts_of_sorters():
    levels = {"d_rr": 1.0, "id_grab_pair": 0.95, "cd_grab": 0.9, "cd_grab,rule=walk": 0.99}
    found = answers("sorters", *made_up("sorters", lambda key: levels.get(key["sorter"], 0.91)))
    assert found["LR-HMDA: CD-GraB ends lower than D-RR"] == "holds"
    assert found["MLP-M4: CD-GraB ends lower than ID-GraB (PairBal)"] == "holds"
    assert found["MLP-M4: CD-GraB, sketch of 64 keeps four fifths of CD-GraB's advantage"] == "holds"
    assert found["MLP-M4: CD-GraB, random walk keeps four fifths of CD-GraB's advantage"] == "fails"
    assert found["LR-HMDA: Shuffle once ends lower than D-RR"] == "holds"
    reverse = answers("sorters", *made_up("sorters", lambda key: 1.9 - levels.get(key["sorter"], 0.91)))
    assert reverse["LR-HMDA: CD-GraB ends lower than D-RR"] == "fails"
    assert reverse["LR-HMDA: CD-GraB, sketch of 64 keeps four fifths of CD-GraB's advantage"] == "undecided"


def test_the_table_of_sorters_adjusts_for_many_tests():
    metrics = {"test_accuracy": lambda key: 80.0, "test_smape": lambda key: 9.0}
    runs = made_up("sorters", lambda key: 0.9 if key["sorter"] == "cd_grab" else 1.0, **metrics)
    table = sorters.sorter_table(*runs)
    lines = [line for line in table.splitlines() if "| CD-GraB " in line]
    assert len(lines) == 2 and all("5 of 5" in line for line in lines) and len(table.splitlines()) == 32


def test_verdicts_of_learning_rates():
    def loss(key):
        """D-RR fails at the largest rate; CD-GraB's advantage grows with the rate."""
        rate, ours = key["rate"], key["sorter"] == "cd_grab"
        largest = {"lr_hmda": {"sgd": 5, "adamw": 2}, "cifar10": {"sgd": 0.05, "adamw": 0.02}}
        if rate == largest[key["task"]][key["optimiser"]] and not ours:
            return 3.0
        return 1.0 - 0.2 * ours * rate

    table, settings = made_up("learning_rate", loss)
    found = answers("learning_rate", table, settings)
    for name in ("LR-HMDA, SGD with momentum", "CIFAR-10, AdamW"):
        assert found[f"{name}: CD-GraB's largest stable rate is no smaller than D-RR's"] == "holds"
        assert found[f"{name}: each at its best rate, CD-GraB ends lower than D-RR"] == "holds"
        assert found[f"{name}: at no stable rate does CD-GraB end more than 0.5 % higher"] == "holds"
    grows = ": CD-GraB's advantage is larger at the largest stable rate than at the smallest"
    assert found[f"LR-HMDA, SGD with momentum{grows}"] == "holds"
    swapped = table.assign(sorter=table["sorter"].replace({"cd_grab": "d_rr", "d_rr": "cd_grab"}))
    bad = answers("learning_rate", swapped, settings)
    assert bad["LR-HMDA, AdamW: CD-GraB's largest stable rate is no smaller than D-RR's"] == "fails"
    assert bad["LR-HMDA, AdamW: each at its best rate, CD-GraB ends lower than D-RR"] == "fails"
    measured = learning_rate.Measured(table, settings, "lr_hmda", "sgd")
    assert measured.stable_rates("d_rr")[-1] == 2 and measured.stable_rates("cd_grab")[-1] == 5
    stopped = table.assign(epochs_done=table["epochs_done"].where(table["rate"] != 0.2, 1))
    assert learning_rate.Measured(stopped, settings, "lr_hmda", "sgd").stable_rates("cd_grab") == [0.01, 0.05]


def test_verdicts_of_heterogeneity():
    def measured(advantage):
        more = {"herding_per_step": lambda key: 10.0 if key["alpha"] > 1 else 5.0, "test_accuracy": lambda key: 80.0}
        return answers(
            "heterogeneity",
            *made_up("heterogeneity", lambda k: 1.0 - advantage(k["alpha"]) * (k["sorter"] == "cd_grab"), **more),
        )

    kept, lost = measured(lambda alpha: 0.1), measured(lambda alpha: 0.1 if alpha > 1 else 0.0)
    share = "CIFAR-10: at alpha 0.05 CD-GraB keeps four fifths of its advantage at alpha 100"
    assert (kept[share], lost[share]) == ("holds", "fails")
    assert kept["LR-HMDA, alpha 0.05: CD-GraB ends lower than D-RR"] == "holds"
    assert lost["LR-HMDA: skew lowers D-RR's herding bound"] == "holds"
    assert lost["LR-HMDA, alpha 0.05: CD-GraB's test accuracy is at most half a point below D-RR's"] == "holds"
    assert measured(lambda alpha: 0.0 if alpha > 1 else 0.1)[share] == "undecided"


def test_verdicts_of_scaling():
    def measured(time, traffic, growth):
        bound = {"d_rr": 0.0, "id_grab_pair": growth, "cd_grab": 0.0}
        table, settings = made_up(
            "scaling",
            lambda key: 0.9 if key["sorter"] == "cd_grab" else 1.0,
            herding_per_step=lambda key: 5 * key["workers"] ** bound[key["sorter"]],
        )
        rows = []
        for key in (part.key for part in scaling.parts(settings) if part.alone):
            sent = 0 if key["processes"] == 1 else 100
            for epoch in range(4):
                seconds = {"d_rr_seconds": 1.0, "cd_grab_seconds": time + 0.01 * epoch}
                rows.append(key | {"epoch": epoch, "d_rr_bytes": sent, "cd_grab_bytes": traffic * sent} | seconds)
        return answers("scaling", pd.concat([table, pd.DataFrame(rows)], ignore_index=True), settings)

    good, bad = measured(1.2, 1.0, 0.5), measured(2.0, 3.0, -0.5)
    assert set(good.values()) == {"holds"}
    assert {claim.partition(": ")[2] for claim, answer in bad.items() if answer == "fails"} == {
        "CD-GraB's epochs take at most 1.5 times D-RR's, on one process",
        "CD-GraB's epochs take at most 1.5 times D-RR's, on 2 to 8 processes",
        "the bound of ID-GraB (PairBal) grows faster with the workers",
        "CD-GraB sends as much as D-RR",
    }


# -- whole studies ----------------------------------------------------------------------------------------------------

RUN_ALL = """
import json, sys
from pathlib import Path
import matplotlib; matplotlib.use("agg")
from cdgrab.studies.base import carry_out, compose_study
from cdgrab.studies.collection import write_collection
for name in sys.argv[1:]:
    carry_out(compose_study([f"study={name}", "size=smoke", "data=embedded"]))
    cells = json.loads(Path(f"notebooks/study_{name}.ipynb").read_text())["cells"]
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
write_collection()
"""


def test_studies_run_offline_and_their_notebooks_draw(tmp_path):
    """Cell by cell in one process: a kernel for each would take longer than everything else."""
    for name in ("cdgrab", "configs", "experiments", "scripts", "notebooks"):
        subprocess.run(["cp", "-a", str(ROOT / name), str(tmp_path / name)], check=True)
    (tmp_path / "results").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, *STUDIES], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "results" / "STUDIES.md").read_text()
    for name in STUDIES:
        folder = tmp_path / "results" / "studies" / name / "smoke-embedded"
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["status"] == "finished" and all(source["embedded"] for source in manifest["data"].values())
        assert f"## {name}: " in page and f"study_{name}-smoke-embedded.png" in page
        for suffix in ("png", "pdf", "md"):
            assert (tmp_path / "results" / "figures" / f"study_{name}-smoke-embedded.{suffix}").stat().st_size > 500
    assert page.count("EMBEDDED DATA: ") == len(STUDIES) and "only shows that it runs" in page
