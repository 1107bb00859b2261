"""Ways to shard a model with FSDP, for the tests of the drop-in sampler."""

import io

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from cdgrab.runtime.fsdp import is_sharded


def by_layers(model):
    fully_shard(model[0])
    return fully_shard(model)


def together(model):
    """Two modules in one group, as accelerate shards the last layers, and a root with no parameters of its own."""
    fully_shard([model[0], model[2]])
    return fully_shard(model)


def partly(model):
    """Nobody averages the gradients of the last layer, until the script does."""
    fully_shard(model[0])
    return model


def by_columns(model):
    """One parameter, the one that can be divided evenly; shards and what belongs to them stay on the CPU."""
    return fully_shard(
        model,
        offload_policy=CPUOffloadPolicy(pin_memory=False),
        shard_placement_fn=lambda parameter: Shard(1) if parameter.shape == (2, 8) else None,
    )


def in_bf16(model):
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))


def in_replicas(model, replicas=2):
    sizes = (replicas, dist.get_world_size() // replicas)
    return fully_shard(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards")))


def by_tensors(model):
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tensors"))
    parallelize_module(model, mesh["tensors"], {"0": ColwiseParallel()})
    return fully_shard(model, mesh=mesh["data"])


def average(parameters):
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def weights(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass it may still have the whole parameters
    whole = [parameter.full_tensor() if is_sharded(parameter) else parameter for parameter in model.parameters()]
    return torch.cat([parameter.detach().flatten() for parameter in whole])


def saved_and_loaded(state, folder):
    """Through files of torch.distributed.checkpoint."""
    torch.save(state, packed := io.BytesIO())
    checkpoint.save({"sampler": packed.getvalue()}, checkpoint_id=folder)
    return loaded(folder)


def loaded(folder, **options):
    state = {"sampler": b""}
    checkpoint.load(state, checkpoint_id=folder, **options)
    return torch.load(io.BytesIO(state["sampler"]), weights_only=True)
