"""Figure 9's metric as it was published, against plain loops over single gradients."""

import pytest
import torch

from cdgrab import CdgrabError, make_sorter
from cdgrab.runtime.group import WorkerGroup
from experiments.store import checkpoint
from experiments.store.records import read_metrics
from experiments.training import session
from experiments.training.config import compose
from experiments.training.grouping import make_member

SMALL = ["data=embedded", "size=smoke", "workers=4", "epochs=2", "task=lr_hmda", "task.limit=91"]  # a short last step


class Oracle:
    """SGD with momentum over single gradients, orders from the library, and the replay by definition."""

    def __init__(self, run):
        self.member = make_member(run, WorkerGroup(4), torch.device("cpu"))
        self.task, self.flat, self.settings = self.member.task, self.member.flat, run.config.task
        options = {"workers": 4, "units": self.member.units, "dim": self.flat.dim, "seed": run.config.seed}
        self.sorter = make_sorter(run.config.sorter.name, **options)

    def gradient(self, parameters, unit):
        leaf = parameters.clone().requires_grad_()
        loss, _ = self.task.loss(self.flat.unflatten(leaf), (), *self.task.fetch("train", unit))
        return torch.autograd.grad(loss, leaf)[0]

    def epoch(self, order, parameters, velocity):
        """All gradients, a list [workers, units, dim] of each step, and where the epoch ends."""
        seen, visits, size = [], self.member.owned.gather(1, order), self.task.units_per_step
        for start in range(0, self.member.units, size):
            units = visits[:, start : start + size]
            rows = [torch.stack([self.gradient(parameters, unit) for unit in worker]) for worker in units]
            seen.append(torch.stack(rows))
            gradient = seen[-1].mean((0, 1)) + self.settings.weight_decay * parameters
            velocity = self.settings.momentum * velocity + gradient
            parameters = parameters - self.settings.lr * velocity
        return seen, parameters, velocity

    def bounds(self, epochs):
        parameters = self.member.initial_parameters()
        velocity = torch.zeros_like(parameters)
        for epoch in range(epochs):
            trained, *end = self.epoch(self.sorter.order(epoch), parameters, velocity)
            gradients = torch.cat(trained, dim=1)
            self.sorter.observe(range(self.member.units), gradients)
            replayed, *_ = self.epoch(self.sorter.order(epoch + 1), parameters, velocity)
            away, largest = torch.zeros_like(parameters), 0.0
            for step in replayed:
                away = away + (step - gradients.mean((0, 1))).sum((0, 1))
                largest = max(largest, float(away.abs().max()))
            yield largest
            parameters, velocity = end


@pytest.mark.parametrize("sorter", ["cd_grab", "d_rr"])
def test_the_replay_is_that_of_plain_loops(sorter, tmp_path):
    settings = [*SMALL, f"sorter={sorter}", "task.lr=0.3", "task.weight_decay=0.01"]
    run = compose([*settings, "task.herding_replays=[1, 2]", f"run_dir={tmp_path}"])
    session.carry_out(run)
    found = [line["herding_replayed"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert found == pytest.approx(list(Oracle(run).bounds(2)), rel=1e-10)
    assert checkpoint.load(tmp_path)["replay"] is None  # the epoch is over


def test_bad_replays_are_refused():
    with pytest.raises(CdgrabError, match="herding_replays must be a whole number of at least 1, got 0"):
        compose([*SMALL, "task.herding_replays=[0]"])
    with pytest.raises(CdgrabError, match="herding_replays must be a list of whole numbers, got 3"):
        compose([*SMALL, "task.herding_replays=3"])
    with pytest.raises(CdgrabError, match="needs sparsifier=dense"):
        compose([*SMALL, "task.herding_replays=[1]", "sparsifier=topk"])


def test_checkpoints_of_every_few_epochs_and_of_the_last(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(checkpoint, "save", lambda _, content, keep: saved.append(content["epochs_done"]))
    session.carry_out(compose([*SMALL, "epochs=5", "checkpoint.every_epochs=2", f"run_dir={tmp_path}"]))
    assert saved == [2, 4, 5]
