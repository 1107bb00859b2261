"""The study `sparsification` on real gradients: against the suite's own training, by hand, and on made-up results."""

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

from cdgrab.sparsify import make_sparsifier
from experiments.studies import base, sparsification_real
from experiments.studies.real_gradients import Watched, run_of, selection_seconds, watched, windows
from experiments.studies.sparsifiers import OURS, PUBLISHED
from experiments.studies.training import TrainingRun, train

SMALL = ["study=sparsification", "size=smoke", "data=embedded"]


@pytest.fixture(scope="module")
def settings():
    return base.compose_study(SMALL).settings


def test_an_epoch_selects_what_the_suite_selects_in_it(settings):
    run = [*run_of(settings, "cifar10", OURS, 4, 0.01), "task.limit=256", "epochs=1"]
    mean, losses = watched(run, iterations=6, seed=3)  # one epoch of four steps, and half of the next
    _, epoch = train([TrainingRun(tuple(run), 3, dict)])[0]
    ratios, imbalances, _ = zip(*mean.seen[:4], strict=True)
    assert sum(ratios) / 4 == pytest.approx(epoch["sparsifier"]["build_up"])
    assert sum(imbalances) / 4 == pytest.approx(epoch["sparsifier"]["imbalance"])
    assert len(losses) == len(mean.seen) == 6 and losses != watched(run, 6, seed=4)[1]


def test_after_the_drop_gradients_are_a_tenth():
    rows = torch.randn(5, 2, 200, generator=torch.Generator().manual_seed(0))
    plain, mean = (make_sparsifier("topk", workers=2, dim=200, density=0.05) for _ in range(2))
    mean = Watched(mean, drop=3)
    for scale, gradients in zip([1, 1, 1, 0.1, 0.1], rows, strict=True):
        torch.testing.assert_close(mean.average(gradients)[0], plain.reduce(gradients * scale))


def test_selecting_is_timed_on_what_every_worker_has(settings):
    found = selection_seconds(["topk", OURS], run_of(settings, "lstm_wiki2", OURS, 2, 0.01), 0.01, seed=0)
    assert found["timed"] == ["topk", OURS] and min(found["selection"] + found["slowest"]) > 0


def test_windows_by_hand():
    seen = [(1.0, 0.0, None)] * 4 + [(1.5, 1.0, None)] + [(0.95, 0.5, None)] * 2
    found = windows(seen, [2.0] * 5 + [1.0] * 2)
    assert found == {
        "iteration": [0, 5],
        "ratio": [1.1, 0.95],
        "error": [0.1, 0.05],
        "near": [0.8, 1.0],
        "imbalance": [0.2, 0.5],
        "threshold": [None, None],
        "train_loss": [2.0, 1.0],
    }


def test_settling_times_by_hand():
    near = [0.0, 1.0, 1.0, 0.8, 1.0, 1.0, 1.0, 1.0, 0.0]
    rows = pd.DataFrame({"iteration": range(0, 45, 5), "near": near, "seed": 0})
    assert sparsification_real.settling_time(rows, 0, 45)[0] == 20
    assert sparsification_real.settling_time(rows, 20, 45)[0] == 0
    assert sparsification_real.settling_time(rows, 0, 30)[0] == 30  # never: all of the time


WORDS = (
    "ExDyna: actual density / target with 2 to 64",
    "published: actual density / target with 2 to 64",
    "grows from",
)


def test_claims_are_judged_on_made_up_results():
    own = {"workers": 2, "iterations": 330, "methods": [OURS, PUBLISHED, "micro"], "crowds": [2, 64]}
    own |= {"crowd_methods": ["topk", OURS, PUBLISHED], "crowd_iterations": 10, "timed_workers": [8]}
    settings = OmegaConf.create({"tasks": {"cifar10": {}}, "real": {"seeds": 3, "cifar10": own}})
    rows = []
    for seed in range(3):
        noise = seed / 1000
        for method, error, imbalance in ((OURS, 0.01, 0.1), (PUBLISHED, 0.6, 0.5), ("micro", 0.0, 1.5)):
            for start in range(0, 330, 5):
                key = {"measure": "real density", "method": method, "seed": seed, "iteration": start}
                rows.append(key | {"error": error + noise, "near": error < 0.1, "imbalance": imbalance + noise})
        for method, *ratios in (("topk", 1.9, 20), (OURS, 1.02, 1.0), (PUBLISHED, 7.0, 1.0)):  # with 2 and 64 workers
            for workers, ratio in zip((2, 64), ratios, strict=True):
                key = {"measure": "real build-up", "method": method, "seed": seed, "workers": workers}
                key |= {"ratio": ratio + noise, "error": ratio - 1 + noise}
                rows += [key | {"iteration": start} for start in (0, 5)]
        times = {"topk": (9.0 + noise, 9.5 + noise), OURS: (1.0, 2.0), PUBLISHED: (0.5, 1.0)}  # mean and slowest
        key = {"measure": "real time", "seed": seed, "workers": 8}
        for method, (mean, slowest) in times.items():
            rows.append(key | {"timed": method, "selection": mean, "slowest": slowest, "longest": 2.0})
    found = list(sparsification_real.verdicts(pd.DataFrame(rows).assign(task="cifar10"), settings))
    assert [verdict.answer for verdict in found] == [
        *("holds", "fails", "holds"),  # density
        *("holds", "fails", "holds", "holds"),  # build-up: within the target; Top-k's is large, and grows
        *("holds", "fails") * 2,  # thresholds, at the start and after the drop
        *("holds", "fails", "holds"),  # loads
        *("holds", "fails"),  # time: of the mean worker, and of the slowest
        *("holds", "holds"),
    ]
    held, left, grows = ({v.claim: v.note for v in found if words in v.claim} for words in WORDS)
    assert [note.split(";")[0] for notes in (held, left, grows) for note in notes.values()] == [
        *("2 workers", "2 workers", "ratio from 2 to 64 workers")
    ]
    assert all(verdict.seeds == 3 and not verdict.needs_seeds for verdict in found)
