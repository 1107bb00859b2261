"""Part of `dropin_checks`: training with DDP or FSDP in many ways, to the end or interrupted."""

from dataclasses import dataclass, field

import torch
from dropin_cases import EPOCHS, Awkward, Ignoring, Mixed, dataset, gathered, network, parallel, sampler_of, train
from sharded_cases import (
    average,
    by_columns,
    by_layers,
    in_bf16,
    in_replicas,
    partly,
    saved_and_loaded,
    together,
    weights,
)
from torch import nn
from torch.distributed.fsdp import fully_shard

from cdgrab.runtime import division, flows, overlap
from cdgrab.runtime import group as workers


def attack(model):
    """Gradients of inputs alone, with frozen weights: they belong to no batch."""
    inputs = dataset().tensors[1].requires_grad_()
    model.requires_grad_(False)
    torch.autograd.grad(model(inputs).sum(), inputs)
    model.requires_grad_(True)


def compiled():
    model = network()
    model.compile(backend="aot_eager")
    return model


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
    "ignoring": Case(network=Ignoring),
    "compiled": Case(network=compiled),
    "scaled": Case(scaled=True),
    "bf16": Case(attach={"compress": "bf16"}),
    "fp16": Case(attach={"compress": "fp16"}),
    "exdyna": Case(attach=EXDYNA),
    "exdyna, scaled": Case(attach=EXDYNA, scaled=True),
    "examples": Case({"unit": "example"}, divided=False),
    "examples, ignoring": Case({"unit": "example"}, network=Ignoring, divided=False),
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
TRAINED += [(4, name) for name in ("awkward", "views", "mixed", "sharded, awkward", "partly sharded, accumulated")]
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
