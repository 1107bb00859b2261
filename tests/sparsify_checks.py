"""Run under torchrun by test_sparsify_processes.py: what every process gets, saved for comparison with one process."""

import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import cdgrab
from cdgrab.runtime import group as workers
from cdgrab.runtime.connection import connect, launched_rank, launched_world_size
from cdgrab.runtime.ddp import BucketHook
from cdgrab.runtime.group import WorkerGroup
from cdgrab.sparsify import ddp_hook, known_of_a_model, make_sparsifier
from scripts.bench.sections import SectionedHook, sections_of

VARIANTS = [
    ("dense", {}),
    ("topk", {}),
    ("cltk", {}),
    ("hard_threshold", {}),
    ("sidco", {}),
    ("deft", {}),
    ("micro", {}),
    ("exdyna", {}),
    ("exdyna", {"threshold": "proportional", "rule": "relative"}),
    ("exdyna", {"threshold": "paper", "rule": "paper", "blocks": 40}),
    ("exdyna", {"momentum_correction": 0.5, "warm_up_steps": 4}),
]
PEERS = [("fp16", {}), ("powersgd", {"rank": 1}), ("powersgd", {"rank": 4})]
MATRICES = {1000: [[25, 32], [150], [5, 2, 5]], 40: [[5, 6], [10]], 37: [[5, 6], [], [2, 3]]}  # by dim
# by number of processes, besides one worker on each: workers, dim, whether coordinates are divided to sum values
SHAPES = {2: [(8, 1000, True), (4, 37, False)], 4: []}
ITERATIONS, REFUSED_AT, RESUMED_AT = 5, 1, 3


def gradients(count, dim):
    rng = np.random.default_rng(dim)
    values = rng.standard_t(3, size=(ITERATIONS, count, dim)) * np.exp(rng.normal(size=dim))
    return torch.from_numpy(values.round() if dim < 100 else values).float()  # of whole numbers many are equal


def trajectory(group, shape, variant):
    """Updates and index sets of all iterations. One call is refused for a single worker's sake; later the state of all
    workers goes to a new object."""
    (count, dim, divided), (name, options) = shape, variant
    workers.WHOLE = 0 if divided else 2**40
    settings = {"workers": count, "dim": dim, "density": 0.05, "group": group, **options}
    settings |= {"shapes": MATRICES[dim]} if name == "powersgd" else {}
    found, steps = make_sparsifier(name, **settings), []
    for iteration, everybody in enumerate(gradients(count, dim)):
        mine = everybody[group.local]
        if iteration == REFUSED_AT:
            spoilt = everybody.clone()
            spoilt[count - 1, 0] = torch.nan
            try:
                found.reduce(spoilt[group.local])
                raise AssertionError("not a number was accepted")
            except cdgrab.CdgrabError:
                pass
        if iteration == RESUMED_AT:
            state = found.state_dict()
            state["per_worker"] = {key: group.gather(value) for key, value in state["per_worker"].items()}
            found = make_sparsifier(name, **settings)
            found.load_state_dict(state)
        before = group.traffic.sent
        update = found.reduce(mine)
        stats = {key: found.stats[key] for key in ("density", "counts", "imbalance", "bytes")}
        steps.append((update, found.selected, stats, group.traffic.sent - before))
    return steps


# -- DistributedDataParallel ------------------------------------------------------------------------------------------

STEPS, PAUSE = 6, 3  # checkpoint and a new model after PAUSE steps
DDP = [
    ("exdyna", {}),
    ("topk", {}),
    ("deft", {}),
    ("dense", {}),
    ("topk", {"momentum_correction": 0.5, "warm_up_steps": 4}),
    ("powersgd", {"rank": 4}),
    ("exdyna", {"sections": 3}),
    ("powersgd", {"sections": 2, "rank": 1}),
]


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 3)).double()


def batch(step, part, rank):
    generator = torch.Generator().manual_seed(1000 * step + 100 * part + rank)
    return torch.randn(5, 6, generator=generator, dtype=torch.float64), torch.randint(3, (5,), generator=generator)


def loss_of(model, step, part, rank):
    inputs, labels = batch(step, part, rank)
    return nn.functional.cross_entropy(model(inputs), labels)


