"""The recipes of examples/extend as a user has them: a file elsewhere, one import; trained with, saved and resumed."""

import hashlib
import importlib
import os
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
from experiments import launch, train
from experiments.store import files
from experiments.store.files import ROOT
from experiments.store.records import read_manifest, read_metrics
from experiments.studies import base as studies
from experiments.studies import sorters
from experiments.tasks import TASKS, make_task
from experiments.training import launcher
from experiments.training.composition import choices
from experiments.training.config import compose
from experiments.training.loop import alone
from experiments.training.runlog import RunLog

SMALL = ["task=lr_hmda", "data=embedded", "workers=2", "task.batch=4", "task.limit=30", "compile=off", "epochs=3"]
REGISTRIES = (SORTERS, SPARSIFIERS, TASKS)


@pytest.fixture
def copied(tmp_path):
    """Copies a recipe out of the project; the name that it registers is forgotten afterwards."""
    before = [dict(registry) for registry in REGISTRIES]

    def copy(name):
        for path in (ROOT / "examples" / "extend").glob(f"{name}.*"):
            shutil.copy(path, tmp_path)
        return tmp_path / f"{name}.py"

    yield copy
    for registry, names in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(names)


@pytest.fixture
def recipe(copied, monkeypatch):
    """Copies a recipe and imports it."""
    loaded = []

    def imported(name):
        monkeypatch.syspath_prepend(copied(name).parent)
        module = importlib.import_module(name)
        loaded.append(name)
        return module

    yield imported
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
    made = trainer([*settings, "checkpoint.every_steps=1", f"run_dir={folder}"])
    member = made.members[0]
    log = member.log = RunLog(member.run, active=True)
    log.begin(member.run, made.task.rows, member.sizes, 1, torch.device("cpu"))
    with pytest.raises(Stopped):
        made.fit(stop=lambda: signal.SIGTERM * (made.epochs_done == 1 and made.position > 0))
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
    monkeypatch.setattr(files, "RESULTS", tmp_path)
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


class Centred(Sorter):
    """Keeps something of every worker, and something that all have in common."""

    def __init__(self, **options):
        super().__init__(**options)
        self.norms, self.centre = torch.zeros(self.local_workers), torch.zeros(self.dim)
        self.last = (torch.zeros(1), 0)

    def look(self, gradients):
        self.norms += gradients.norm(dim=(1, 2))
        self.centre += self.position
        self.last[0].add_(1)

    def next_order(self, epoch):
        return self.random_order(epoch)


class Declared(Centred):
    per_worker = ("norms",)


def after_an_epoch(workers, dim, processes):
    """The sorters of all processes; gradients are those of their workers."""
    sorters, gradients = [], torch.arange(1.0, workers * 2 * dim + 1).reshape(workers, 2, dim)
    for rank in range(processes):
        group = WorkerGroup(workers, rank, processes)
        sorters.append(Declared(workers=workers, units=2, dim=dim, group=group))
        sorters[-1].order(0)
        for k in range(2):
            sorters[-1].observe([k], gradients[group.local, k : k + 1])
    return sorters


@pytest.mark.parametrize("dim", [1, 2, 3, 4])  # as many as workers, or as workers of a process, too
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (4, 2)])
def test_what_belongs_to_workers_does_not_depend_on_sizes_that_happen_to_be_equal(dim, before, after):
    states = [sorter.state_dict() for sorter in after_an_epoch(4, dim, before)]
    parts = [state["per_worker"] for state in states]
    whole = states[0] | {"per_worker": {name: torch.cat([part[name] for part in parts]) for name in parts[0]}}
    assert set(whole["per_worker"]) == {"current", "norms"} and whole["common"].keys() == {"centre", "last"}
    for expected in after_an_epoch(4, dim, after):
        resumed = Declared(workers=4, units=2, dim=dim, group=expected.group)
        resumed.load_state_dict(whole)
        for name in ("current", "norms", "centre"):
            assert torch.equal(getattr(resumed, name), getattr(expected, name))


def test_a_tensor_that_may_belong_to_workers_or_to_all_is_refused_until_the_class_says():
    with pytest.raises(CdgrabError, match=r"Centred.norms has as many rows as .* say per_worker = \('norms',\)"):
        Centred(workers=4, units=2, dim=3).state_dict()
    mistaken = Declared(workers=4, units=2, dim=3)
    mistaken.norms = torch.zeros(3)
    with pytest.raises(CdgrabError, match="Declared.norms is named in per_worker, but does not have a row"):
        mistaken.state_dict()


def test_a_saved_state_stays_as_it_was():
    (sorter,) = after_an_epoch(4, 4, 1)
    state = sorter.state_dict()
    sorter.order(1)
    sorter.observe([0, 1], torch.ones(4, 2, 4))
    assert float(state["common"]["last"][0]) == 2.0 and float(sorter.last[0]) == 3.0


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


def test_every_command_loads_the_files_of_CDGRAB_EXTEND(copied, monkeypatch, tmp_path):
    """And their settings beside them; what several processes make of it is tested with studies and sweeps."""
    files = [copied("task"), copied("sorter")]
    monkeypatch.setenv("CDGRAB_EXTEND", os.pathsep.join(map(str, files)))
    run = compose(["task=spirals", "sorter=longest_first"])
    assert (run.config.task.hidden, run.config.sorter.initial) == (16, "random")
    broken = tmp_path / "broken.py"
    broken.write_text("raise KeyError('x')\n")
    for path, complaint in (
        (broken, "KeyError: 'x'"),
        (tmp_path / "none.py", "is not a file"),
    ):
        monkeypatch.setenv("CDGRAB_EXTEND", str(path))
        with pytest.raises(CdgrabError, match=f"{path}.*{complaint}"):
            compose(["task=lr_hmda"])


def test_the_command_line_of_a_recipe_names_it_to_the_processes_that_it_starts(copied, monkeypatch, tmp_path):
    file, found = copied("sorter"), []

    def torchrun(arguments, processes):
        found.append((os.environ["CDGRAB_EXTEND"].split(os.pathsep), processes, arguments[-2]))
        return 3

    monkeypatch.setattr(launcher, "torchrun", torchrun)
    monkeypatch.setenv("CDGRAB_EXTEND", str(copied("task")))
    settings = ["sorter=longest_first", *SMALL, f"run_dir={tmp_path / 'run'}", "nproc=2"]
    assert launch.main(settings, extension=str(file)) == 3
    assert found == [([str(file), str(tmp_path / "task.py")], 2, "nproc=2")]
