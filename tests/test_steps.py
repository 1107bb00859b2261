"""Captured steps against plain ones: on a CPU the same code without the capture, on a GPU the real thing."""

import weakref

import pytest
import torch

from cdgrab.runtime.group import WorkerGroup
from experiments import train
from experiments.store.records import read_metrics
from experiments.tasks import make_task
from experiments.training.clock import Clock
from experiments.training.config import compose
from experiments.training.loop import alone
from experiments.training.steps import CapturedSteps, PartialSums, Steps

TASKS = {
    "lr_hmda": ["task=lr_hmda", "workers=4"],  # several units a step
    "mlp_m4": ["task=mlp_m4", "workers=8", "task.batch=8", "task.dtype=float64"],
    # carries, backward passes, clipping
    "lstm_wiki2": ["task=lstm_wiki2", "workers=2", "task.dtype=float64", "task.chunk_length=8", "task.hidden=8"],
    "cifar10": ["task=cifar10", "workers=4", "task.batch=16", "task.dtype=float64"],
}
TASKS["sparse"] = [*TASKS["mlp_m4"], "sparsifier=exdyna", "sparsifier.density=0.1"]


def both(overrides, device, block_steps, kept_steps=2):
    """Plain and captured steps of the same run, from the same start; captured ones hand gradients over in pieces."""
    run = compose(["data=embedded", "size=smoke", *overrides])
    made, pieces = [], []
    for kind in (Steps, CapturedSteps):
        task = make_task(run.config, run.source, device)
        trainer = alone(run, task, WorkerGroup(run.config.workers), device)
        parts = (task, trainer.gradients, trainer.loop.optimiser, trainer.loop.parameters, trainer.loop.first_carry)
        parts += (trainer.loop.averager,)
        observe = (lambda seen: pieces.extend(some.clone() for some in seen)) if trainer.per_unit else None
        options = {"block_steps": block_steps, "kept_steps": kept_steps, "observe": observe}
        made.append(kind(*parts, **(options if kind is CapturedSteps else {})))
        made[-1].sums = PartialSums(made[-1].parameters)
    return trainer, *made, pieces


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("sorter", ["cd_grab", "d_rr"])
@pytest.mark.parametrize("task", TASKS)
def test_captured_steps_equal_plain_ones(task, sorter, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    device = torch.device(device)
    # tracing takes long, and one task shows on a CPU that traced functions can be captured
    how = "compile=auto" if (task, sorter) == ("lr_hmda", "cd_grab") or device.type == "cuda" else "compile=off"
    trainer, plain, captured, pieces = both([*TASKS[task], f"sorter={sorter}", how], device, block_steps=3)
    microbatch, sums = trainer.microbatch, [steps.sums for steps in (plain, captured)]
    with torch.no_grad():
        # full blocks, a shorter one, a shorter last step, and a second epoch that starts from a fresh carry
        blocks = [(0, 3, microbatch), (3, 5, microbatch), (5, 6, max(1, microbatch - 1)), (0, 2, microbatch)]
        for block in blocks:
            start, end, units = block
            visits = trainer.owned[:, start * units : end * units].view(len(trainer.owned), -1, units)
            plain.sums, captured.sums = sums if start == 0 else (None, None)  # not wanted in between
            pieces.clear()
            (seen, losses), (nothing, others) = (s.run(visits, Clock(), first=start == 0) for s in (plain, captured))
            assert nothing == () and bool(seen) == bool(pieces)
            gradients = [(*seen, torch.cat(pieces, dim=1))] if pieces else []
            for one, other in (*gradients, (losses, others)):
                torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-11)
                assert one.abs().max() > 0
            torch.testing.assert_close(captured.parameters, plain.parameters, rtol=1e-9, atol=1e-11)
    states = ([*steps.optimiser.state, steps.sums.total, steps.sums.largest] for steps in (plain, captured))
    for one, other in zip(*states, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-11)


def test_captured_steps_go_on_from_what_is_loaded():
    trainer, plain, captured, _ = both(TASKS["lr_hmda"], torch.device("cpu"), block_steps=4)
    visits = trainer.owned[:, :16].view(4, 4, 4)
    with torch.no_grad():
        captured.run(visits, Clock())
        start = torch.randn_like(plain.parameters)
        for steps in (plain, captured):
            steps.load(start.clone(), [torch.zeros_like(state) for state in steps.optimiser.state])
            steps.run(visits, Clock())
    torch.testing.assert_close(captured.parameters, plain.parameters, rtol=0, atol=1e-14)


def test_captured_steps_hand_over_gradients_every_few_steps_and_keep_no_more():
    trainer, plain, captured, pieces = both(TASKS["lr_hmda"], torch.device("cpu"), block_steps=5)
    visits = trainer.owned[:, :20].view(4, 5, 4)
    with torch.no_grad():
        for _ in range(2):
            pieces.clear()
            (seen,), (rest, _) = plain.run(visits, Clock())[0], captured.run(visits, Clock())
            assert rest == () and [piece.shape[1] for piece in pieces] == [8, 8, 4]
            torch.testing.assert_close(torch.cat(pieces, dim=1), seen, rtol=0, atol=1e-14)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("task", TASKS)
def test_a_run_on_a_gpu_gives_the_metrics_and_orders_of_a_cpu(task, tmp_path):
    overrides = [*TASKS[task], "data=embedded", "size=smoke", "epochs=2"]
    metrics = []
    for device in ("cpu", "cuda"):
        assert train.main([*overrides, f"device={device}", f"run_dir={tmp_path / device}"]) == 0
        metrics.append(read_metrics(tmp_path / device / "metrics.jsonl"))
    for on_cpu, on_gpu in zip(*metrics, strict=True):
        assert on_gpu["order_hash"] == on_cpu["order_hash"]
        assert on_gpu["train_loss"] == pytest.approx(on_cpu["train_loss"], rel=1e-7)


class Exchange:
    """Hands out a copy of the mean as the shard."""

    def average(self, mean, want_shard):
        return mean, mean.clone()[None] if want_shard else None


def test_a_shard_is_gone_when_the_next_gradients_are_computed():
    run = compose(["data=embedded", "size=smoke", "task=lr_hmda", "workers=1", "compile=off", "sorter=d_rr"])
    task = make_task(run.config, run.source, torch.device("cpu"))
    loop = alone(run, task, WorkerGroup(1), torch.device("cpu")).loop
    shards, alive = [], []
    compute = loop.gradients.for_inputs

    def watched(*inputs):
        function = compute(*inputs)

        def call(*arguments):
            alive.append(sum(shard() is not None for shard in shards))
            return function(*arguments)

        return call

    loop.gradients.for_inputs = watched
    loop.averager, loop.observe_shard = Exchange(), lambda shard: shards.append(weakref.ref(shard))
    with torch.no_grad():
        loop.run(torch.arange(6).view(1, 3, 2), Clock(), first=True)
    assert len(shards) == 3 and alive == [0, 0, 0]
