"""CIFAR-10: the model and its per-example gradients, the embedded digits, the herding metric, a run."""

import numpy as np
import pytest
import torch

from cdgrab.errors import CdgrabError
from cdgrab.herding import parallel_herding_bound
from cdgrab.runtime.group import WorkerGroup
from experiments import train
from experiments.store.records import read_manifest, read_metrics
from experiments.tasks import make_task
from experiments.training.compiled import Compiled
from experiments.training.config import compose
from experiments.training.evaluation import evaluate, evaluate_together, fixed_herding
from experiments.training.gradients import FlatParameters, gradient_function, over_replicas, summed, together

WORKERS, UNITS = 2, 3


def embedded_task(*settings):
    run = compose(["task=cifar10", "data=embedded", *settings])
    return make_task(run.config, run.source, torch.device("cpu"))


@pytest.fixture(scope="module")
def problem():
    """Task, flat parameters, their start, a batch [workers, units, ...]; in float64. Constant images are all ties."""
    task = embedded_task("task.dtype=float64")
    flat = FlatParameters(task.model)
    random = torch.Generator().manual_seed(0)
    images = torch.randn(WORKERS, UNITS, 3, 32, 32, dtype=torch.float64, generator=random)
    images[0, 0], images[1, 2] = 0.0, torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)[:, None, None]
    labels = torch.randint(10, (WORKERS, UNITS), generator=random)
    parameters = flat.flatten({name: p.detach() for name, p in task.model.named_parameters()})
    return task, flat, parameters, (images, labels)


# -- the model --------------------------------------------------------------------------------------------------------


def ordinary_lenet():
    nn = torch.nn
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 120, 5), nn.ReLU(), nn.Flatten(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    ).double()


def test_published_weights_are_those_of_an_ordinary_lenet_after_manual_seed():
    task = embedded_task("task.initial_weights=published", "seed=3", "task.dtype=float64")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = ordinary_lenet()
    for ours, theirs in zip(task.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.flatten(), theirs.flatten())


@pytest.fixture(scope="module")
def one_by_one(problem):
    """Gradients [workers, units, dim] and losses [workers, units] by ordinary backward passes."""
    _, flat, parameters, (images, labels) = problem
    model = ordinary_lenet()
    torch.nn.utils.vector_to_parameters(parameters, model.parameters())
    gradients = torch.empty(WORKERS, UNITS, flat.dim, dtype=torch.float64)
    losses = torch.empty(WORKERS, UNITS, dtype=torch.float64)
    for w, u in np.ndindex(WORKERS, UNITS):
        loss = torch.nn.functional.cross_entropy(model(images[w, u][None]), labels[w, u][None])
        gradient = torch.autograd.grad(loss, list(model.parameters()))
        gradients[w, u], losses[w, u] = torch.cat([g.flatten() for g in gradient]), loss.detach()
    return gradients, losses


@pytest.mark.parametrize("units", [1, UNITS], ids=["one_unit", "several_units"])
@pytest.mark.parametrize(("how", "traced"), [("vmap", False), ("vmap", True), ("backward", False)])
@pytest.mark.parametrize("per_unit", [False, True], ids=["means", "per_unit"])
def test_gradients_equal_a_one_by_one_loop_over_an_ordinary_network(problem, one_by_one, per_unit, how, traced, units):
    task, flat, parameters, batch = problem
    expected, losses, *batch = (tensor[:, :units] for tensor in (*one_by_one, *batch))
    compute = Compiled(gradient_function(task, flat, per_unit, how), traced).for_inputs(parameters, *batch)
    with torch.no_grad():
        for _ in range(3):  # the TorchScript interpreter re-optimises on its second and third call
            gradients, means, worker_losses = compute(parameters, *batch)
    torch.testing.assert_close(means, expected.mean(1), rtol=0, atol=1e-10)
    torch.testing.assert_close(worker_losses, losses.mean(1), rtol=0, atol=1e-10)
    if per_unit:
        torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("lookers", [0, 1])
def test_runs_whose_sorters_do_not_look_get_the_same_mean_gradients(problem, lookers, monkeypatch):
    """In a group with one that looks, or without."""
    task, flat, parameters, batch = problem
    owned, batch = torch.empty(3, WORKERS, 1), [tensor[:, :1].expand(3, *tensor[:, :1].shape) for tensor in batch]
    parameters = parameters * torch.tensor([[1.0], [0.9], [1.1]], dtype=torch.float64)
    each = summed(gradient_function(task, flat, bool(lookers)), WORKERS)
    monkeypatch.setattr("experiments.training.gradients.MANY", 0)
    units, means, losses = together(task, flat, each, "vmap", owned, lookers)(parameters, *batch)
    expected_units, expected_means, expected_losses = over_replicas(each, lookers, "vmap")(parameters, *batch)
    assert units.numel() == expected_units.numel() == lookers * WORKERS * flat.dim
    assert torch.equal(units.flatten(), expected_units.flatten())
    torch.testing.assert_close(means, expected_means, rtol=0, atol=1e-12)
    torch.testing.assert_close(losses.mean(1), expected_losses.mean(1), rtol=1e-12, atol=0)


