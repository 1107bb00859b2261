"""Part of `process_checks`: what every process gets, saved for comparison with one process."""

from functools import partial
from pathlib import Path

import torch
from sorter_cases import make_gradients

import cdgrab
from cdgrab.runtime import division as divisions
from cdgrab.runtime import group as workers
from cdgrab.runtime import mean as exchange
from cdgrab.runtime import state
from cdgrab.runtime.connection import connect, launched_world_size
from cdgrab.runtime.division import Division
from cdgrab.runtime.exchange import Exchange
from experiments.training import snapshot

# workers, units, dim; several per process, uneven coordinates, fewer coordinates than processes, blocks of rows that
# end amid a position, rows that are long
SHAPES = [(4, 8, 5), (8, 7, 19), (4, 6, 3), (8, 10, 1), (24, 6, 33), (4, 6, 9001), (2, 9, 8), (6, 8, 700)]
KINDS = ["random", "repeated", "tied", "zero", "cancelling", "nearly tied"]
OPTIONS = ({"rule": "walk"}, {"sketch": "countsketch", "sketch_size": 4}, {"background": True})
EPOCHS = 2
WAYS = {  # blocks of all rows, of one row, of some
    "divided": {"divided": True, "buffer_mb": 8.0},
    "collected": {"divided": False, "buffer_mb": 8.0},
    "divided, resumed": {"divided": True, "buffer_mb": 1e-5, "resume_at": (1, 3)},
    "collected, resumed": {"divided": False, "buffer_mb": 4e-3, "resume_at": (0, 3)},
}


def shapes(processes):
    return [shape for shape in SHAPES if shape[0] % processes == 0]


def kinds(processes, how):
    """All, but resumed or collected only those that leave fractions; on 4 processes those that tell most."""
    if how != "divided":
        return ("random", "cancelling")
    return KINDS if processes == 2 else ("random", "cancelling", "nearly tied")


def cases(processes, how):
    """Kinds in every shape, or on 4 processes, if resumed, in some; options in some shapes."""
    for shape in shapes(processes) if processes == 2 or "resumed" not in how else SHAPES[:3]:
        for kind in kinds(processes, how):
            yield shape, kind, {}
        for options in OPTIONS if shape in (SHAPES[:3] if processes == 2 else SHAPES[1:2]) else ():
            yield shape, "random", options


def name_of(shape, kind, options):
    return f"{shape} {kind} {options}"


def orders(group, shape, kind, options, divided, buffer_mb, resume_at=None):
    """Orders of all epochs for this process's workers; the gradients come in two uneven calls."""
    count, units, dim = shape
    workers.WHOLE = 0 if divided else 2**40
    settings = {"workers": count, "units": units, "dim": dim, "seed": 5, "group": group, "buffer_mb": buffer_mb}
    sorter = cdgrab.make_sorter("cd_grab", **settings, **options)
    found = []
    for epoch, gradients in enumerate(make_gradients(kind, EPOCHS, *shape)):
        local = gradients[group.local]
        found.append(sorter.order(epoch))
        for start, end in ((0, 3), (3, units)):
            sorter.observe(range(start, end), local[:, start:end])
            if resume_at == (epoch, end):
                saved = sorter.state_dict()
                sorter = cdgrab.make_sorter("cd_grab", **settings, **options)
                sorter.load_state_dict(saved)
    return torch.stack([*found, sorter.order(EPOCHS)])


def dealt(group, dim, size):
    """Coordinates in turn, some at a time and the last ones first; the last process gets none."""
    pieces = [slice(start, min(start + size, dim)) for start in reversed(range(0, dim, size))]
    sharing = group.world_size - 1
    return Division(group, (*(tuple(pieces[rank::sharing]) for rank in range(sharing)), ()))


def in_pieces(sorter, gradient):
    """The shard of one unit, the last coordinates first."""
    sorter.begin_shares(gradient)
    for place in (slice(1, None), slice(0, 1)):
        sorter.take_share(place, sorter.division.shard(gradient)[:, place])
    sorter.end_shares()


def orders_from_shares(group, shape, kind):
    """One worker per process, whose gradients are divided on the way to their mean. A block ends when there is no room
    for another row of the process with most coordinates."""
    count, units, dim = shape
    workers.WHOLE = 0
    divisions.AT_ONCE = 5 * count  # in several rounds
    settings = {"workers": count, "units": units, "dim": dim, "seed": 5, "group": group, "buffer_mb": 352 / 2**20}
    make = partial(cdgrab.make_sorter, "cd_grab", **settings)
    sorter = make()
    averager = exchange.Averager(group, dim)
    found = []
    for epoch, gradients in enumerate(make_gradients(kind, EPOCHS, *shape)):
        found.append(sorter.order(epoch))
        for unit in range(units):
            average, shard = averager.average(gradients[group.rank, unit], want_shard=True)
            torch.testing.assert_close(average, gradients[:, unit].mean(0), rtol=1e-12, atol=1e-12)
            if sorter.division == Division.even(group, dim):
                sorter.observe_shard(shard)
            else:
                in_pieces(sorter, gradients[group.rank, unit])
            if unit in (2, 3):  # go on in another one, also amid a pair
                saved = sorter.state_dict()
                sorter = make()
                sorter.load_state_dict(saved)
            if unit in (3, 4):  # and with coordinates divided in another way
                sorter.divide(dealt(group, dim, unit))
        assert not sorter.state_dict()["per_worker"]["_unpaired"].numel(), "an odd last unit waits for no pair"
    return torch.stack([*found, sorter.order(EPOCHS)])


