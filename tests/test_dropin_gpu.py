"""The drop-in sampler with DDP and FSDP2 on processes that share a GPU, against the same training by hand on a CPU."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from dropin_cases import dataset, gathered, network, parallel, sampler_of, sorted_alone, train
from sharded_cases import by_layers
from test_dropin_processes import by_hand, in_order
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, default_collate

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
