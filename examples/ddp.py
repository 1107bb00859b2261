"""DistributedDataParallel: every process learns the order of its own batches, all of them together.

torchrun --nproc_per_node=2 -m examples.ddp [cd_grab|d_rr|…] [epochs]
"""

import sys

sys.path += [] if __package__ else [f"{sys.path[0]}/.."]  # the root of the clone

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from cdgrab import OrderedBatchSampler
from examples.digits import accuracy, digits, network


def main(sorter: str = "cd_grab", epochs: str = "10") -> float:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train, test = digits()
    model = DistributedDataParallel(network())
    sampler = OrderedBatchSampler(train, batch_size=16, sorter=sorter, seed=0)  # instead of a DistributedSampler
    sampler.attach(model)
    loader = DataLoader(train, batch_sampler=sampler)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(int(epochs)):
        total = torch.zeros(())
        for images, labels in loader:
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimiser.step()
            total += loss.detach()
        dist.all_reduce(total)
        loss = float(total) / len(loader) / dist.get_world_size()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}, test accuracy {accuracy(model.module, test):.3f}")
    dist.destroy_process_group()
    return loss


if __name__ == "__main__":
    main(*sys.argv[1:])
