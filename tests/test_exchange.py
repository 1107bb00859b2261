"""Exchanges between processes against one process and the oracle: orders, means, traffic."""

from itertools import pairwise, product
from unittest import mock

import pytest
import torch
from exchange_checks import EPOCHS, WAYS, cases, kinds, name_of, shapes, vectors, widths_of
from hypothesis import given
from hypothesis import strategies as st
from process_runs import PROCESSES
from sorter_cases import make_gradients, oracle

import cdgrab
from cdgrab.balance import kernels
from cdgrab.runtime import division as divisions
from cdgrab.runtime import mean as exchange
from cdgrab.runtime.division import Division
from cdgrab.runtime.group import WorkerGroup
from cdgrab.runtime.pieces import by_owner, joined, put_back


@pytest.fixture(scope="module")
def found(spawned):
    """What `exchange_checks` saved, by number of processes."""
    return {processes: torch.load(spawned / str(processes) / "exchange") for processes in PROCESSES}


def alone(shape, kind, options):
    """The orders of one process."""
    workers, units, dim = shape
    sorter = cdgrab.make_sorter("cd_grab", workers=workers, units=units, dim=dim, seed=5, **options)
    orders = []
    for epoch, gradients in enumerate(make_gradients(kind, EPOCHS, *shape)):
        orders.append(sorter.order(epoch))
        sorter.observe(range(units), gradients)
    return torch.stack([*orders, sorter.order(EPOCHS)])


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("processes", PROCESSES)
def test_orders_equal_those_of_one_process(found, processes, how):
    for case in cases(processes, how):
        assert torch.equal(found[processes][name_of(*case), how], alone(*case)), case


@pytest.mark.parametrize(("processes", "kind"), [(n, kind) for n in PROCESSES for kind in kinds(n, "divided")])
def test_divided_orders_equal_the_papers_pseudocode(found, processes, kind):
    for shape in shapes(processes):
        orders = found[processes][name_of(shape, kind, {}), "divided"]
        assert torch.equal(orders, oracle("cd_grab", orders[0], make_gradients(kind, EPOCHS, *shape)))


@pytest.mark.parametrize("processes", PROCESSES)
def test_shares_of_the_mean_gradient_give_the_same_orders(found, processes):
    for units, kind in product((6, 7), ("random", "cancelling")):
        assert torch.equal(found[processes]["shares", units, kind], alone((processes, units, 11), kind, {}))


@pytest.mark.parametrize("processes", PROCESSES)
def test_the_first_process_alone_collects_what_all_could_gather(found, processes):
    everywhere, once = found[processes]["states"]
    assert everywhere["per_worker"]["_unpaired"].shape == (4, 1, 5)
    assert everywhere["per_worker"].keys() == once["per_worker"].keys() and everywhere["epoch"] == once["epoch"]
    for name, tensor in everywhere["per_worker"].items():
        assert torch.equal(tensor, once["per_worker"][name])


@pytest.mark.parametrize("processes", PROCESSES)
def test_processes_that_found_different_checkpoints_do_not_go_on(found, processes):
    same, other, none = found[processes]["refusals"]
    assert same is None and "rank 0 epoch 3, unit 8" in other and "do all hosts see it?" in other
    assert none.count("checksum") == processes - 1 and f"rank {processes - 1} none" in none


@pytest.mark.parametrize("processes", PROCESSES)
def test_means_have_the_same_bits_on_any_number_of_processes(found, processes):
    for workers, *_ in shapes(processes):
        for both in zip(*found[processes]["means", workers], strict=True):
            for mean in both:
                gradients = torch.randn(workers, len(mean), generator=torch.Generator().manual_seed(len(mean)))
                assert torch.equal(mean, exchange.tree_sum(gradients) / workers)


@pytest.mark.parametrize("way", ["spread", "in_one_round", "gather"])
@pytest.mark.parametrize("processes", PROCESSES)
def test_results_of_all_owners_reach_everybody(found, processes, way):
    for widths, everybody in zip(widths_of(processes), found[processes]["exchanged", way], strict=True):
        assert torch.equal(everybody, vectors(processes, sum(widths)).sum(0).expand_as(everybody))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 12, 32, 33])
