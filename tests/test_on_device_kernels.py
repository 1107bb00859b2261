"""What sparsifiers of several runs together count, select and forget, against plain loops and the library."""

import pytest
import torch

from experiments.training.on_device.accumulation import accumulate, forget
from experiments.training.on_device.counting import Groups, among, counts_between
from experiments.training.on_device.exdyna import balanced, rebalanced
from experiments.training.on_device.partitions import Partitions, among_anyones
from experiments.training.on_device.peers import allotted, dealt


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
