"""Part of `process_checks`: training with DDP and the drop-in sampler, saved for comparison."""

import os
import signal
import time
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain, pairwise, repeat
from unittest import mock

import overlap_checks
import torch
import torch.distributed as dist
from dropin_cases import EPOCHS, Awkward, Mixed, dataset, gathered, network, parallel, sampler_of, train
from sharded_cases import (
    average,
    by_columns,
    by_layers,
    by_tensors,
    in_bf16,
    in_replicas,
    partly,
    saved_and_loaded,
    together,
    weights,
)
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from cdgrab import CdgrabError
from cdgrab.runtime import division, flows, links, overlap
from cdgrab.runtime import group as workers
from cdgrab.runtime.fsdp import part_size


def attack(model):
    """Gradients of inputs alone, with frozen weights: they belong to no batch."""
    inputs = dataset().tensors[1].requires_grad_()
    model.requires_grad_(False)
    torch.autograd.grad(model(inputs).sum(), inputs)
    model.requires_grad_(True)


@dataclass
class Case:
    sampler: dict = field(default_factory=dict)  # options
    attach: dict = field(default_factory=dict)
    wrap: dict = field(default_factory=dict)  # of DDP
    shard: object = None  # the same with FSDP instead
    like: str = ""  # the case with DDP to which this one is equal
    loop: dict = field(default_factory=dict)
    network: object = network
    divided: bool = True  # gradients by coordinates
    short: int = 0  # buckets up to this length, times the number of processes, are sent whole all the same
    piece: int = 2**20  # coordinates of a bucket that are exchanged at once
    near: float = 1e-12  # how near the weights are to those of averaging by hand
    scaled: bool = False  # by a scaler that doubles its scale every third step

    @property
    def accumulate(self):
        return self.loop.get("accumulate", 1)


ACCUMULATED = {"batch_size": 2, "accumulation_steps": 2, "drop_last": True}
EXDYNA = {"sparsifier": "exdyna", "density": 0.2}
CASES = {
    "collected": Case({"diagnose": 1000}, divided=False),
    "divided": Case({"diagnose": 1000}),
    "accumulated": Case(ACCUMULATED, loop={"accumulate": 2}),
    "sketched": Case({"sketch": "countsketch", "sketch_size": 16}),
    "skipped": Case(loop={"skip": (1, 4)}),
    "skipped, collected": Case(loop={"skip": (1, 4)}, divided=False),
    "awkward": Case(network=Awkward, wrap={"find_unused_parameters": True}),
    "static": Case(wrap={"static_graph": True}),
    "views": Case(wrap={"gradient_as_bucket_view": True}, piece=17),
    "sketched views": Case({"sketch": "countsketch", "sketch_size": 16}, wrap={"gradient_as_bucket_view": True}),
    "short buckets": Case(short=60, piece=23),
    "mixed": Case(network=Mixed, near=1e-6),
    "scaled": Case(scaled=True),
    "bf16": Case(attach={"compress": "bf16"}),
    "fp16": Case(attach={"compress": "fp16"}),
    "exdyna": Case(attach=EXDYNA),
    "exdyna, scaled": Case(attach=EXDYNA, scaled=True),
    "examples": Case({"unit": "example"}, divided=False),
    "oblivious": Case({"sorter": "d_rr"}),
    "sharded": Case({"diagnose": 1000}, shard=by_layers, like="divided"),
    "sharded, accumulated": Case(ACCUMULATED, loop={"accumulate": 2}, shard=by_layers, like="accumulated"),
    "sharded together": Case(shard=together, like="divided"),
    "partly sharded, accumulated": Case(ACCUMULATED, loop={"accumulate": 2}, shard=partly, like="accumulated"),
    "sharded, awkward": Case(network=Awkward, shard=fully_shard, like="awkward"),
    "sharded by columns": Case(loop={"skip": (1, 4)}, shard=by_columns, scaled=True, like="skipped"),
    "sharded, attacked": Case(shard=by_layers, like="divided", loop={"note": attack}),
    "sharded, bf16": Case(shard=in_bf16, divided=False),
    "sharded in replicas": Case({"sketch": "countsketch", "sketch_size": 16}, shard=in_replicas),
}
# On 4 processes only those whose exchanges depend on how many there are.
TRAINED = [(2, name) for name in CASES if name != "sharded in replicas"]
TRAINED += [(4, name) for name in ("sharded", "sharded, accumulated", "sharded in replicas")]
TRAINED += [(4, name) for name in ("collected", "divided", "accumulated", "exdyna, scaled")]
RESUMED = [
    (2, "sharded", 3),
    (2, "divided", 3),
    (2, "divided", 11),
    (2, "scaled", 14),
    (2, "exdyna, scaled", 4),
    (2, "examples", 4),
]
RESUMED += [(4, "exdyna, scaled", 4), (4, "sharded", 3), (4, "sharded, accumulated", 4)]


def started(case, state=None):
    """Model, sampler, optimiser and scaler. state: of the sampler, loaded before it is attached."""
    workers.WHOLE, overlap.PIECE = case.short if case.divided else 2**40, case.piece
    flows.CHUNK, division.PART = 60, 3  # coordinates are dealt to processes, before buckets are regrouped
    model = case.shard(case.network()) if case.shard else parallel(case.network(), **case.wrap)
    if case.shard:
        sampler_of(**case.sampler).attach(model).detach()  # leaves no trace
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3) if case.scaled else None
    around = nn.Sequential(model) if case.wrap else model  # as Lightning's Fabric puts a module around DDP's
    sampler = sampler_of(**case.sampler)
    if state:
        sampler.load_state_dict(state)
    sampler.attach(around, scaler=scaler, **case.attach)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if case.shard is partly:
        optimiser.register_step_pre_hook(lambda *_: average(model[2].parameters()))
    return model, sampler, optimiser, scaler


def trained(case):
    model, sampler, optimiser, scaler = started(case)
    visited = train(model, sampler, optimiser=optimiser, scaler=scaler, **case.loop)
    found = {"visited": gathered(visited), "units": gathered(sampler._own), "weights": weights(model)}
    return found | ({"report": sampler.report()} if "diagnose" in case.sampler else {})


def resumed(case, stop_after, folder):
    """Interrupted after so many steps: in the first epoch, at its end, or in the second. FSDP has files of its own.
    After 11 steps the state is there before the model is."""
    before = started(case)
    visited = train(*before[:2], optimiser=before[2], scaler=before[3], stop_after=stop_after, **case.loop)
    state = before[1].state_dict()
    state = saved_and_loaded(state, folder) if case.shard else state
    early = stop_after == 11
    after = started(case, state if early else None)
    for old, new in zip(before, after, strict=True):
        if new is not None and not (early and new is after[1]):
            new.load_state_dict(state if old is before[1] else old.state_dict())
    epochs = EPOCHS - len(visited) + (stop_after % len(after[1]) > 0)
    visited += train(*after[:2], epochs, optimiser=after[2], scaler=after[3], **case.loop)
    return {"visited": gathered(visited), "weights": weights(after[0]), "state": state}


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
    results = {name: trained(CASES[name]) for n, name in TRAINED if n == processes}
    results |= {
        ("resumed", name, stop): resumed(CASES[name], stop, folder) for n, name, stop in RESUMED if n == processes
    }
    ways = ((parallel, 2), (fully_shard, 1))
    results |= {"traffic": [traffic(wrap(network(width=2000)), rounds) for wrap, rounds in ways]}
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
