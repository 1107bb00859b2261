"""The recipes of examples/extend as a user has them: a file elsewhere, one import; trained with, saved and resumed."""

import hashlib
import importlib
import shutil
import signal
import sys
from itertools import count

import pytest
import torch
import torch.nn.functional as F

from cdgrab.errors import CdgrabError, Stopped
from cdgrab.runtime.group import WorkerGroup
from cdgrab.sorters import SORTERS, Sorter, make_sorter
from cdgrab.sparsify import SPARSIFIERS
from experiments import train
from experiments.store.files import ROOT
from experiments.store.records import read_manifest, read_metrics
from experiments.studies import base as studies
from experiments.studies import sorters
from experiments.tasks import TASKS, make_task
from experiments.training.config import choices, compose
from experiments.training.loop import alone
from experiments.training.runlog import RunLog

SMALL = ["task=lr_hmda", "data=embedded", "workers=2", "task.batch=4", "task.limit=30", "compile=off", "epochs=3"]
REGISTRIES = (SORTERS, SPARSIFIERS, TASKS)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Copies a recipe out of the project and imports it; its name is forgotten afterwards."""
    before, loaded = [dict(registry) for registry in REGISTRIES], []

    def imported(name):
        for path in (ROOT / "examples" / "extend").glob(f"{name}.*"):
            shutil.copy(path, tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        module = importlib.import_module(name)
        loaded.append(name)
        return module

    yield imported
    for registry, names in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(names)
    for name in loaded:
        del sys.modules[name]


def trained(folder, *settings):
    assert train.main([*settings, f"run_dir={folder}"]) == 0
    return [
        {k: v for k, v in line.items() if k not in ("seconds", "phases")}
        for line in read_metrics(folder / "metrics.jsonl")
    ]


def stopped_and_resumed(folder, *settings):
    """Stopped in the second epoch, after one step of it."""
    calls, made = count(1), trainer([*settings, "checkpoint.every_steps=1", f"run_dir={folder}"])
    member = made.members[0]
    log = member.log = RunLog(member.run, active=True)
    log.begin(member.run, made.task.rows, member.sizes, 1, torch.device("cpu"))
    with pytest.raises(Stopped):
        made.fit(stop=lambda: signal.SIGTERM * (next(calls) == made.steps + 1))
    log.finish("stopped")
    assert made.epochs_done == 1 and 0 < made.position < made.units
    return trained(folder, *settings, "resume=true")


def trainer(settings):
    run = compose(settings)
    task = make_task(run.config, run.source, torch.device("cpu"))
    return alone(run, task, WorkerGroup(run.config.workers), torch.device("cpu"))


class ByHand:
    """Logistic regression with momentum, one example at a time: `epoch(order, average)` gives each unit's gradient."""

    def __init__(self, settings):
        made = trainer(settings)
        self.task, self.owned, self.lr = made.task, made.owned, made.config.task.lr
        self.microbatch, self.units = made.microbatch, made.units
        self.first_order = made.members[0].sorter.order(0)
        self.weights = torch.zeros(made.flat.dim, dtype=torch.float64)
        self.velocity = torch.zeros_like(self.weights)

    def losses(self, features, labels):
        logits = features @ self.weights[:-1] + self.weights[-1]
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none"), logits

    def gradient(self, unit):
        features, label = self.task.fetch("train", unit)
        residual = torch.sigmoid(features @ self.weights[:-1] + self.weights[-1]) - label
        return torch.cat([residual * features, residual[None]])

    def epoch(self, order, average=lambda means: means.mean(0)):
        """order [workers, units] -> the unit gradients at the time of the visit, [workers, units, dim]."""
        seen = []
        for start in range(0, self.units, self.microbatch):
            visits = self.owned.gather(1, order)[:, start : start + self.microbatch]
            gradients = torch.stack([torch.stack([self.gradient(unit) for unit in mine]) for mine in visits])
            self.velocity = 0.9 * self.velocity + average(gradients.mean(1))
            self.weights = self.weights - self.lr * self.velocity
            seen.append(gradients)
        return torch.cat(seen, dim=1)

    def train_loss(self):
        return float(self.losses(*self.task.fetch("train", self.owned.flatten()))[0].mean())


def order_hash(order):
    return hashlib.sha256(order.numpy().astype("<i8").tobytes()).hexdigest()


def test_a_sorter_of_ones_own_sees_gradients_and_goes_on_where_it_was(recipe, tmp_path):
    recipe("sorter")
    settings = [*SMALL, "sorter=longest_first"]
    found, hand = trained(tmp_path / "run", *settings), ByHand(settings)
    order = hand.first_order
    for line in found:
        assert line["order_hash"] == order_hash(order)
        norms = hand.epoch(order).norm(dim=2)
        assert line["train_loss"] == pytest.approx(hand.train_loss(), rel=1e-10)
        ranked = [sorted(range(hand.units), key=lambda k, n=mine: -n[k]) for mine in norms.tolist()]
        order = torch.stack([own[places] for own, places in zip(order, ranked, strict=True)])
    assert len({line["order_hash"] for line in found}) == 3
    assert stopped_and_resumed(tmp_path / "again", *settings) == found
    manifest = read_manifest(tmp_path / "run")
    assert (manifest["sorter"], manifest["sorter_label"]) == ("longest_first", "Longest first")
    assert (
        "longest_first" in choices("sorter")
        and "norms" in make_sorter("longest_first", workers=2, units=4, dim=3).state_dict()["per_worker"]
    )