def test_tree_sum_is_the_sum(count):
    rows = torch.randn(count, 5, 2, dtype=torch.float64)
    torch.testing.assert_close(exchange.tree_sum(rows), rows.sum(0), rtol=1e-14, atol=1e-14)
    for processes in (2, 4):
        if count % processes == 0:
            parts = torch.stack([exchange.tree_sum(part) for part in rows.chunk(processes)])
            assert torch.equal(exchange.tree_sum(parts), exchange.tree_sum(rows)), "a process's sum is a branch"
    if count in (2, 4):
        for dtype in (torch.float32, torch.float64):
            plain, compiled = torch.empty(2, 7, dtype=dtype)
            some = torch.randn(count, 7, dtype=dtype)
            exchange.mean_of_rows(some, plain), kernels.optional("cpu").mean_of_rows(some, compiled)
            assert torch.equal(plain, compiled)


@pytest.mark.parametrize("count", [2, 6, 8, 64, 96])
def test_tree_sum_on_a_gpu_has_the_same_bits(on_gpu, count):
    tree, device = kernels.optional("tree"), on_gpu[1]
    rows = torch.randn(3, count, 130, device=device).transpose(0, 1)  # of three runs; [count, runs, dim]
    assert tree.takes(rows)
    assert torch.equal(tree.tree_sum(rows).cpu(), exchange.tree_sum(rows.cpu()))


@pytest.mark.parametrize("processes", PROCESSES)
def test_a_unit_that_failed_leaves_nothing_in_a_state(found, processes):
    sorter = cdgrab.make_sorter("cd_grab", workers=processes, units=4, dim=11, seed=5)
    sorter.order(0)
    sorter.observe(range(4), make_gradients("random", 1, processes, 4, 11)[0])
    after, message = found[processes]["broken off"]
    assert torch.equal(after, sorter.order(1))
    assert message == "a step failed amid a pair: there is no state to save; load the last one"


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("dim", [1, 7, 24])
def test_coordinates_are_divided_without_gaps(processes, dim):
    groups = [WorkerGroup(processes, rank, processes) for rank in range(processes)]
    taken = [Division.even(group, dim).own(torch.arange(dim)) for group in groups]
    assert torch.cat(taken).tolist() == list(range(dim)) and max(map(len, taken)) - min(map(len, taken)) <= 1


@given(st.integers(1, 5), st.integers(1, 60), st.integers(1, 9), st.data())
def test_what_belongs_to_whom(processes, dim, part, data):
    """Of any slices of a vector, whatever their order, every process finds what it keeps, and nothing is lost."""
    groups = [WorkerGroup(processes, rank, processes) for rank in range(processes)]
    ends = data.draw(st.lists(st.integers(0, dim), max_size=6).map(lambda some: sorted([0, dim, *some])))
    slices = data.draw(st.permutations([slice(*both) for both in pairwise(ends)]))[:4]
    with mock.patch.object(divisions, "PART", part):
        each = [Division.dealt(group, dim) for group in groups]
    vector = torch.randn(dim, dtype=torch.float64)
    assert torch.equal(torch.cat([one.own(vector) for one in each]).sort().values, vector.sort().values)
    piece = torch.cat([vector[own] for own in slices])
    owned = each[0].owned(slices)
    sent, widths = by_owner(piece, owned)
    for division, parts, received in zip(each, owned, sent.split(widths), strict=True):
        kept = division.own(vector)
        for some, found in ((parts, piece), (joined(parts), received)):
            assert sum(lies.stop - lies.start for lies, _ in some) == len(received)
            assert all(torch.equal(found[lies], kept[place]) for lies, place in some)
    put_back(result := torch.zeros_like(piece), owned, sent)
    assert torch.equal(result, piece)


@pytest.mark.parametrize("processes", [2, 4, 7])
def test_everybody_has_as_much_of_any_long_slice(processes):
    run = processes * divisions.PART
    division = Division.dealt(WorkerGroup(processes, 0, processes), 10 * run + 3)
    for start in range(0, 6 * run, 50_001):
        owned = division.owned([slice(start, start + 4 * run)])
        widths = [sum(lies.stop - lies.start for lies, _ in parts) for parts in owned]
        assert sum(widths) == 4 * run and max(widths) == min(widths)
