"""Sparsifiers in the training loop: against a plain loop, on every task, resumed; the default changes nothing."""

import json

import numpy as np
import pytest
import sparsify_oracles as oracles
import torch
from test_runs import run, without_time

from cdgrab.balance import reference
from cdgrab.runtime.group import WorkerGroup
from experiments.store.files import ROOT
from experiments.store.records import read_manifest
from experiments.tasks import TASKS, make_task
from experiments.training.config import compose
from experiments.training.loop import Trainer, alone


def test_metrics_equal_an_independent_training_loop_whose_sorter_sees_raw_gradients(tmp_path):
    """Plain PyTorch, the oracle of top-k and the reference sorter; float64, odd units, short last step."""
    settings = ["workers=2", "task.batch=30", "sparsifier=topk", "sparsifier.density=0.1"]
    lines = run(tmp_path / "run", "epochs=2", *settings)
    config = compose(["data=embedded", *settings])
    task = make_task(config.config, config.source, torch.device("cpu"))
    trainer = alone(config, task, WorkerGroup(2), torch.device("cpu"))
    owned, order, dim = trainer.owned, trainer.members[0].sorter.order(0).tolist(), trainer.flat.dim
    parameters, momentum = trainer.loop.parameters.clone(), torch.zeros(dim, dtype=torch.float64)
    oracle = oracles.Oracle(oracles.topk, 2, dim, 0.1)
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    for line in lines:
        seen, densities = [[], []], []
        for start in range(0, 795, 15):
            means = []
            for w in range(2):
                for unit in order[w][start : start + 15]:
                    x, y = task.fetch("train", owned[w][unit])
                    leaf = parameters.clone().requires_grad_()
                    logit = torch.func.functional_call(task.model, trainer.flat.unflatten(leaf), (x,))[0]
                    seen[w].append(torch.autograd.grad(bce(logit, y), leaf)[0].numpy())
                means.append(np.mean(seen[w][start:], axis=0))
            update, sets = oracle.reduce(np.stack(means))
            densities.append(len(set().union(*sets)) / dim)
            momentum = 0.9 * momentum + torch.from_numpy(update)
            parameters = parameters - 0.05 * momentum
        x, y = task.fetch("train", owned.flatten())
        logits = torch.func.functional_call(task.model, trainer.flat.unflatten(parameters), (x,))[:, 0]
        assert line["train_loss"] == pytest.approx(bce(logits, y).item(), abs=1e-12)
        assert line["sparsifier"]["density"] == pytest.approx(np.mean(densities))
        assert line["sparsifier"]["build_up"] == pytest.approx(np.mean(densities) / 0.1)
        order = reference.cd_grab(order, seen)


@pytest.mark.parametrize("name", TASKS)
def test_cd_grab_with_exdyna_trains_every_task(name, tmp_path):
    settings = [f"task={name}", "size=smoke", "epochs=1", "workers=4", "sparsifier=exdyna", "sparsifier.density=0.1"]
    limits = {
        "lstm_wiki2": ["task.limit=6", "task.chunk_length=8"],
        "mlp_m4": ["task.limit=64"],
        "glue": ["task.limit=64"],
    }
    more = ["task.batch=64"] if name == "lr_hmda" else ["compile=off", *limits.get(name, [])]
    found, manifest = run(tmp_path / "run", *settings, *more)[0]["sparsifier"], read_manifest(tmp_path / "run")
    assert found["density"] == pytest.approx(0.1, rel=0.2) and found["threshold"] > 0
    assert found["imbalance"] <= (0.6 if name == "lr_hmda" else 0.3)  # there, five coordinates for four workers
    dim, workers = manifest["sizes"]["parameters"], 4
    values = 2 * (workers - 1) / workers * found["density"] * dim  # summed in a ring; indices come on top
    size = 8 if manifest["config"]["task"]["dtype"] == "float64" else 4
    assert size * values < found["bytes"] < 2.5 * size * values + 10_000
    assert manifest["sparsifier"] == "exdyna"


