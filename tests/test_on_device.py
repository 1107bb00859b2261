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
from experiments.training.on_device.accumulation import accumulate, forget
from experiments.training.on_device.counting import Groups, among, counts_between
from experiments.training.on_device.exdyna import balanced, rebalanced
from experiments.training.on_device.partitions import Partitions, among_anyones
from experiments.training.on_device.peers import allotted, dealt
from experiments.training.on_device.whole import orthonormal

STEPS, DIM, CPU = 24, 900, torch.device("cpu")
WARM = {"warm_up_steps": 12, "warm_up_density": 0.25}
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


def counted(magnitudes, starts, ends, wanted):
    """The largest, one group after the other; of equal ones the first."""
    taken = torch.zeros_like(magnitudes, dtype=torch.bool)
    for start, end, most in zip(starts.tolist(), ends.tolist(), wanted.tolist(), strict=True):
        order = magnitudes.flatten()[start:end].argsort(descending=True, stable=True)
        taken.flatten()[start + order[:most]] = True
    return taken


@pytest.mark.parametrize("dim", [7, 300, 3000])
def test_the_largest_of_each_group_are_those_of_sorting_it(dim):
    generator = torch.Generator().manual_seed(dim)
    magnitudes = torch.randn(2, dim, generator=generator).abs() ** 9
    magnitudes[0, ::3], magnitudes[1, ::2], magnitudes[:, 3] = magnitudes[0, 0], 0, torch.tensor([1e-42, torch.inf])
    starts, ends = torch.tensor([0, 2, dim, 2 * dim - 1]), torch.tensor([2, dim, 2 * dim - 1, 2 * dim])
    group = torch.repeat_interleave(torch.arange(4), ends - starts)
    groups = Groups(magnitudes, starts, ends)
    for share in (0, 0.1, 0.3, 0.7, 1):
        wanted = (share * (ends - starts)).long()
        values, places = (each[group].view_as(magnitudes) for each in groups.largest(wanted))
        assert torch.equal(among(magnitudes, values, places), counted(magnitudes, starts, ends, wanted))
        plain = groups.largest(wanted)
        for near in (plain[0], 1.9 * plain[0], plain[0] / 1.7, torch.tensor([0.0, torch.nan, torch.inf, 1e-30])):
            same = zip(groups.largest(wanted, near=near), plain, strict=True)
            assert all(torch.equal(one.nan_to_num(-1), other.nan_to_num(-1)) for one, other in same)
    values, places = groups.largest(wanted // 2, idle=torch.tensor([True, False, True, False]))
    taken = among(magnitudes, values[group].view_as(magnitudes), places[group].view_as(magnitudes))
    expected = counted(magnitudes, starts, ends, wanted // torch.tensor([1, 2, 1, 2]))
    assert torch.equal(taken, expected)


def test_the_kernel_counts_as_the_loop_does(triton_device, monkeypatch):
    kernels = pytest.importorskip("experiments.training.on_device.counting_kernels")
    monkeypatch.setattr(kernels, "EACH", 256)  # several programs
    monkeypatch.setattr(kernels, "BLOCK", 128)  # of several blocks
    magnitudes = torch.randn(2, 700, generator=torch.Generator().manual_seed(0)).abs().round(decimals=1)
    starts, ends = torch.tensor([0, 0, 690, 700, 900]), torch.tensor([700, 5, 700, 700, 1400])
    values = torch.tensor([0.0, 0.1, 0.3, 0.35, 1.0, 3e38, torch.nan]).repeat(5, 20).sort(dim=1).values
    groups = Groups(magnitudes, starts, ends)
    equals = torch.full((5,), 0.3)
    for idle in (None, torch.tensor([False, False, True, False, False])):
        there = None if idle is None else idle.to(triton_device)
        where = [each.to(triton_device) for each in torch.stack([starts, ends], dim=1).unbind(1)]
        signed = (magnitudes * torch.tensor([[1], [-1]])).flatten().to(triton_device)
        for some in (values, values[:, :65], values[:, 40:43], values[:, 40:41]):
            found = kernels.count(signed, *where, 700, some.to(triton_device), there)
            assert torch.equal(found.cpu(), groups.reaching(some, idle))
        for equal, shift in ((None, 20), (None, 10), (None, 0), (equals, 10), (equals, 0)):
            begun = torch.tensor([0, 1 << 20, 0x3F800000, 0x7FF00000, 0x3E900000]) if equal is None else torch.zeros(5)
            given = [begun.int(), shift, 1024, there, None if equal is None else equal.to(triton_device)]
            found = kernels.spread(signed, *where, 700, given[0].to(triton_device), *given[1:])
            assert torch.equal(found.cpu(), groups._spread(begun.int(), shift, idle, equal))
    cuts = torch.tensor([[0, 3, 3, 650, 700], [0, 0, 699, 700, 700]])
    found = kernels.counts_between((magnitudes > 1).to(triton_device), cuts.to(triton_device))
    assert torch.equal(found.cpu(), counts_between(magnitudes > 1, cuts))


@pytest.mark.parametrize("workers", [1, 5])
def test_kernels_of_partitions_do_what_plain_operations_do(triton_device, workers):
    kernels = pytest.importorskip("experiments.training.on_device.partition_kernels")
    generator, dim, runs = torch.Generator().manual_seed(workers), 1500, 3
    accumulated = torch.randn(runs, workers, dim, generator=generator).round(decimals=1)
    inner = torch.randint(1, dim, (runs, workers - 1), generator=generator).sort(dim=1).values
    cuts = torch.cat([torch.zeros(runs, 1).long(), inner, torch.full((runs, 1), dim)], dim=1)
    every, iteration, near = torch.tensor([1, 3, 7]), torch.tensor(11), torch.tensor([0.5, 0.0, 9.0])
    most = torch.randint(0, dim // workers, (runs, workers), generator=generator)
    plain = Partitions(cuts, dim, iteration)

    def on_device(kernel, *tensors):
        return kernel(*(tensor.to(triton_device) for tensor in tensors)).cpu()

    seen = plain.seen_by_owners(accumulated)
    assert torch.equal(on_device(kernels.seen_by_owners, accumulated, cuts, iteration), seen)
    assert torch.equal(on_device(kernels.sampled, seen, cuts, every, iteration), plain.sampled(seen, every))
    starts, ends = (dim * torch.arange(runs)[:, None] + cuts).unfold(1, 2, 1).flatten(0, 1).unbind(1)
    found = (each.view(runs, -1) for each in Groups(seen, starts, ends).largest(most.flatten()))
    union = plain.largest(seen, most, torch.zeros_like(most, dtype=torch.bool), near)
    values = torch.randn(runs, workers, generator=generator).abs().round(decimals=1)
    some = accumulated, values, torch.randint(0, dim, (runs, workers), generator=generator)
    assert torch.equal(on_device(kernels.among_anyones, *some), among_anyones(*some))
    assert torch.equal(on_device(kernels.among, seen, cuts, *found), union)


@pytest.mark.parametrize("workers", [2, 6, 16])
def test_kernels_accumulate_and_forget_as_plain_operations_do(triton_device, workers):
    kernels = pytest.importorskip("experiments.training.on_device.accumulation_kernels")
    generator, dim, runs = torch.Generator().manual_seed(workers), 1500, 3
    residual, gradients = (torch.randn(n, workers, dim, generator=generator) for n in (runs, 5))
    sent = torch.rand(runs, dim, generator=generator) < 0.1
    where, rows = torch.tensor([True, False, True]), torch.tensor([4, 0, 3])

    def on_device(kernel, vectors, *more):
        there = vectors.clone().to(triton_device)
        found = kernel(there, *(each.to(triton_device) if isinstance(each, torch.Tensor) else each for each in more))
        return there.cpu(), None if found is None else found.cpu()

    for otherwise in (False, True):
        expected = residual.clone()
        forget(expected, sent, where, otherwise)
        assert torch.equal(on_device(kernels.forget, residual, sent, where, otherwise)[0], expected)
    found = on_device(kernels.accumulate, residual, gradients, rows, sent, where)
    sums = accumulate(residual, gradients, rows, sent, where)
    assert all(map(torch.equal, found, (residual, sums)))


def test_partitions_and_shares_are_those_of_the_library():
    from cdgrab.sparsify import deft, partitions

    generator = torch.Generator().manual_seed(0)
    loads = torch.randint(0, 9, (200, 24), generator=generator) * (torch.rand(200, 24, generator=generator) < 0.3)
    loads[:, 3] += 1
    for workers in (1, 2, 5, 24):
        expected = [partitions.balanced(row, workers) for row in loads.double().tolist()]
        assert balanced(loads.double(), workers).tolist() == expected
    lengths, by_partition = torch.randint(1, 12, (200, 6), generator=generator), loads[:, :6] ** 2
    for row, own, moved in zip(lengths, by_partition, rebalanced_each(lengths, by_partition), strict=True):
        assert moved == partitions.rebalance(row.tolist(), own.tolist(), "paper")
    sizes, weights = torch.tensor([5, 50, 1, 20]), torch.rand(200, 4, generator=generator).double() ** 6
    weights[:3] = torch.tensor([[0.0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 3, 0]])
    totals = torch.randint(1, 77, (200,), generator=generator)
    counts = allotted(totals, weights, sizes)
    expected = [deft.allot(int(t), w.numpy(), sizes.numpy()).tolist() for t, w in zip(totals, weights, strict=True)]
    assert counts.tolist() == expected
    costs = (counts % 7).double()
    assert dealt(costs, 3).tolist() == [deft.deal(row.numpy(), 3) for row in costs]


def rebalanced_each(lengths, loads):
    """Runs whose numbers of blocks differ, one by one."""
    return [
        rebalanced(row[None], own[None], int(row.sum()))[0].tolist() for row, own in zip(lengths, loads, strict=True)
    ]
