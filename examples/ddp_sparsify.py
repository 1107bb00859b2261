"""A small network on handwritten digits, trained by DistributedDataParallel with sparse gradients.

    torchrun --nproc_per_node=2 examples/ddp_sparsify.py [exdyna] [density] [epochs]

Prints loss and accuracy, and how many bytes a process sent in the last step, next to those of dense gradients.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cdgrab.sparsify import ddp_hook
from experiments.data import cifar10

BATCH = 32


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
    pictures, _ = cifar10.load(cifar10.locate("embedded"))  # 1,797 digits of scikit-learn, without importing it
    images = torch.from_numpy(pictures.images[:, :1, ::4, ::4]).float() / pictures.white
    labels = torch.from_numpy(pictures.labels)
    train, test = torch.randperm(len(labels)).split([1500, len(labels) - 1500])

    model = DistributedDataParallel(network())
    hook = ddp_hook(model, sparsifier, density=float(density))  # the one line
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(int(epochs)):
        for batch in train[torch.randperm(len(train))][rank::processes].split(BATCH):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimiser.step()
        with torch.no_grad():
            accuracy = (model.module(images[test]).argmax(1) == labels[test]).float().mean()
        if rank == 0:
            dense = 2 * (processes - 1) * hook.sparsifier.dim * 4 // processes
            print(f"epoch {epoch + 1}: loss {loss:.4f}, test accuracy {accuracy:.3f}", end=", ")
            print(f"density {hook.stats.density:.4f}, {hook.stats.bytes:,} bytes a step (dense: {dense:,})")
    dist.destroy_process_group()
    return float(accuracy)


if __name__ == "__main__":
    main(*sys.argv[1:])
