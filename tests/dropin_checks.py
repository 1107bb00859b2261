"""Part of `process_checks`: training with DDP and the drop-in sampler, saved for comparison."""

import os
import signal
import time
import warnings
from datetime import timedelta
from itertools import chain, pairwise, repeat
from unittest import mock

import overlap_checks
import torch
import torch.distributed as dist
from dropin_cases import dataset, gathered, network, parallel, sampler_of, train
from dropin_runs import CASES, RESUMED, TRAINED, resumed, started, trained
from sharded_cases import by_layers, by_tensors, in_replicas, weights
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from cdgrab import CdgrabError
from cdgrab.runtime import division, links
from cdgrab.runtime import group as workers
from cdgrab.runtime.fsdp import part_size


def broken_off(stop_after):
    """The first epoch is left early, with a loader that reads ahead."""
    workers.WHOLE = 0
    model = parallel()
    sampler = sampler_of().attach(model)
    loader = DataLoader(dataset(), batch_sampler=sampler, num_workers=1)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        visited = train(model, sampler, 1, loader, stop_after=stop_after, optimiser=optimiser)
        visited += train(model, sampler, 1, loader, optimiser=optimiser)
    sentences = [str(warning.message) for warning in told if warning.category is UserWarning]
    return {"visited": gathered(visited), "units": gathered(sampler._own), "told": sentences}


def fetched_ahead(divided):
    """The next batch is fetched before the last one's backward pass, over the end of an epoch: all but its last batch,
    and the next epoch."""
    workers.WHOLE = 0 if divided else 2**40
    model = parallel()
    sampler = sampler_of().attach(model)
    endless = chain.from_iterable(repeat(DataLoader(dataset(), batch_sampler=sampler)))
    loader, length = (now for now, _ in pairwise(endless)), len(sampler)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        visited = train(model, sampler, 1, loader, stop_after=2 * length)[0]
    visited = [visited[: length - 1], visited[length:]]
    return {"visited": gathered(visited), "units": gathered(sampler._own), "told": [str(one.message) for one in told]}


def overflowed():
    """One process's gradient is not finite in the third step, and gradients are sparse: nobody takes that step."""
    model, sampler, optimiser, scaler = started(CASES["exdyna, scaled"])
    after = []
    train(
        model, sampler, 1, optimiser=optimiser, scaler=scaler, stop_after=5,
        factor=lambda step: float("inf") if step == 2 and dist.get_rank() == 1 else 1.0,
        note=lambda model: after.append((weights(model), scaler.get_scale())),
    )  # fmt: skip
    return gathered(after)


def traffic(model, rounds):
    """Bytes sent per step once DDP has grouped its buckets, and those of a reduce-scatter (and of an all-gather)."""
    workers.WHOLE = 0
    with mock.patch.object(division, "PART", 1000):
        sampler = sampler_of().attach(model)
    train(model, sampler, 1)
    before, processes = sampler.group.traffic.sent, dist.get_world_size()
    train(model, sampler, 1)
    padded = sum(part_size(parameter, processes) for parameter in model.parameters())
    return (sampler.group.traffic.sent - before) / len(sampler), rounds * (processes - 1) * padded * 8


def skipped_in_16_bits():
    """The type in which a pair begun by a skipped batch is kept, and the seconds that the exchange may take."""
    workers.WHOLE, limit = 0, timedelta(seconds=77)
    group = dist.new_group(timeout=limit)
    model = DistributedDataParallel(network().bfloat16(), process_group=group)
    sampler, kept = sampler_of(process_group=group).attach(model), []
    for index, (_, inputs, labels) in enumerate(DataLoader(dataset(), batch_sampler=sampler)):
        model.zero_grad()
        if index % 2:
            nn.functional.cross_entropy(model(inputs.bfloat16()), labels).backward()
        else:
            sampler.skip()
            kept.append(sampler.sorter._shares is not None and sampler.sorter._shares.dtype)
    return kept[0], sampler.group.timeout


def train_without_zeroing(model, sampler):
    for _, inputs, labels in DataLoader(dataset(), batch_sampler=sampler):
        nn.functional.cross_entropy(model(inputs), labels).backward()


def never_synced(model, sampler):
    """As local SGD does: weights are averaged now and then, gradients never."""
    with model.no_sync():
        train(model, sampler, epochs=2)


def gpu_only():
    with mock.patch("torch.distributed.get_backend_config", lambda group: "cuda:nccl"):
        sampler_of()


def zeroed_in_place():
    """Gradients that are there, but zero."""
    model = parallel()
    return train(model, sampler_of().attach(model), 1, optimiser=InPlace(model.parameters(), lr=0.05))


def looked_at(by):
    """Some processes take a batch between two epochs, as one does to show it; what is visited by all of them."""
    workers.WHOLE = 2**40
    model = parallel()
    sampler = sampler_of().attach(model)
    first = train(model, sampler, 1)
    if dist.get_rank() in by:
        next(iter(DataLoader(dataset(), batch_sampler=sampler)))
    return gathered(first + train(model, sampler, 2))


def killed(rank, wrap, folder):
    """The last of three processes is killed amid an epoch, when gradients are sent. The others leave a file with the
    number of steps, the seconds until they noticed, and the error."""
    os.environ[links.SWITCH] = "0"
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=3)
    workers.WHOLE, steps = 0, []

    def note(_):
        steps.append(time.monotonic())
        if rank == 2 and len(steps) == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        train(model := wrap(network()), sampler_of().attach(model), note=note)
    except Exception as error:
        (folder / str(rank)).write_text(f"{len(steps)} {time.monotonic() - steps[-1]} {error}")
    os._exit(0)