def test_everything_selected_is_the_plain_mean(tmp_path):
    settings = ["task=cifar10", "size=smoke", "task.limit=128", "workers=4", "epochs=2"]
    dense = run(tmp_path / "dense", *settings)
    sparse = run(tmp_path / "sparse", *settings, "sparsifier=topk", "sparsifier.density=1")
    found = [line.pop("sparsifier") for line in sparse]
    assert without_time(sparse) == without_time(dense)
    assert found[0].keys() == {"density", "imbalance", "bytes", "build_up"} and found[0]["density"] == 1.0


@pytest.mark.parametrize("sparsifier", ["exdyna", "sidco", "deft"])
def test_resumes_exactly(tmp_path, monkeypatch, sparsifier):
    settings = [f"sparsifier={sparsifier}", "sparsifier.density=0.1", "epochs=4", "task.batch=64"]
    whole, save = run(tmp_path / "whole", *settings), Trainer.save

    def interrupted_after_two(self):
        save(self)
        if self.epochs_done == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "save", interrupted_after_two)
        run(tmp_path / "parts", *settings, expect=130)
    assert without_time(run(tmp_path / "parts", *settings, "resume=true")) == without_time(whole)


def test_deft_takes_the_models_layers():
    found = compose(["data=embedded", "sparsifier=deft"])
    task = make_task(found.config, found.source, torch.device("cpu"))
    trainer = alone(found, task, WorkerGroup(4), torch.device("cpu"))
    assert trainer.members[0].sparse_mean.sparsifier.layers == [p.numel() for p in task.model.parameters()]


def test_divergence_is_one_sentence(tmp_path, capsys):
    run(tmp_path / "run", "sparsifier=exdyna", "task=mlp_m4", "size=smoke", "task.lr=1e30", expect=3)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "diverged in epoch 1 at step" in error and read_manifest(tmp_path / "run")


# -- identity ---------------------------------------------------------------------------------------------------------


def test_the_default_is_no_other_run_than_before_there_were_sparsifiers(tmp_path, capsys):
    plain = compose(["data=embedded"])
    assert not [key for key in plain.science if key.startswith("sparsifier")]
    assert (plain.directory, plain.science) == tuple(
        getattr(compose(["data=embedded", "sparsifier=dense"]), name) for name in ("directory", "science")
    )
    run(tmp_path / "run", "epochs=1")
    manifest = read_manifest(tmp_path / "run")
    del manifest["config"]["sparsifier"], manifest["sparsifier"]
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest))
    run(tmp_path / "run", "epochs=1")
    assert "already complete" in capsys.readouterr().out
    run(tmp_path / "run", "epochs=1", "sparsifier=exdyna", expect=2)
    assert "sparsifier.name 'dense' there, 'exdyna' here" in capsys.readouterr().err


def test_the_sparsifier_is_in_the_folders_name():
    base = ["data=embedded", "experiment=fig3a_lr_hmda"]
    one = compose([*base, "sparsifier=exdyna"])
    other = compose([*base, "sparsifier=exdyna", "sparsifier.density=0.001"])
    folder = ROOT / "results" / "runs" / "lr_hmda" / "fig3a_lr_hmda"
    assert (ROOT / one.directory).parent == folder / "embedded,sparsifier=exdyna"
    assert (ROOT / other.directory).parent == folder / "embedded,sparsifier=exdyna,sparsifier.density=0.001"
    assert one.science != other.science


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sparsifier", ["exdyna", "topk", "deft", "sidco", "fp16", "powersgd", "corrected"])
def test_a_gpu_gives_the_metrics_of_a_cpu(tmp_path, sparsifier):
    settings = ["epochs=2", "task.batch=64", f"sparsifier={sparsifier}"]
    if sparsifier == "corrected":
        settings[2:] = ["sparsifier=exdyna", "sparsifier.momentum_correction=0.9", "sparsifier.warm_up_steps=9"]
        settings += ["task.momentum=0"]
    settings += ["sparsifier.density=0.1"] if sparsifier not in ("fp16", "powersgd") else []
    cpu, gpu = (run(tmp_path / device, *settings, f"device={device}") for device in ("cpu", "cuda"))
    for one, other in zip(cpu, gpu, strict=True):
        assert other["train_loss"] == pytest.approx(one["train_loss"], rel=1e-6)
        assert other["sparsifier"] == pytest.approx(one["sparsifier"], rel=1e-6)
