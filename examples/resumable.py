"""A script that may be killed at any moment: loader processes, accumulation, a gradient scaler, checkpoints.

python -m examples.resumable FOLDER [cd_grab|d_rr|…] [epochs] [seed]     # again after a kill: goes on by itself
"""

import os
import sys

sys.path += [] if __package__ else [f"{sys.path[0]}/.."]  # the root of the clone

import torch
from torch import nn
from torch.utils.data import DataLoader

from cdgrab import OrderedBatchSampler
from examples.loans import loans, network

EVERY, ACCUMULATE = 20, 2  # a checkpoint every so many batches, a step every so many


def main(folder: str, sorter: str = "cd_grab", epochs: str = "20", seed: str = "0") -> float:
    torch.manual_seed(int(seed))
    train = loans()
    model, scaler = network(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)
    settings = {"sorter": sorter, "seed": int(seed), "accumulation_steps": ACCUMULATE, "drop_last": True}
    sampler = OrderedBatchSampler(train, 8, **settings).attach(model, scaler=scaler)
    holders = {"model": model, "optimiser": optimiser, "scaler": scaler, "sampler": sampler}
    os.makedirs(folder, exist_ok=True)
    done, path = 0, f"{folder}/checkpoint.pt"
    if os.path.exists(path):
        saved = torch.load(path, weights_only=True)
        done = saved["done"]
        for name, holder in holders.items():
            holder.load_state_dict(saved[name])
        torch.set_rng_state(saved["random"])  # dropout
    own = torch.Generator()  # else the loader would draw from dropout's
    loader = DataLoader(train, batch_sampler=sampler, num_workers=2, generator=own)
    while done < int(epochs) * len(sampler):
        for features, labels in loader:
            loss = nn.functional.cross_entropy(model(features), labels)
            scaler.scale(loss / ACCUMULATE).backward()
            done += 1
            if done % ACCUMULATE == 0:
                scaler.step(optimiser)
                scaler.update()
                optimiser.zero_grad()
            if done % EVERY == 0:
                states = {name: holder.state_dict() for name, holder in holders.items()}
                torch.save(states | {"done": done, "random": torch.get_rng_state()}, path + ".new")
                os.replace(path + ".new", path)
    features, labels = train.tensors
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(model.eval()(features), labels))
    print(f"{done} batches, train loss {loss!r}")
    return loss


if __name__ == "__main__":
    main(*sys.argv[1:])
