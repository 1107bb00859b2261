"""Sparsifiers on several processes against one process; bytes on the wire; the hook of DistributedDataParallel."""

import pytest
import torch
from process_runs import PROCESSES
from sparsify_checks import DDP, PAUSE, PEERS, SHAPES, VARIANTS, trained_alone, trajectory

from cdgrab.errors import CollectiveError, MissingError
from cdgrab.runtime.agreement import refuse_different_ranks
from cdgrab.runtime.group import WorkerGroup


@pytest.fixture(scope="module")
def found(spawned):
    """What `sparsify_checks` saved, by number of processes."""
    return {processes: torch.load(spawned / str(processes) / "sparsify") for processes in PROCESSES}


def assert_same(one, other):
    for (update, selected, stats, _), (expected, indices, expected_stats, _) in zip(one, other, strict=True):
        assert torch.equal(update, expected) and stats == expected_stats
        assert all(map(torch.equal, selected, indices)) and len(selected) == len(indices)


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("variant", VARIANTS + PEERS, ids=str)
def test_updates_and_index_sets_equal_those_of_one_process(found, variant, processes):
    for shape in SHAPES[processes]:
        alone = trajectory(WorkerGroup(shape[0]), shape, variant)
        assert_same(found[processes][str((shape, variant))], alone)
    alone = trajectory(WorkerGroup(processes), (processes, 1000, True), variant)
    assert_same(found[processes][str(("own", variant))], alone)


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("variant", VARIANTS + PEERS, ids=str)
def test_bytes_in_the_statistics_are_those_on_the_wire(found, variant, processes):
    """With a process for every worker. Uneven shares of coordinates are padded, and a leader's broadcast costs its
    neighbour nothing and the others a whole message."""
    for update, selected, stats, sent in found[processes][str(("own", variant))]:
        slack = 4 * processes * processes
        if variant[0] in ("cltk", "deft"):
            slack += 4 * max(map(len, selected)) + 8 * processes
        assert abs(sent - stats["bytes"]) <= slack, (update.count_nonzero(), stats)


@pytest.mark.parametrize(("processes", "name", "options"), [*((2, *some) for some in DDP), (4, *DDP[0])])
def test_ddp_trains_as_a_sparsifier_that_hosts_all_workers(found, name, options, processes):
    """Over several buckets, their regrouping, no_sync and a resumed checkpoint."""
    parameters, stats, buckets = found[processes]["ddp", name, *options]
    expected, expected_stats = trained_alone(processes, name, options)
    torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-12)
    assert stats["counts"] == expected_stats["counts"] and stats["density"] == expected_stats["density"]
    assert len(buckets[1]) > 1 and buckets[0] != buckets[1] == buckets[2], "DDP regrouped its buckets"
    assert buckets[PAUSE] == buckets[0] and buckets[PAUSE + 1] == buckets[1]


@pytest.mark.parametrize(("which", "most"), [(0, 2e-3), (1, 1e-9), (2, 1e-9)])
def test_peers_train_as_by_the_hooks_of_pytorch(found, which, most):
    """fp16 is summed in 16 bits there, and in the gradients' own type here."""
    ours, dense = trained_alone(2, *PEERS[which])[0], trained_alone(2, "dense", {})[0]
    assert (ours - found[2]["torch"][which]).abs().max() < most
    assert (ours - dense).abs().max() > 1e-5


def test_ddp_goes_on_after_a_gradient_that_is_not_finite(found):
    """All of it is not finite here: of several sections, none is sent."""
    undisturbed, disturbed, in_sections, disturbed_there = found[2]["past nan"]
    assert torch.equal(undisturbed, disturbed) and torch.equal(in_sections, disturbed_there)
    assert not torch.equal(undisturbed, in_sections)


def test_hooks_that_differ_between_ranks_are_refused(found):
    density, name = found[2]["different"]
    assert "density is 0.1 on process 0 and something else on others" in density
    assert "name is 'topk' on process 0 and something else on others" in name


def test_a_rank_that_makes_a_hook_alone_is_told(monkeypatch):
    def nobody_comes(group, tensor):
        raise CollectiveError("all-gather", 1, "timed out")

    monkeypatch.setattr(WorkerGroup, "gather", nobody_comes)
    with pytest.raises(MissingError, match="rank 0 waited in vain: every process needs the same hook"):
        refuse_different_ranks(WorkerGroup(2, 0, 2), {"density": 0.1}, "the same hook")


def test_nothing_is_lost_that_is_owed_to_parameters_that_are_not_used(found):
    for owed, residual in found[2]["unused"]:
        assert residual.any()
        torch.testing.assert_close(residual, owed, rtol=1e-10, atol=1e-12)
