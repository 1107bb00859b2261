"""MLP-M4: the paper's counts, forecasts and gradients against a plain module, damaged files, a small run."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from cdgrab.errors import CdgrabError
from experiments import train
from experiments.data import m4
from experiments.store.records import read_manifest, read_metrics
from experiments.tasks import make_task
from experiments.tasks.mlp_m4 import cut_windows
from experiments.training.compiled import Compiled
from experiments.training.config import compose
from experiments.training.gradients import FlatParameters, by_factors, gradient_function, over_replicas

real_data = pytest.mark.skipif(
    not (Path(os.environ.get("CDGRAB_DATA", "")) / "m4" / "Weekly-train.csv").is_file(),
    reason="needs m4/Weekly-train.csv and Weekly-test.csv in CDGRAB_DATA (`make data-mlp-m4`)",
)


def make(*settings):
    run = compose(["task=mlp_m4", *settings])
    return make_task(run.config, run.source, torch.device("cpu"))


@pytest.fixture(scope="module")
def task():
    return make("data=embedded", "task.dtype=float64")


def forecast(model, past, steps):
    """One series at a time, one value at a time, with an ordinary module."""
    values = list(past)
    for _ in range(steps):
        values.append(model(torch.stack(values[-20:]))[0])
    return torch.stack(values[20:])


def test_windows_by_hand():
    windows = cut_windows([np.arange(10.0), np.arange(3.0), np.arange(100.0, 106.0)], length=4, stride=3)
    assert windows.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [100, 101, 102, 103]]
    assert cut_windows([np.arange(3.0)], length=4, stride=1).shape == (0, 4)


def test_embedded_default(task):
    assert task.source.embedded and task.rows["series"] == 4
    assert sum(p.numel() for p in task.model.parameters()) == 5569
    past, future = task.fetch("train", torch.arange(task.train_units))
    assert past.shape == (task.train_units, 20) and future.shape == (task.train_units, 6)
    assert task.train_units == int(0.9 * task.rows["all"])


@pytest.mark.parametrize("how", ["vmap", "backward"])
@pytest.mark.parametrize("units", [1, 3])
def test_gradients_equal_a_one_by_one_loop(task, how, units):
    flat = FlatParameters(task.model)
    parameters = flat.flatten({name: p.detach() for name, p in task.model.named_parameters()})
    batch = task.fetch("train", torch.arange(5 * units).view(5, units))
    with torch.no_grad():
        gradients, means, losses = gradient_function(task, flat, True, how)(parameters, *batch)
    for w in range(5):
        for u in range(units):
            loss = (forecast(task.model, batch[0][w, u], 6) - batch[1][w, u]).square().mean()
            expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(task.model.parameters()))])
            torch.testing.assert_close(gradients[w, u], expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(means, gradients.mean(1), rtol=0, atol=1e-12)


def test_gradients_of_several_runs_from_factors_equal_those_of_each(task):
    """As traced: with operations in place."""
    flat = FlatParameters(task.model)
    parameters = flat.flatten({name: p.detach() for name, p in task.model.named_parameters()})
    inputs = (torch.stack([parameters, 2 * parameters]), *task.fetch("train", torch.arange(6).view(2, 3, 1)))
    each = over_replicas(gradient_function(task, flat, per_unit=True), 2, "vmap")
    compute = Compiled(by_factors(task, flat, lookers=1)).for_inputs(*inputs)
    with torch.no_grad():
        expected, _, expected_losses = each(*inputs)
        for _ in range(3):  # TorchScript optimises until its third call
            gradients, mean, losses = compute(*inputs)
    torch.testing.assert_close(gradients, expected[:1], rtol=0, atol=1e-12)
    torch.testing.assert_close(mean, expected.mean((1, 2)), rtol=0, atol=1e-12)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-12, atol=0)


def test_metrics_equal_a_plain_loop(task):
    parameters = {name: p.detach() for name, p in task.model.named_parameters()}
    everything = torch.arange(task.train_units)
    train_totals = {k: float(v) for k, v in task.totals("train", parameters, everything).items()}
    test_totals = {k: float(v) for k, v in task.totals("test", parameters, torch.arange(4)).items()}
    metrics = task.metrics(train_totals, test_totals)
    series, _ = m4.load(task.source)
    errors = []
    with torch.no_grad():
        for past, future in zip(series.past, series.future, strict=True):
            scaled = torch.from_numpy((past - past.mean()) / past.std())[-20:]
            predicted = forecast(task.model, scaled, 13) * past.std() + past.mean()
            future = torch.from_numpy(future)
            errors += (200 * (predicted - future).abs() / (predicted.abs() + future.abs())).tolist()
        past, future = task.fetch("train", everything[:50])
        squares = [(forecast(task.model, p, 6) - f).square().mean() for p, f in zip(past, future, strict=True)]
    assert metrics["test_smape"] == pytest.approx(np.mean(errors), rel=1e-12)
    part = task.totals("train", parameters, everything[:50])
    assert float(part["squares"] / part["count"]) == pytest.approx(float(torch.stack(squares).mean()), rel=1e-12)


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "m4").mkdir()
    with pytest.raises(CdgrabError, match="Weekly-train.csv is missing"):
        m4.load(m4.locate(root=str(tmp_path)))
    (tmp_path / "m4" / "Weekly-train.csv").write_text("V1,V2\nW1,1\n")
    with pytest.raises(CdgrabError, match="Weekly-train.csv is damaged"):
        m4.load(m4.locate(root=str(tmp_path)))


def test_a_small_run(tmp_path):
    settings = ["task=mlp_m4", "data=embedded", "size=smoke", "workers=32", "epochs=3", f"run_dir={tmp_path / 'run'}"]
    assert train.main(settings) == 0
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["train_loss"] < lines[0]["train_loss"] and 0 < lines[-1]["test_smape"] < 200
    assert read_manifest(tmp_path / "run")["sizes"]["microbatch"] == 1


@real_data
def test_the_papers_counts():
    task = make("task.truncate=true", "size=paper", "workers=32")
    assert task.rows == {"all": 119_316, "train": 107_384, "series": 359}
    assert task.partition(torch.randperm(task.train_units)).shape == (32, 3_354)
