"""Plain PyTorch: an ordinary training loop that visits its batches in learnt orders.

python -m examples.plain [cd_grab|d_rr|…] [epochs]
"""

import sys

sys.path += [] if __package__ else [f"{sys.path[0]}/.."]  # the root of the clone

import torch
from torch import nn
from torch.utils.data import DataLoader

from cdgrab import OrderedBatchSampler
from examples.digits import accuracy, digits, network


def main(sorter: str = "cd_grab", epochs: str = "10") -> float:
    torch.manual_seed(0)
    train, test = digits()
    model = network()
    sampler = OrderedBatchSampler(train, batch_size=16, sorter=sorter, seed=0)  # instead of shuffle=True
    sampler.attach(model)
    loader = DataLoader(train, batch_sampler=sampler, num_workers=2)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(int(epochs)):
        total = 0.0
        for images, labels in loader:
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimiser.step()
            total += loss.item() * len(labels)
        print(f"epoch {epoch + 1}: loss {total / len(train):.4f}, test accuracy {accuracy(model, test):.3f}")
    return total / len(train)


if __name__ == "__main__":
    main(*sys.argv[1:])
