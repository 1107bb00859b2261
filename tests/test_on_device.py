"""Sparsifiers of several runs together, with nothing asked of the device: the same as each of them by itself."""

import pytest
import torch

from cdgrab.errors import CdgrabError
from cdgrab.runtime.group import WorkerGroup
from cdgrab.sparsify import SPARSIFIERS, SparseAverager, make_sparsifier
from cdgrab.sparsify.exdyna import MOST_AIM
from experiments.studies.matched import MATCHED
from experiments.studies.training import TrainingRun, train
from experiments.tasks import make_task
from experiments.training.config import compose
from experiments.training.loop import Trainer
from experiments.training.member import Member
from experiments.training.on_device import OnDevice, known, supported
from experiments.training.on_device.whole import orthonormal

STEPS, DIM, CPU = 16, 900, torch.device("cpu")
WARM = {"warm_up_steps": 8, "warm_up_density": 0.25}
METHODS = {
    "exdyna": {},
    "exdyna, corrected": {"momentum_correction": 0.9},
    "exdyna, not masked": {"momentum_correction": 0.9, "momentum_masking": False},
    "exdyna, warm-up": WARM,
    "exdyna, no feedback": {"error_feedback": False},
    "exdyna, dense": {"density": 0.3},
    "exdyna, few": {"density": 0.002},
    "exdyna, paper": {"rule": "paper", "threshold": "paper", "blocks": 90},
    "exdyna, paper's threshold": {"threshold": "paper", "density": 0.1},
    "exdyna, static": {"rule": "static"},
    "micro": {},
    "topk": {},
    "topk, corrected": {"momentum_correction": 0.9},
    "topk, warm-up": WARM | {"momentum_correction": 0.9},
    MATCHED: {},
    f"{MATCHED}, few": {"density": 0.005},
    f"{MATCHED}, warm-up": WARM | {"momentum_correction": 0.9},
    "deft": {"layers": [500, 30, 300, 70]},
    "deft, warm-up": {"layers": [500, 30, 300, 70]} | WARM,
    "fp16": {},
}


def averagers(methods, workers, dim=DIM):
    return [
        SparseAverager(make_sparsifier(method.split(",")[0], workers=workers, dim=dim, **{"density": 0.02} | options))
        for method, options in methods.items()
    ]


