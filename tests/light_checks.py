"""Run by test_dropin_light.py in a process of its own that has torch and numpy, and nothing of the suite."""

import json
import sys
import tempfile
import warnings

SUITE = (
    "datasets", "experiments", "hydra", "lightning", "matplotlib", "numba", "omegaconf", "pandas", "tokenizers",
    "torchdata", "torchopt", "tqdm", "transformers", "triton",
)  # fmt: skip
PROCESSES = 2


class Without:
    """A finder that does not find the suite's packages."""

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in SUITE else self.finder.find_spec(name, path, target)


def interrupted(stop_after):
    """Example numbers visited when training stops mid-epoch, and another sampler goes on from the saved state."""
    import torch
    from dropin_cases import attached, network, train

    model = network()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = attached(model)
    visited = train(model, sampler, optimiser=optimiser, stop_after=stop_after)
    state = sampler.state_dict()
    sampler.detach()
    again = attached(model)
    again.load_state_dict(state)
    rest = train(model, again, epochs=2, optimiser=optimiser)
    return [*visited[:-1], visited[-1] + rest[0], rest[1]]


def uninterrupted():
    from dropin_cases import attached, network, train

    model = network()
    return train(model, attached(model))


def parallel(rank, folder):
    """DDP in one of several processes; what they visited is saved."""
    import torch
    import torch.distributed as dist
    from dropin_cases import network, sampler_of, train

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=PROCESSES)
    model = torch.nn.parallel.DistributedDataParallel(network())
    sampler = sampler_of().attach(model)
    found = {"visited": train(model, sampler), "units": sampler._own}
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()


def main():
    sys.meta_path[:] = map(Without, sys.meta_path)
    warnings.filterwarnings("ignore", "numba is not installed")
    import torch

    before = set(sys.modules)
    import cdgrab  # noqa: F401

    loaded = sorted(set(sys.modules) - before)
    import torch._dynamo  # once, before the fork: DDP and optimisers load it

    with tempfile.TemporaryDirectory() as folder:
        # forked before anything is trained here: threads of autograd do not survive a fork
        torch.multiprocessing.start_processes(parallel, (folder,), PROCESSES, start_method="fork")
        everybodys = []
        for rank in range(PROCESSES):
            with open(f"{folder}/{rank}.json") as file:
                everybodys.append(json.load(file))
    found = {"loaded": loaded, "parallel": everybodys, "resumed": interrupted(11), "whole": uninterrupted()}
    print(json.dumps(found | {"suite": sorted(set(SUITE) & set(sys.modules))}))


if __name__ == "__main__":
    main()