def test_several_runs_evaluated_at_once_have_the_metrics_of_each():
    task = embedded_task("task.dtype=float64", "task.limit=41", "task.test_limit=30", "workers=2", "task.batch=2")
    task.evaluated_at_once = 16
    flat, group = FlatParameters(task.model), WorkerGroup(2)
    parameters = torch.randn(2, flat.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 8
    owned = torch.stack([torch.randperm(40).view(2, 20), torch.arange(1, 41).view(2, 20)])
    found = evaluate_together(task, flat.unflatten(parameters), owned)
    for own, its, metrics in zip(parameters, owned, found, strict=True):
        assert metrics == pytest.approx(evaluate(task, flat.unflatten(own), its, group), rel=1e-12)
    assert found[0]["train_loss"] != found[1]["train_loss"]


def test_the_model_is_lenet(problem):
    _, flat, _, _ = problem
    assert flat.dim == 62_006
    assert [shape.numel() for shape in flat.shapes.values()] == [p.numel() for p in ordinary_lenet().parameters()]


def test_evaluation_in_chunks_equals_the_ordinary_network(problem, monkeypatch):
    task, flat, vector, _ = problem
    monkeypatch.setattr(task, "evaluated_at_once", 150)
    model = ordinary_lenet()
    torch.nn.utils.vector_to_parameters(vector, model.parameters())
    with torch.no_grad():
        units = {"train": torch.arange(200), "test": torch.arange(160)}
        totals = [task.totals(split, flat.unflatten(vector), some) for split, some in units.items()]
        metrics = task.metrics(*({name: float(value) for name, value in total.items()} for total in totals))
        for split, some in units.items():
            images, labels = task.fetch(split, some)
            logits = model(images)
            loss, correct = torch.nn.functional.cross_entropy(logits, labels), logits.argmax(1) == labels
            assert metrics[f"{split}_loss"] == pytest.approx(float(loss), rel=1e-12)
            assert metrics[f"{split}_accuracy"] == pytest.approx(100 * float(correct.double().mean()))


@pytest.mark.parametrize(
    ("setting", "message"),
    [("limit=0", "at least 1"), ("train_share=1.5", "above 0 and below 1"), ("herding_every=-1", "at least 0")],
)
def test_bad_settings_are_one_sentence(setting, message):
    with pytest.raises(CdgrabError, match=f"task.{setting.split('=')[0]} must be .*{message}"):
        embedded_task(f"task.{setting}")


def test_embedded_default_is_the_digits():
    task, other = embedded_task("size=paper"), embedded_task("size=paper", "seed=1")
    assert task.source.label == "embedded" and task.rows == {"all": 1797, "train": 1437, "test": 360}
    images, labels = task.fetch("test", torch.arange(task.test_units))
    assert labels.unique().tolist() == list(range(10)) and images.dtype == torch.float32
    grey = images[0, 0] * 0.2023 + 0.4914
    torch.testing.assert_close(grey * 16, (grey * 16).round(), atol=1e-4, rtol=0)
    assert torch.equal(grey, grey[::4, ::4].repeat_interleave(4, 0).repeat_interleave(4, 1))
    assert not torch.equal(images, other.fetch("test", torch.arange(other.test_units))[0])


# -- runs and their herding metric ------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatch", [1, 2, 4])
def test_herding_metric_equals_the_bound_of_all_gradients_at_once(microbatch):
    task = embedded_task("task.dtype=float64", "task.limit=16")
    flat, group = FlatParameters(task.model), WorkerGroup(3)
    parameters = flat.flatten({name: p.detach() for name, p in task.model.named_parameters()})
    owned = torch.randperm(15, generator=torch.Generator().manual_seed(1)).view(3, 5)
    order = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(w)) for w in range(3)])
    compute = gradient_function(task, flat, per_unit=True)
    with torch.no_grad():
        found = fixed_herding(task, compute, parameters, owned.gather(1, order), group, microbatch)
        every, *_ = compute(parameters, *task.fetch("train", owned))
    assert found["herding_per_step"] == pytest.approx(parallel_herding_bound(every, order), rel=1e-10)
    assert found["herding_per_vector"] == pytest.approx(parallel_herding_bound(every, order, True), rel=1e-10)


def smoke_run(folder, *more):
    settings = ["task=cifar10", "data=embedded", "size=smoke", "workers=16", "epochs=2", f"run_dir={folder}"]
    assert train.main([*settings, *more]) == 0
    return read_metrics(folder / "metrics.jsonl")


def test_a_run_logs_everything_and_measuring_changes_nothing(tmp_path):
    measure = ("task.herding_every=2", "task.herding_replays=[1, 2]")
    plain, measured = smoke_run(tmp_path / "plain"), smoke_run(tmp_path / "measured", *measure)
    assert {"train_loss", "train_accuracy", "test_loss", "test_accuracy"} <= plain[0].keys()
    sizes = {"workers": 16, "units": 8, "microbatch": 4, "steps_per_epoch": 2, "parameters": 62_006}
    assert read_manifest(tmp_path / "plain")["sizes"] == sizes
    assert "herding_per_step" not in measured[0]
    assert 0 < measured[1]["herding_per_step"] <= measured[1]["herding_per_vector"]
    for key in ("train_loss", "order_hash"):
        assert plain[1][key] == measured[1][key]


def test_herding_is_measured_for_sorters_that_see_no_gradients(tmp_path):
    lines = smoke_run(tmp_path, "sorter=d_rr", "task.herding_every=1")
    assert all(0 < line["herding_per_step"] <= line["herding_per_vector"] for line in lines)


@pytest.mark.parametrize("experiment", ["fig4_cifar10_workers", "fig12_cifar10_lr"])
def test_experiments_have_the_papers_settings(experiment):
    config = compose([f"experiment={experiment}", "data=embedded", "size=paper"]).config
    assert (config.workers, config.epochs, config.task.batch, config.task.truncate) == (64, 100, 64, True)
    assert (config.task.lr, config.task.momentum, config.task.weight_decay) == (1e-3, 0.9, 1e-2)
