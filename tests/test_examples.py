"""The recipes for other people's scripts, as they stand in `examples`."""

import json
import os
import signal
import sys
from itertools import count

import pytest
import torch
from forked import elsewhere, started, wait_until_stopped
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cdgrab import CdgrabError, OrderedBatchSampler
from cdgrab.dropin.refusals import refuse_wrappers
from examples import resumable
from experiments.store.files import ROOT

UNTRAINED = 2.3  # log 10
ALONE = ("plain", "with_trainer")  # on one process
ON_TWO_PROCESSES = ("ddp", "ddp_sparsify", "fsdp", "with_accelerate", "with_lightning", "with_trainer")


@pytest.fixture(scope="module")
def returned(tmp_path_factory):
    """{recipe-rank: what it returned} from `example_checks`, the only one to import accelerate and Lightning."""
    folder = tmp_path_factory.mktemp("examples")
    assert elsewhere(train_recipes, folder) == 0
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def train_recipes(folder):
    import example_checks  # takes seconds

    example_checks.main(folder)


@pytest.mark.parametrize("recipe", ALONE)
def test_recipe_trains(returned, recipe):
    assert len((ROOT / "examples" / f"{recipe}.py").read_text().splitlines()) <= 70
    assert 0 < returned[f"{recipe}-alone"] < UNTRAINED / 2


@pytest.mark.parametrize("recipe", ON_TWO_PROCESSES)
def test_recipe_trains_on_two_processes(returned, recipe):
    assert len((ROOT / "examples" / f"{recipe}.py").read_text().splitlines()) <= 70
    one, other = (returned[f"{recipe}-{rank}"] for rank in (0, 1))
    if recipe == "fsdp":  # returns its accuracy; each process has its own BatchNorm
        assert min(one, other) > 0.9
        return
    assert one == other  # the mean of both
    assert one > 0.6 if recipe == "ddp_sparsify" else 0 < one < UNTRAINED / 2  # that one returns its accuracy


@pytest.mark.parametrize("kind", ["trainer", "lightning", "lightning sharded"])
def test_a_recipe_trains_more_than_once(returned, kind):
    """With DDP's wrapper, which is another one each time. What one process of Lightning's trains is a whole replica,
    unless it is told otherwise."""
    one, other = (returned[f"{kind}, again-{rank}"] for rank in (0, 1))
    first, second = one
    assert one == other and second == [3 if kind == "trainer" else 1, 8]  # that one goes on with the same sampler
    assert first == [1, 8] if kind != "lightning sharded" else "data_parallel_size" in first


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("**/*.py")), ids=lambda path: path.stem)
def test_a_recipe_that_is_run_by_its_name_finds_the_clone(path, monkeypatch):
    """As `python examples/plain.py` does: the first place to search is the script's own folder."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("sys.path += ")]
    assert len(lines) == ("__main__" in path.read_text())
    monkeypatch.setattr(sys, "path", [str(path.parent)])
    for line in lines:
        exec(line, {"sys": sys, "__name__": "__main__", "__package__": None})
        assert os.path.samefile(sys.path[-1], ROOT)


def test_wrappers_of_accelerate_that_divide_or_skip_batches_are_refused():
    wrappers = pytest.importorskip("accelerate.data_loader", reason="accelerate is not installed")
    sampler = OrderedBatchSampler(range(8), 2, sorter="d_rr")
    loader = DataLoader(range(8), batch_sampler=sampler)
    with pytest.raises(CdgrabError, match="prepare the model and the optimiser only"):  # before it has an `attach`
        wrappers.prepare_data_loader(loader, num_processes=2, process_index=0)
    with pytest.raises(CdgrabError, match="ignore_data_skip=True"):
        next(iter(wrappers.skip_first_batches(loader, 1)))
    assert len(list(wrappers.prepare_data_loader(loader))) == 4


def test_a_loader_of_accelerate_that_reads_on_one_process_only_is_refused_on_several():
    wrappers = pytest.importorskip("accelerate.data_loader", reason="accelerate is not installed")
    sampler = OrderedBatchSampler(range(8), 2, sorter="d_rr")
    reads_on_one = wrappers.prepare_data_loader(
        DataLoader(range(8), batch_sampler=sampler), put_on_device=True, dispatch_batches=True
    )
    assert len(list(reads_on_one)) == 4  # one process gets everything
    with pytest.raises(CdgrabError, match="prepare the model and the optimiser only"):
        refuse_wrappers(sampler, 2)


def test_a_killed_script_ends_as_if_it_had_not_been(tmp_path, monkeypatch):
    """Dropout, BatchNorm, loader processes, accumulation and a scaler; killed in the middle of the second epoch."""
    fewer = TensorDataset(*(tensor[:800] for tensor in resumable.loans().tensors))
    monkeypatch.setattr(resumable, "loans", lambda: fewer)
    whole, killed = tmp_path / "whole", tmp_path / "killed"  # folders that do not exist yet
    expected = resumable.main(str(whole), "cd_grab", "2")
    assert saved_batches(whole) == 2 * 100
    with started(in_a_session, 151, str(killed), "cd_grab", "2") as process:
        wait_until_stopped(process)
        os.killpg(process.pid, signal.SIGKILL)
    assert saved_batches(killed) == 140
    assert resumable.main(str(killed), "cd_grab", "2") == expected


def in_a_session(batches, *arguments):
    """The script, which stands still in the batch of this number, or it may be done before anybody looks."""
    os.setsid()  # so that the loader's processes can be killed with it
    loss, number = nn.functional.cross_entropy, count(1)

    def stop(*arguments):
        if next(number) == batches:
            os.kill(os.getpid(), signal.SIGSTOP)
        return loss(*arguments)

    nn.functional.cross_entropy = stop
    resumable.main(*arguments)


def saved_batches(folder):
    path = folder / "checkpoint.pt"
    return torch.load(path, weights_only=True)["done"] if path.exists() else 0