def gradients(runs, workers, dim=DIM, steps=STEPS):
    """Of very different sizes along the vector; smaller and smaller, with a jump."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.logspace(1, -3, dim)[torch.randperm(dim, generator=generator)]
    for step in range(steps):
        scale = 0.97**step * (5 if step > steps // 2 else 1)
        yield scale * sizes * torch.randn(runs, workers, dim, generator=generator)


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_updates_and_statistics_are_those_of_each_run_by_itself(workers):
    compare_with_each_by_itself(METHODS, workers, gradients(len(METHODS), workers))


def compare_with_each_by_itself(methods, workers, steps):
    alone, together = averagers(methods, workers), averagers(methods, workers)
    assert supported(together, torch.float32, CPU) and not supported(together, torch.float64, CPU)
    on_device = OnDevice(together, CPU)
    for step, means in enumerate(steps):
        found, _ = on_device.average(means)
        for name, averager, its, mine in zip(methods, alone, means, found, strict=True):
            torch.testing.assert_close(mine, averager.average(its)[0], rtol=1e-6, atol=0, msg=f"{name}, step {step}")
        if step == STEPS // 2:
            on_device.collect()
    on_device.collect()
    for name, one, other in zip(methods, alone, together, strict=True):
        assert other.epoch_means() == pytest.approx(one.epoch_means(), rel=1e-6), name
    return alone


def test_workers_that_send_more_than_their_share_are_those_of_each_run_by_itself():
    """Where all that is large is theirs, in each step others."""
    methods = {"exdyna": {}, "exdyna, more": {"density": 0.1}, "exdyna, forgetful": {"error_feedback": False}}
    steps = list(gradients(3, 8))
    for step, means in enumerate(steps):
        means[..., (start := 60 * (7 * step % 15)) : start + 60] *= 1e4
    alone = compare_with_each_by_itself(methods, 8, steps)
    assert max(averager.sparsifier._aim for averager in alone) > 1.5 * MOST_AIM


def test_samples_are_counted_where_many_coordinates_are_wanted():
    methods, dim = {"exdyna": {"density": 0.4}, "micro": {"density": 0.5}, "exdyna, warm-up": WARM}, 50_000
    alone, together = averagers(methods, 4, dim), averagers(methods, 4, dim)
    on_device = OnDevice(together, CPU)
    for means in gradients(len(methods), 4, dim, steps=6):
        expected = torch.stack([averager.average(its)[0] for averager, its in zip(alone, means, strict=True)])
        torch.testing.assert_close(on_device.average(means)[0], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("more", [{}, {"shapes": [[900]]}])
def test_factors_of_low_rank_are_those_of_each_run_by_itself(workers, more):
    """Up to the rounding of orthogonal columns, which are found in another way."""
    shapes = {"shapes": [[20, 5, 5], [20], [19, 20]]}
    methods = {"powersgd": shapes | more, "powersgd, 3": shapes | more | {"rank": 3}}
    methods["powersgd, forgetful"] = shapes | more | {"error_feedback": False}
    alone, together = averagers(methods, workers), averagers(methods, workers)
    on_device = OnDevice(together, CPU)
    for step, means in enumerate(gradients(len(methods), workers, steps=12)):
        means[:, :, 520:] *= step > 1  # a matrix of zeros has no directions
        found, _ = on_device.average(means)
        for averager, its, mine in zip(alone, means, found, strict=True):
            expected = averager.average(its)[0]
            torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    on_device.collect()
    for one, other in zip(alone, together, strict=True):
        assert other.epoch_means() == pytest.approx(one.epoch_means(), rel=1e-9)


def test_columns_are_orthonormal_and_span_the_same():
    matrices = torch.randn(4, 50, 4, generator=torch.Generator().manual_seed(0))
    matrices[1, :, 2] = 3 * matrices[1, :, 0]  # depends on another
    matrices[2, :, 1] = matrices[2, :, 0] + 1e-4 * matrices[2, :, 1]  # nearly does
    matrices[3, 3:] = 0  # the first rows are all there is
    found = orthonormal(matrices)
    torch.testing.assert_close(found.mT @ found, torch.eye(4).expand(4, -1, -1), rtol=0, atol=1e-5)
    within = found @ (found.mT @ matrices)
    torch.testing.assert_close(within, matrices, rtol=0, atol=1e-4)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_one_run_whose_gradients_are_not_finite_ends_alone(value):
    methods = {"exdyna": {}, "exdyna, few": {"density": 0.002}, "topk": {}, "deft": {}, "micro": {}, "fp16": {}}
    on_device, alone = OnDevice(averagers(methods, 2), CPU), averagers(methods, 2)
    for means in gradients(len(methods), 2, steps=3):
        means[1, 0, 5] = value
        for number, (averager, found) in enumerate(zip(alone, on_device.average(means)[0], strict=True)):
            assert found.isnan().all() if number == 1 else torch.equal(found, averager.average(means[number])[0])


def test_what_is_not_known_here_is_not_supported():
    methods = {
        "exdyna, proportional": {"threshold": "proportional"},
        "exdyna, fixed": {"threshold": "fixed"},
        "exdyna, relative": {"rule": "relative"},
        "exdyna, faithful": {"faithful": True, "blocks": 16},
        "cltk": {},
    }
    assert not any(supported([averager], torch.float32, CPU) for averager in averagers(methods, 2))
    for some, expected in ((methods, False), (METHODS, True)):
        found = [known(SPARSIFIERS[name.split(",")[0]], {"threshold": "counted"} | its) for name, its in some.items()]
        assert set(found) == {expected}


def test_runs_without_checkpoints_have_no_state():
    run = TrainingRun(("task=lr_hmda", "data=embedded", "workers=2", "sparsifier=topk", "device=cpu"), 0)
    composed = compose(list(run.overrides))
    task = make_task(composed.config, composed.source, CPU)
    trainer = Trainer([Member(composed, task, WorkerGroup(2), CPU)], saved=False)
    with pytest.raises(CdgrabError, match="no state to save"):
        trainer.state_dicts()
    with pytest.raises(CdgrabError, match="no state to save or to load"):
        trainer.load_state_dicts([{}])


def test_matched_topk_matches_small_densities():
    """Of which every worker selects few coordinates."""
    matched = make_sparsifier(MATCHED, workers=8, dim=20_000, density=0.002)
    densities = []
    for gradients in torch.randn(80, 8, 20_000, generator=torch.Generator().manual_seed(0)) ** 3:
        matched.reduce(gradients)
        densities.append(matched.stats.density)
    assert sum(densities[40:]) / 40 == pytest.approx(0.002, rel=0.05)


def test_all_that_a_step_changes_is_changed_in_place():
    """Else a captured step would go on from where it was captured."""
    on_device = OnDevice(averagers(METHODS, 3), CPU)
    first, second, *_ = gradients(len(METHODS), 3)
    before = [(tensor, tensor.clone()) for tensor in on_device.tensors()]
    on_device.average(first)
    expected = on_device.average(second)[0]
    for tensor, value in before:
        tensor.copy_(value)
    on_device.average(first)
    assert torch.equal(on_device.average(second)[0], expected)
    assert [id(tensor) for tensor, _ in before] == [id(tensor) for tensor in on_device.tensors()]


def test_runs_that_train_together_have_the_metrics_of_their_own_sparsifiers(monkeypatch):
    """Steps as they are captured on a GPU, without one; the last step of an epoch is a smaller one."""
    common = ["task=cifar10", "sorter=d_rr", "data=embedded", "workers=2", "epochs=2", "device=cpu"]
    common += ["task.dtype=float32", "task.batch=8", "task.limit=28", "task.test_limit=40"]
    methods = ["exdyna momentum_correction=0.5", "exdyna", "topk", "deft", "micro warm_up_steps=7"]
    methods += ["exdyna rule=paper threshold=paper"]
    runs = [_training(common, f"{method} density=0.05") for method in methods]
    runs += [_training(common, method) for method in ("fp16", "powersgd")]
    expected, made = train(runs), []
    monkeypatch.setattr(Trainer, "_can_capture", lambda trainer: made.append(trainer) or True)
    for found, alone in zip(train(runs), expected, strict=True):
        for line, its in zip(found, alone, strict=True):
            same = [key for key in its if key.startswith(("train_", "test_"))]
            assert [line[key] for key in same] == pytest.approx([its[key] for key in same], rel=1e-4)
            assert line.get("sparsifier", {}) == pytest.approx(its.get("sparsifier", {}), rel=1e-3)
    assert isinstance(made[0].loop.averager, OnDevice) and len(made) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_steps_on_a_gpu_have_the_metrics_of_a_cpu():
    common = ["task=cifar10", "sorter=d_rr", "data=embedded", "workers=2", "epochs=2"]
    common += ["task.dtype=float32", "task.batch=8", "task.limit=28", "task.test_limit=40"]
    methods = [f"{name} density=0.05" for name in ("exdyna", "topk", "deft", "micro")] + ["powersgd", "fp16"]
    on_cpu, on_gpu = (train([_training([*common, f"device={d}"], m) for m in methods]) for d in ("cpu", "cuda"))
    for one, other in zip(on_cpu, on_gpu, strict=True):
        for line, its in zip(one, other, strict=True):
            assert its["train_loss"] == pytest.approx(line["train_loss"], rel=1e-3)


def _training(common, method):
    name, *options = method.split()
    options = [f"sparsifier.{option}" for option in options]
    return TrainingRun((*common, "task.momentum=0", f"sparsifier={name}", *options), 0, lambda epochs: epochs)