def broken_off(group):
    """Orders after a unit that failed and was repeated from a state saved thereafter; and what is said amid a pair."""
    workers.WHOLE = 0
    settings = {"workers": group.world_size, "units": 4, "dim": 11, "seed": 5, "group": group}
    gradients = make_gradients("random", 1, group.world_size, 4, 11)[0, group.rank]
    sorter, again, other = (cdgrab.make_sorter("cd_grab", **settings) for _ in range(3))
    sorter.order(0)
    sorter.begin_shares(gradients[3])
    sorter.take_share(slice(0, 1), sorter.division.shard(gradients[3])[:, :1])  # and no more
    again.load_state_dict(sorter.state_dict())
    for gradient in gradients:
        in_pieces(again, gradient)
    other.order(0)
    in_pieces(other, gradients[0])
    other.begin_shares(gradients[1])
    try:
        other.state_dict()
    except cdgrab.CdgrabError as error:
        return again.order(1), str(error)


def states(group):
    """Of all workers in the middle of a pair: on every process, and on the first one only."""
    sorter = cdgrab.make_sorter("cd_grab", workers=group.workers, units=6, dim=5, seed=5, group=group)
    sorter.order(0)
    sorter.observe(range(3), make_gradients("random", 1, group.workers, 6, 5)[0, group.local, :3])
    own = sorter.state_dict()
    return state.gathered(own, group), state.collected(own, group)


def means(group, divided):
    """Means over all workers' gradients in float32, where the order of summation shows."""
    workers.WHOLE = 0 if divided else 2**40
    found = []
    for dim in (1, 2, 7, 1000):
        gradients = torch.randn(group.workers, dim, generator=torch.Generator().manual_seed(dim))
        found.append(exchange.Averager(group, dim).average(exchange.tree_sum(gradients[group.local]))[0])
    return found


def widths_of(processes):
    """As many for everybody; more for the last; nothing for the first."""
    return [3] * processes, [*range(2, processes + 2)], [0, *[4] * (processes - 1)]


def vectors(processes, dim):
    return torch.randint(100, (processes, dim), generator=torch.Generator().manual_seed(dim))


def exchanged(group, spread):
    """Everybody's sum of everybody's vector, by way of who owns the coordinates."""
    found = []
    for widths in widths_of(group.world_size):
        vector = vectors(group.world_size, sum(widths))[group.rank]
        exchange = Exchange(group, vector, widths)
        vector.split(widths)[group.rank].copy_(exchange.rows().sum(0))
        spread(exchange)
        found.append(group.gather(vector[None]))
    return found


def refusals(group):
    """What is said of checkpoints that are the same everywhere, of other parameters on the last rank, of none there."""
    last = group.rank == group.world_size - 1
    mine = {"epochs_done": 2, "position": 8, "parameters": torch.ones(3)}
    found = []
    for other in (mine, mine | {"parameters": torch.zeros(3)}, None):
        try:
            found.append(snapshot.refuse_different(group, other if last else mine, Path("run")))
        except cdgrab.CdgrabError as error:
            found.append(str(error))
    return found


def main(target):
    found = {}
    processes = launched_world_size()
    for shape in shapes(processes):
        group = connect(shape[0])
        for how, settings in WAYS.items():
            for case in [case for case in cases(processes, how) if case[0] == shape]:
                local = orders(group, *case, **settings)
                found[name_of(*case), how] = group.gather(local.transpose(0, 1).contiguous()).transpose(0, 1)
        found["means", shape[0]] = [means(group, divided) for divided in (True, False)]
    group = connect(processes)
    for units in (6, 7):
        for kind in ("random", "cancelling"):
            local = orders_from_shares(group, (processes, units, 11), kind)
            found["shares", units, kind] = group.gather(local.transpose(0, 1).contiguous()).transpose(0, 1)
    after, message = broken_off(group)
    found["broken off"] = group.gather(after), message
    found["states"] = states(connect(4))
    assert (found["states"][1] is None) == (group.rank > 0), "one process holds the state of all"
    found["refusals"] = refusals(group)
    for spread in (Exchange.spread, Exchange.in_one_round, Exchange.gather):
        found["exchanged", spread.__name__] = exchanged(group, spread)
    if group.rank == 0:
        torch.save(found, target)