def test_a_sorter_of_ones_own_takes_part_in_the_study_of_sorters(recipe, tmp_path, monkeypatch):
    recipe("sorter")
    monkeypatch.setattr(studies, "RESULTS", tmp_path)
    chosen = ["study=sorters", "size=smoke", "data=embedded", "study.sorters=[d_rr,longest_first]"]
    study = studies.compose_study(chosen)
    studies.carry_out(study)
    assert set(study.table["sorter"]) == {"d_rr", "longest_first"} and study.complete()
    labels = sorters.differences(study).axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == ["Longest first"]
    assert any("Longest first ends lower than D-RR" in verdict.claim for verdict in study.verdicts())


def test_a_sorter_whose_state_cannot_be_saved_is_refused(tmp_path):
    class Careless(Sorter):
        def look(self, gradients):
            self.seen = {gradients.shape}  # a set

        def next_order(self, epoch):
            return self.random_order(epoch)

    careless = Careless(workers=1, units=2, dim=1)
    careless.order(0)
    careless.observe([0], torch.zeros(1, 1, 1))
    with pytest.raises(CdgrabError, match="Careless.seen cannot be saved: it is a set"):
        careless.state_dict()


def test_a_sparsifier_of_ones_own_averages_what_it_selects(recipe, tmp_path):
    recipe("sparsifier")
    settings = [*SMALL, "sparsifier=random_k", "sparsifier.density=0.25", "sorter=shuffle_once"]
    found, hand = trained(tmp_path / "run", *settings), ByHand(settings)
    residual, steps = torch.zeros(2, len(hand.weights), dtype=torch.float64), count()

    def average(means):
        residual.add_(means)
        chosen = torch.randperm(len(hand.weights), generator=torch.Generator().manual_seed(next(steps)))
        chosen = chosen[: len(hand.weights) // 4]
        update = torch.zeros_like(hand.weights)
        update[chosen] = residual[:, chosen].mean(0)
        residual[:, chosen] = 0.0
        return update

    for line in found:
        hand.epoch(hand.first_order, average)
        assert line["train_loss"] == pytest.approx(hand.train_loss(), rel=1e-10)
        assert line["sparsifier"]["density"] == pytest.approx(0.25)
    assert stopped_and_resumed(tmp_path / "again", *settings) == found


def test_a_task_of_ones_own_needs_only_what_differs(recipe, tmp_path):
    spirals = recipe("task").Spirals
    settings = ["task=spirals", "task.dtype=float64", "task.points=100", "sorter=cd_grab", "compile=off", "epochs=3"]
    found = trained(tmp_path / "run", *settings)
    run = compose(settings)
    assert (run.config.task.lr, run.config.task.momentum, run.config.task.hidden) == (0.05, 0.9, 16)
    task = spirals(run.config.task, run.source, 4, 0, torch.device("cpu"))
    model = task.model.requires_grad_()  # an ordinary loop over the first order
    optimiser, made = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), trainer(settings)
    points, labels = task.data["train"]
    visits = made.owned.gather(1, made.members[0].sorter.order(0))
    for start in range(0, made.units, made.microbatch):
        batch = visits[:, start : start + made.microbatch].flatten()
        optimiser.zero_grad()
        F.cross_entropy(model(points[batch]), labels[batch]).backward()
        optimiser.step()
    with torch.no_grad():
        logits = model(points[made.owned.flatten()])
        loss = F.cross_entropy(logits, labels[made.owned.flatten()])
    assert found[0]["train_loss"] == pytest.approx(float(loss), rel=1e-9)
    assert found[0]["test_error_rate"] == 100 - found[0]["test_accuracy"]
    assert stopped_and_resumed(tmp_path / "again", *settings) == found
    manifest = read_manifest(tmp_path / "run")
    assert (
        manifest["data"]["rows"] == {"all": 100, "train": 80, "test": 20} and manifest["science"]["source"] == "made-up"
    )


def test_all_that_is_wrong_with_a_task_of_ones_own_is_said_at_once(recipe):
    recipe("task")
    wrong = ["task=spirals", "task.points=3", "task.lr=fast", "task.hidden=0", "workers=0", "sorter.rule=magic"]
    with pytest.raises(CdgrabError) as refusal:
        compose(wrong)
    sentence = str(refusal.value)
    assert sentence.startswith("5 settings are wrong: ") and "\n" not in sentence
    for key in ("task.points", "task.lr", "task.hidden", "workers must", "rule must be greedy or walk"):
        assert key in sentence
