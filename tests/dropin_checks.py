"""Part of `process_checks`: training with DDP and the drop-in sampler, saved for comparison."""

import torch
import torch.distributed as dist
from dropin_cases import EPOCHS, dataset, network, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from cdgrab import CdgrabError, OrderedBatchSampler, workers

CASES = {  # divided by coordinates?, options of the sampler, of attach, batches accumulated
    "collected": (False, {}, {}, 1),
    "divided": (True, {}, {}, 1),
    "accumulated": (True, {"batch_size": 2, "accumulation_steps": 2, "drop_last": True}, {}, 2),
    "sketched": (True, {"sketch": "countsketch", "sketch_size": 16}, {}, 1),
    "bf16": (True, {}, {"compress": "bf16"}, 1),
    "exdyna": (True, {}, {"sparsifier": "exdyna", "density": 0.2}, 1),
    "examples": (False, {"unit": "example"}, {}, 1),
    "oblivious": (True, {"sorter": "d_rr"}, {}, 1),
}


def parallel(bucket_bytes=300):
    """Several buckets, which DDP regroups after the first step."""
    return DistributedDataParallel(network(), bucket_cap_mb=bucket_bytes / 2**20)


def sampler_of(batch_size=3, **options):
    return OrderedBatchSampler(dataset(), batch_size, seed=3, **options)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def gathered(value):
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    return everybody


def case(divided, options, attach, accumulate):
    workers.WHOLE = 0 if divided else 2**40
    model = parallel()
    sampler = sampler_of(**options).attach(model, **attach)
    visited = train(model, sampler, accumulate=accumulate)
    return {"visited": gathered(visited), "units": gathered(sampler._own), "weights": weights(model)}


def resumed(stop_after):
    """Interrupted after so many steps; the state goes through a file's form."""
    workers.WHOLE = 0
    model = parallel()
    sampler = sampler_of().attach(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    visited, steps = [], 0

    def go_on(model, sampler, optimiser, until):
        nonlocal steps
        while steps < until:
            for numbers, inputs, labels in DataLoader(dataset(), batch_sampler=sampler):
                visited.append(numbers.tolist())
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimiser.step()
                steps += 1
                if steps == until:
                    return

    go_on(model, sampler, optimiser, stop_after)
    state, momentum = sampler.state_dict(), optimiser.state_dict()
    other = parallel()
    other.load_state_dict(model.state_dict())
    optimiser = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
    optimiser.load_state_dict(momentum)
    again = sampler_of().attach(other)
    again.load_state_dict(state)
    go_on(other, again, optimiser, EPOCHS * len(again))
    return {"visited": gathered(visited), "weights": weights(other), "state": state}


def refusals():
    """Sentences, by what was wrong."""
    found = {}
    for name, attempt in {
        "not wrapped": lambda: sampler_of().attach(network()),
        "two hooks": lambda: [sampler_of().attach(model) for model in [parallel()] * 2],
        "accumulated": lambda: train(m := parallel(), sampler_of().attach(m), epochs=1, accumulate=2),
    }.items():
        try:
            attempt()
        except (CdgrabError, RuntimeError) as error:
            found[name] = str(error)
    return found


def main(target):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    results = {name: case(*settings) for name, settings in CASES.items()}
    results |= {("resumed", stop): resumed(stop) for stop in (3, 6)} | {"refused": refusals()}
    if dist.get_rank() == 0:
        torch.save(results, target)
    dist.destroy_process_group()
