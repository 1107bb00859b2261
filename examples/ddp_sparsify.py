"""A small network on handwritten digits, trained by DistributedDataParallel with sparse gradients.

    torchrun --nproc_per_node=2 -m examples.ddp_sparsify [exdyna] [density] [epochs]

Prints loss and accuracy, and how many bytes a process sent in the last step, next to those of dense gradients.
"""

import sys

sys.path += [] if __package__ else [f"{sys.path[0]}/.."]  # the root of the clone

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from cdgrab.sparsify import ddp_hook
from examples.digits import accuracy, digits


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def main(sparsifier: str = "exdyna", density: str = "0.01", epochs: str = "8") -> float:
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train, test = digits()
    loader = DataLoader(train, batch_size=32, sampler=DistributedSampler(train))
    model = DistributedDataParallel(network())
    hook = ddp_hook(model, sparsifier, density=float(density))  # the one line
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(int(epochs)):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimiser.step()
        score = accuracy(model.module, test)
        if rank == 0:
            dense = 2 * (processes - 1) * hook.sparsifier.dim * 4 // processes
            print(f"epoch {epoch + 1}: loss {loss:.4f}, test accuracy {score:.3f}", end=", ")
            print(f"density {hook.stats.density:.4f}, {hook.stats.bytes:,} bytes a step (dense: {dense:,})")
    dist.destroy_process_group()
    return score


if __name__ == "__main__":
    main(*sys.argv[1:])