def in_pairs(background):
    """Two processes at a time, each pair for itself."""
    workers.WHOLE = 0
    group, _ = dist.new_subgroups(2)
    model = DistributedDataParallel(network(), process_group=group)
    return gathered(train(model, sampler_of(process_group=group, background=background).attach(model)))


def saved_by_one():
    """As one does to write a file once. The group is not used again."""
    group = dist.new_group(timeout=timedelta(seconds=60), backend="cpu:gloo")  # as without a name
    model = DistributedDataParallel(network(), process_group=group)
    sampler = sampler_of(process_group=group).attach(model)
    if dist.get_rank() == 0:
        with mock.patch("cdgrab.dropin.sampler.PATIENCE", 0.1):
            sampler.state_dict()


def changed(change):
    """After the first step of a model with a frozen parameter."""
    model = by_layers(network())
    model[2].bias.requires_grad_(False)
    train(model, sampler_of().attach(model), 1, note=change)


class InPlace(torch.optim.SGD):
    def zero_grad(self):
        super().zero_grad(set_to_none=False)


def traced():
    """DDP whose gradients the compiler averages."""
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        sampler_of().attach(parallel())


def refusals():
    """Sentences, by what was wrong."""
    found = {}
    for name, attempt in {
        "not wrapped": lambda: sampler_of().attach(network()),
        "two hooks": lambda: [sampler_of().attach(model) for model in [parallel()] * 2],
        "accumulated": lambda: train(m := parallel(), sampler_of().attach(m), epochs=1, accumulate=2),
        "synced": lambda: train(m := parallel(), sampler_of(**CASES["accumulated"].sampler).attach(m), epochs=1),
        "never synced": lambda: never_synced(m := parallel(), sampler_of().attach(m)),
        "left over": lambda: train_without_zeroing(m := parallel(), sampler_of().attach(m)),
        "alone": lambda: sampler_of(process_group=dist.new_subgroups(1)[0]).attach(parallel()),
        "nccl": gpu_only,
        "sparse": lambda: sampler_of().attach(parallel(nn.Embedding(5, 3, sparse=True))),
        "static": lambda: sampler_of(**CASES["accumulated"].sampler).attach(parallel(static_graph=True)),
        "traced": traced,
        "seeds": lambda: sampler_of(seed=dist.get_rank()).attach(parallel()),
        "sizes": lambda: sampler_of(batch_size=3 + dist.get_rank() % 2).attach(parallel()),
        "one rank": saved_by_one,
        "FSDP1": lambda: sampler_of().attach(FullyShardedDataParallel(network(), device_id=torch.device("cpu"))),
        "tensors": lambda: sampler_of().attach(by_tensors(network())),
        "replicas": lambda: sampler_of().attach(in_replicas(network(), 1)),
        "whole replicas": lambda: sampler_of().attach(in_replicas(network(), dist.get_world_size())),
        "sharded twice": lambda: [sampler_of().attach(model) for model in [by_layers(network())] * 2],
        "sharded, compressed": lambda: sampler_of().attach(by_layers(network()), compress="bf16"),
        "sharded, examples": lambda: sampler_of(unit="example").attach(by_layers(network())),
        "sharded, alone": lambda: sampler_of(process_group=dist.new_subgroups(1)[0]).attach(by_layers(network())),
        "sharded, kept": lambda: train(m := by_layers(network()), sampler_of().attach(m), 1, accumulate=2),
        "sharded, divided": lambda: changed(lambda model: model.set_gradient_divide_factor(3.0)),
        "sharded, unfrozen": lambda: changed(lambda model: model[2].bias.requires_grad_()),
        "states": lambda: sampler_of().attach(parallel()).load_state_dict(started(CASES["exdyna"])[1].state_dict()),
    }.items():
        try:
            attempt()
        except (CdgrabError, RuntimeError) as error:
            found[name] = str(error)
    return found


def main(target):
    torch.set_num_threads(1)
    processes, folder = dist.get_world_size(), target.parent / "sharded"
    ways = ((parallel, 2), (fully_shard, 1))  # first: the cases have so much sent in tiny pieces, which takes long
    results = {"traffic": [traffic(wrap(network(width=2000)), rounds) for wrap, rounds in ways]}
    results |= {name: trained(CASES[name]) for n, name in TRAINED if n == processes}
    results |= {
        ("resumed", name, stop): resumed(CASES[name], stop, folder) for n, name, stop in RESUMED if n == processes
    }
    results |= {"overflowed": overflowed(), "in pairs": in_pairs(background=False)}
    if processes == 2:
        results |= {("ahead", divided): fetched_ahead(divided) for divided in (True, False)}
        results |= {"broken off": broken_off(3), "refused": refusals(), "zeroed": zeroed_in_place()}
        results |= overlap_checks.results() | {"skipped in 16 bits": skipped_in_16_bits()}
        results |= {("looked at", by): looked_at(by) for by in ((), (0,))}
    else:
        results["in pairs, beside"] = in_pairs(background=True)
    if dist.get_rank() == 0:
        torch.save(results, target)
