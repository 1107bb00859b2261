"""The drop-in sampler on a GPU: with DDP and FSDP2 on processes that share it, against the same training by hand on a
CPU; what a step of one process takes, and CUDA graphs."""

from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from dropin_cases import attached, dataset, gathered, network, parallel, sampler_of, sorted_alone, train
from sharded_cases import by_layers
from test_dropin_processes import by_hand, in_order
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, default_collate

from cdgrab import CdgrabError
from cdgrab.runtime import group as workers
from cdgrab.runtime import overlap

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PROCESSES, PIECE = 4, 8  # buckets of 18 and 56 coordinates: some pieces are divided evenly, and some are not
CASES = {
    "ddp": (parallel, {}, torch.float64),
    "ddp, bf16": (parallel, {"compress": "bf16"}, torch.bfloat16),
    "fsdp": (by_layers, {}, torch.float64),
}


def on_gpu(batch):
    return [each.cuda() for each in default_collate(batch)]


def whole(model):
    """All weights. (What FSDP has for that fails where gloo would have to send what is on a GPU.)"""
    parts = gathered(
        [getattr(each, "to_local", lambda each=each: each)().detach().cpu() for each in model.parameters()]
    )
    if isinstance(model, FSDPModule):
        return torch.cat([torch.cat(rows).flatten() for rows in zip(*parts, strict=True)])
    return torch.cat([each.flatten() for each in parts[0]])


def trained(rank, folder):
    """Saves what everybody visited, its units and the weights, by case."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    workers.WHOLE, overlap.GPU_PIECE, overlap.OF_THOSE = 0, PIECE, 10**9
    found = {}
    for name, (wrap, attach, _) in CASES.items():
        model, sampler = wrap(network().cuda()), sampler_of()
        sampler.attach(model, **attach)
        visited = train(model, sampler, loader=DataLoader(dataset(), batch_sampler=sampler, collate_fn=on_gpu))
        found[name] = {"visited": gathered(visited), "units": gathered(sampler._own), "weights": whole(model)}
    if rank == 0:
        torch.save(found, folder / "found")
    dist.barrier()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    torch.multiprocessing.spawn(trained, (folder,), PROCESSES)
    return torch.load(folder / "found", weights_only=False)


@pytest.mark.parametrize("name", CASES)
def test_orders_and_weights_on_a_gpu_equal_those_by_hand(found, name):
    result, wire = found[name], CASES[name][2]
    gradients, weights = by_hand(result["visited"], wire=wire)
    assert result["visited"] == in_order(result["units"], sorted_alone(gradients))
    torch.testing.assert_close(result["weights"], weights, rtol=0, atol=1e-12 if wire == torch.float64 else 2e-2)


@pytest.mark.parametrize("brief", [2**30, 0])  # rows are decided in the training's stream, or beside it
def test_a_step_waits_for_nothing_and_asks_for_no_memory(brief, monkeypatch):
    """No more often than the same step without orders, but for the first pair and where an epoch ends. (Rows of less
    than half a block are collected, and every pair has one of its own.)"""
    monkeypatch.setattr("cdgrab.sorters.balancers.BRIEF", brief)
    inputs, labels = (each.cuda() for each in dataset().tensors[1:])

    def asked(ordered):
        model = network(width=20_000).cuda()
        batches = attached(model, 8, drop_last=True) if ordered else [list(range(i, i + 8)) for i in range(0, 56, 8)]
        optimiser, found = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
        for epoch in range(3):
            for number, batch in enumerate(batches):
                some, right = inputs[batch], labels[batch]
                torch.cuda.synchronize()
                steady = epoch == 2 and 1 < number < 6
                torch.cuda.set_sync_debug_mode("error" if steady else "default")
                before = torch.cuda.memory_stats()["allocation.all.allocated"]
                try:
                    optimiser.zero_grad()
                    torch.nn.functional.cross_entropy(model(some), right).backward()
                    optimiser.step()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                found += [torch.cuda.memory_stats()["allocation.all.allocated"] - before] * steady
        return found

    assert asked(True) == asked(False)


def graphed(model):
    return torch.cuda.make_graphed_callables(model, (dataset().tensors[1][:8].cuda(),))


@pytest.mark.parametrize("wrap", [graphed, lambda model: torch.compile(model, mode="reduce-overhead")])
def test_graphs_of_the_models_own_passes_change_no_order(wrap):
    def visited(wrap):
        model = wrap(network().cuda())
        sampler = attached(model, 8, drop_last=True)
        return train(model, sampler, loader=DataLoader(dataset(), batch_sampler=sampler, collate_fn=on_gpu))

    assert visited(wrap) == visited(lambda model: model)


def test_a_whole_step_in_a_graph_is_refused():
    model, graph = network().cuda(), torch.cuda.CUDAGraph()
    batches = iter(attached(model, 8))
    inputs, labels = (each[:8].cuda() for each in dataset().tensors[1:])

    def step():
        next(batches)
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        model.zero_grad()

    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            step()
        graph.capture_begin()
        with pytest.raises(CdgrabError, match="captured in a CUDA graph"):
            step()
        with suppress(RuntimeError):  # the capture has failed
            graph.capture_end()