def hook_of(model, name, sections=1, **options):
    """Ours, or that of the benchmark, which sends sections early."""
    if sections == 1:
        return ddp_hook(model, name, density=0.05, **options)
    processes = launched_world_size()
    channel = WorkerGroup(processes, launched_rank(), processes).new_channel()
    hook = SectionedHook(list(model.parameters()), name, channel, sections, density=0.05, **options)
    hook.register(model)
    return hook


def trained_by_ddp(rank, name, options):
    """Two backward passes a step, the first under no_sync. Buckets are so small that there are several after the first
    step; the sizes of their parameters come back too."""
    kind = SectionedHook if "sections" in options else BucketHook
    steps, communicate = [], kind.communicate

    def noted(hook, bucket):
        if bucket.index() == 0:
            steps.append([])
        steps[-1].append([parameter.numel() for parameter in bucket.parameters()])
        return communicate(hook, bucket)

    def start():
        model = DistributedDataParallel(network(), bucket_cap_mb=0.004)
        hook = hook_of(model, name, **options)
        return model, hook, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    kind.communicate = noted
    model, hook, optimiser = start()
    for step in range(STEPS):
        if step == PAUSE:
            states = model.module.state_dict(), hook.state_dict(), optimiser.state_dict()
            model, hook, optimiser = start()
            model.module.load_state_dict(states[0])
            hook.load_state_dict(states[1])
            optimiser.load_state_dict(states[2])
        optimiser.zero_grad()
        with model.no_sync():
            loss_of(model, step, 0, rank).backward()
        loss_of(model, step, 1, rank).backward()
        optimiser.step()
    kind.communicate = communicate
    return torch.cat([p.detach().flatten() for p in model.parameters()]), hook.stats, steps


def trained_by_torch(rank, name, options):
    """The same steps by PyTorch's own hook. PowerSGD's begins with two steps that send everything: here they change no
    parameter. Then it gets the factors that ours begins with."""
    model = DistributedDataParallel(network())
    optimiser, first_step = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), 0
    if name == "fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    else:
        first_step = -2
        state = PowerSGDState(None, options["rank"], start_powerSGD_iter=2)
        model.register_comm_hook((state, _first_factors(model, options)), _power_sgd)
    for step in range(first_step, STEPS):
        optimiser.zero_grad()
        with model.no_sync():
            loss_of(model, max(step, 0), 0, rank).backward()
        loss_of(model, max(step, 0), 1, rank).backward()
        if step >= 0:
            optimiser.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _first_factors(model, options):
    """By shape of the parameter: all of them differ."""
    shapes = [p.shape for p in model.parameters()]
    dim, known = sum(shape.numel() for shape in shapes), known_of_a_model("powersgd", shapes)
    ours = make_sparsifier("powersgd", workers=1, dim=dim, **known, **options)
    columns = ours._columns(torch.zeros(1).double())
    return {(each.rows, each.columns): q for each, q in zip(ours._matrices, columns, strict=True)}


def _power_sgd(states, bucket):
    state, factors = states
    if state.iter == 2 and not state.q_memory_dict:
        shapes = [tuple(p.shape) for p in bucket.parameters() if tuple(p.shape) in factors]
        state.q_memory_dict[0] = torch.cat([factors[shape].flatten() for shape in shapes])
        rows = sum(shape[0] * factors[shape].shape[1] for shape in shapes)
        state.p_memory_dict[0] = torch.zeros(rows).double()
    mean = powerSGD_hook(state, bucket)
    mean.wait()
    return mean


