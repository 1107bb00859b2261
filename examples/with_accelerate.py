"""Hugging Face accelerate: prepare the model and the optimiser, not the loader (its batches are divided already).

accelerate launch -m examples.with_accelerate [cd_grab|d_rr|…] [epochs]
"""

import sys

sys.path += [] if __package__ else [f"{sys.path[0]}/.."]  # the root of the clone

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from cdgrab import OrderedBatchSampler
from examples.digits import accuracy, digits, network


def main(sorter: str = "cd_grab", epochs: str = "10") -> float:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)  # a GPU each: InitProcessGroupKwargs(backend="cpu:gloo,cuda:nccl")
    train, test = digits()
    model = network()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimiser = accelerator.prepare(model, optimiser)
    sampler = OrderedBatchSampler(train, batch_size=16, sorter=sorter, seed=0)
    sampler.attach(model, scaler=accelerator.scaler)  # there is one with mixed_precision="fp16"
    loader = DataLoader(train, batch_sampler=sampler)
    for epoch in range(int(epochs)):
        for batch in loader:
            images, labels = (tensor.to(accelerator.device) for tensor in batch)
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimiser.step()
        mean = float(accelerator.reduce(loss.detach(), "mean"))
        score = accuracy(accelerator.unwrap_model(model), test)
        accelerator.print(f"epoch {epoch + 1}: last loss {mean:.4f}, test accuracy {score:.3f}")
    return mean


if __name__ == "__main__":
    main(*sys.argv[1:])
