"""The same config gives the same permutations and metrics for every process count, and across a change of it."""

import json
import shutil

import pytest

from cdgrab.runlog import read_manifest, read_metrics
from experiments import train
from scripts.launcher import torchrun

LSTM = ["task=lstm_wiki2", "size=smoke", "task.batch=16", "task.limit=7", "task.hidden=8"]
# Coordinated, uncoordinated, oblivious, randomised. With these sizes units per worker are odd and the last step short.
CASES = {
    "cd_grab": ["sorter=cd_grab", "workers=4"],
    "cd_grab_small_exchanges": ["sorter=cd_grab", "workers=4", "sorter.buffer_mb=0.02"],
    "cd_grab_walk": ["sorter=cd_grab", "workers=8", "sorter.rule=walk"],
    "id_grab_bal": ["sorter=id_grab_bal", "workers=4"],
    "kh": ["sorter=kh", "workers=4"],
    "d_rr": ["sorter=d_rr", "workers=8"],
    "d_rr_float32": ["sorter=d_rr", "workers=4", "task.dtype=float32"],
    "sparse": ["sorter=cd_grab", "workers=4", "sparsifier=exdyna", "sparsifier.density=0.1"],
    "sparse_fits": ["sorter=d_rr", "workers=8", "sparsifier=sidco", "sparsifier.density=0.1"],
    "long_rows_sparse": [*LSTM, "workers=4", "sparsifier=exdyna"],
    "long_rows": [*LSTM, "workers=4"],  # gradients divided by coordinates; on 4 processes on the way to their mean
    "long_rows_units": ["task=cifar10", "task.limit=64", "task.dtype=float64", "workers=8"],  # several units a step
}
EPOCHS = 3


def overrides(folder, name, processes, *more):
    return [
        "data=embedded",
        f"epochs={EPOCHS}",
        "task.batch=64",
        *CASES[name],
        f"run_dir={folder / f'{name}-{processes}'}",
        *more,
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every case on 1, 2 and 4 processes; sparse also started on 4 processes and finished on 2 and on 1."""
    folder = tmp_path_factory.mktemp("runs")
    halfway = [*overrides(folder, "sparse", "halfway")[:-1], f"run_dir={folder / 'halfway'}"]
    for processes in (1, 4, 2):
        wanted = [overrides(folder, name, processes) for name in CASES]
        if processes == 4:
            wanted.append([*halfway, "epochs=2"])
        if processes == 2:
            wanted.append([*halfway, "resume=true"])
            _forget_the_epoch_count(folder / "halfway")
            shutil.copytree(folder / "halfway", folder / "halfway-alone")
        if processes == 1:
            for each in wanted:
                assert train.main(each) == 0
        else:
            assert torchrun(["-m", "tests.many_runs", json.dumps(wanted)], processes) == 0
    alone = [*halfway[:-1], f"run_dir={folder / 'halfway-alone'}", "resume=true"]
    assert train.main(alone) == 0
    return folder


def _forget_the_epoch_count(run):
    """As if the run had been asked for all epochs and been killed after two."""
    import torch

    manifest = read_manifest(run)
    manifest["science"]["epochs"] = EPOCHS
    (run / "manifest.json").write_text(json.dumps(manifest))
    saved = torch.load(run / "checkpoint.pt", weights_only=True)
    saved["science"]["epochs"] = EPOCHS
    torch.save(saved, run / "checkpoint.pt")


def assert_same(one, other, tolerance):
    assert [line["order_hash"] for line in one] == [line["order_hash"] for line in other]
    for a, b in zip(one, other, strict=True):
        metrics = {key for key in a if key.startswith(("train_", "test_"))}
        assert len(metrics) >= 2 and metrics == {key for key in b if key.startswith(("train_", "test_"))}
        for metric in metrics:
            assert a[metric] == pytest.approx(b[metric], rel=tolerance, abs=tolerance)
        assert a.get("sparsifier", {}) == pytest.approx(b.get("sparsifier", {}), rel=tolerance)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_process_count_changes_nothing(runs, name, processes):
    one, other = (read_metrics(runs / f"{name}-{n}" / "metrics.jsonl") for n in (1, processes))
    assert len(one) == EPOCHS
    assert len({line["order_hash"] for line in one}) == EPOCHS  # orders do change from epoch to epoch
    float32 = "float32" in name or name in ("long_rows", "long_rows_sparse")
    assert_same(one, other, 1e-6 if float32 else 1e-12)


def test_waiting_longer_before_an_exchange_changes_nothing(runs):
    for processes in (2, 4):
        often, rarely = (
            read_metrics(runs / f"{n}-{processes}" / "metrics.jsonl") for n in ("cd_grab_small_exchanges", "cd_grab")
        )
        assert_same(often, rarely, 0)


@pytest.mark.parametrize("name", ["halfway", "halfway-alone"])
def test_a_run_can_go_on_with_another_number_of_processes(runs, name):
    assert_same(read_metrics(runs / "sparse-1" / "metrics.jsonl"), read_metrics(runs / name / "metrics.jsonl"), 1e-12)


def test_sorters_give_different_orders(runs):
    hashes = {
        name: read_metrics(runs / f"{name}-1" / "metrics.jsonl")[-1]["order_hash"]
        for name in ("cd_grab", "kh", "id_grab_bal")
    }
    assert len(set(hashes.values())) == 3


def test_every_rank_has_its_log(runs):
    assert {path.name for path in (runs / "kh-4" / "logs").iterdir()} == {f"rank{r}.log" for r in range(4)}


def test_a_failing_rank_ends_the_whole_run(capfd):
    crash = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)"
    assert torchrun(["-c", crash], 2) == 7
    assert "Traceback" not in capfd.readouterr().err