def trained_past_nan(rank, last, **options):
    """Parameters after three steps by DDP. Before each, a gradient is not finite on rank `last` (None: never): all
    refuse it, and DDP goes on."""
    model = DistributedDataParallel(network(), bucket_cap_mb=0.004)
    hook = hook_of(model, "exdyna", **options)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(3):
        if last is not None:
            try:
                loss = loss_of(model, step, 1, rank)
                (loss * (torch.nan if rank == last else 1.0)).backward()
                raise AssertionError("not a number was accepted")
            except cdgrab.CdgrabError as error:
                assert "must be finite" in str(error)
            assert all(parameter.grad.isnan().all() for parameter in model.parameters())
            optimiser.zero_grad()
        loss_of(model, step, 0, rank).backward()
        assert all(one.iteration == step + 1 for one in getattr(hook, "sparsifiers", None) or [hook.sparsifier])
        optimiser.step()
        optimiser.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Sometimes(nn.Module):
    """Its last layer is used every third step by all ranks, every third by the first one, otherwise by none."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(1)
        self.always, self.sometimes, self.rank = nn.Linear(6, 5).double(), nn.Linear(5, 5).double(), rank

    def forward(self, inputs, step):
        hidden = self.always(inputs)
        return self.sometimes(hidden) if step % 3 == 0 or (step % 3 == 1 and self.rank == 0) else hidden


def owed_to_unused(group, name, leave):
    """Gradients less updates, and what is left in the residuals, summed over ranks; leave: keep zeros in .grad."""
    model = DistributedDataParallel(Sometimes(group.rank), find_unused_parameters=True)
    hook, parameters, owed = ddp_hook(model, name, density=0.1), list(model.parameters()), 0.0
    for step in range(12):
        inputs, labels = batch(step, 0, group.rank)
        plain = nn.functional.cross_entropy(model.module(inputs, step), labels)
        gradients = torch.autograd.grad(plain, parameters, allow_unused=True, materialize_grads=True)
        model.zero_grad(set_to_none=not leave)
        nn.functional.cross_entropy(model(inputs, step), labels).backward()
        updates = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        owed += torch.cat([(g - u).flatten() for g, u in zip(gradients, updates, strict=True)])
    residual = hook.state_dict()["per_worker"]["_residual"]
    return group.gather(owed[None]).sum(0), group.gather(residual).sum(0)


def refusal_of_different_hooks(rank, **options):
    """What a rank hears if the ranks' options differ."""
    try:
        ddp_hook(DistributedDataParallel(network()), **options)
    except cdgrab.CdgrabError as error:
        return str(error)


def trained_alone(count, name, options):
    """The same with plain autograd, one worker after the other, and sparsifiers that host all of them: one, or one for
    each section."""
    model = network()
    parameters, options = list(model.parameters()), dict(options)
    sections = sections_of(parameters, options.pop("sections", 1))
    hosts = [hosting_all(count, name, section, options) for section in sections]
    optimiser = torch.optim.SGD(parameters, lr=0.3, momentum=0.9)
    for step in range(STEPS):
        losses = [loss_of(model, step, 0, rank) + loss_of(model, step, 1, rank) for rank in range(count)]
        for host, section in zip(hosts, sections, strict=True):
            rows = [torch.autograd.grad(loss, section, retain_graph=True) for loss in losses]
            update = host.reduce(torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]))
            for parameter, part in zip(section, update.split([p.numel() for p in section]), strict=True):
                parameter.grad = part.view_as(parameter)
        optimiser.step()
    density = sum(host.stats.density * host.dim for host in hosts) / sum(host.dim for host in hosts)
    counts = [sum(each) for each in zip(*(host.stats.counts for host in hosts), strict=True)]
    return torch.cat([p.detach().flatten() for p in parameters]), {"counts": counts, "density": density}


def hosting_all(count, name, parameters, options):
    dim, known = sum(p.numel() for p in parameters), known_of_a_model(name, [p.shape for p in parameters])
    return make_sparsifier(name, workers=count, dim=dim, density=0.05, **options, **known)


def main(target):
    found, processes = {}, launched_world_size()
    for shape in SHAPES[processes]:
        group = connect(shape[0])
        for variant in VARIANTS + PEERS:
            found[str((shape, variant))] = trajectory(group, shape, variant)
    group = WorkerGroup(processes, launched_rank(), processes)  # a process for every worker
    for variant in VARIANTS + PEERS:
        found[str(("own", variant))] = trajectory(group, (processes, 1000, True), variant)
    for name, options in DDP if processes == 2 else DDP[:1]:
        parameters, stats, buckets = trained_by_ddp(group.rank, name, options)
        everybody = group.gather(parameters[None])
        assert (everybody == everybody[0]).all(), "the ranks' models differ"
        found["ddp", name, *options] = parameters, dict(stats), buckets
    if processes == 2:
        found["torch"] = [trained_by_torch(group.rank, *case) for case in PEERS]
        found["past nan"] = [trained_past_nan(group.rank, last) for last in (None, 1)]
        found["past nan"] += [trained_past_nan(group.rank, last, sections=3) for last in (None, 1)]
        found["unused"] = [owed_to_unused(group, *case) for case in (("exdyna", False), ("topk", True))]
        found["different"] = [
            refusal_of_different_hooks(group.rank, name="topk", density=0.1 + group.rank / 10),
            refusal_of_different_hooks(group.rank, name="exdyna" if group.rank else "topk"),
        ]
    if group.rank == 0:
        torch.save(found, target)
