"""FSDP2: parameters, gradients and what orders are learnt from are divided among the processes.

torchrun --nproc_per_node=2 -m examples.fsdp [cd_grab|d_rr|…] [epochs] [checkpoint to save at the end] [to start from]
"""

import io
import sys

sys.path += [] if __package__ else [f"{sys.path[0]}/.."]  # the root of the clone

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from cdgrab import OrderedBatchSampler
from examples.digits import accuracy, digits, network


def main(sorter: str = "cd_grab", epochs: str = "10", save_to: str = "", start_from: str = "") -> float:
    dist.init_process_group("gloo")  # a GPU each: "cpu:gloo,cuda:nccl"
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train, test = digits()
    model = network()
    for part in (model[0], model[4], model[9], model):  # the large ones, and what is left
        fully_shard(part)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9)
    sampler = OrderedBatchSampler(train, batch_size=32, sorter=sorter, seed=0)
    sampler.attach(model)
    loader, done = DataLoader(train, batch_sampler=sampler), 0
    if start_from:
        weights, momenta = get_state_dict(model, optimiser)
        state = {"model": weights, "optimiser": momenta, "sampler": b"", "epochs": 0}
        dcp.load(state, checkpoint_id=start_from)
        set_state_dict(model, optimiser, model_state_dict=weights, optim_state_dict=momenta)
        sampler.load_state_dict(torch.load(io.BytesIO(state["sampler"])))
        done = state["epochs"]
    for epoch in range(done, int(epochs)):
        for images, labels in loader:
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimiser.step()
        right = accuracy(model, test)  # all processes take part
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: test accuracy {right:.3f}")
    if save_to:
        torch.save(sampler.state_dict(), packed := io.BytesIO())
        weights, momenta = get_state_dict(model, optimiser)
        state = {"model": weights, "optimiser": momenta, "sampler": packed.getvalue(), "epochs": int(epochs)}
        dcp.save(state, checkpoint_id=save_to)
    dist.destroy_process_group()
    return right


if __name__ == "__main__":
    main(*sys.argv[1:])
