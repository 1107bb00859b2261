"""The drop-in sampler with DDP on 2 and 4 processes, against the same training by hand in this one."""

import json
import re
from contextlib import ExitStack
from functools import cache
from itertools import pairwise

import pytest
import torch
from dropin_cases import EXAMPLES, dataset, gradient, network, parallel, sampler_of, sorted_alone
from dropin_checks import killed
from dropin_runs import CASES, RESUMED, TRAINED
from forked import started
from process_runs import PROCESSES
from sharded_cases import by_layers, loaded
from test_dropin_report import check_report
from torch import nn

from cdgrab import CdgrabError, make_sorter

NEAR = {
    "bf16": 2e-2,
    "fp16": 2e-3,
    "exdyna": 0.5,
    "exdyna, scaled": 0.5,
    "examples": 1e-12,
    "examples, ignoring": 1e-12,
}
NEAR |= {"oblivious": 1e-12}


@pytest.fixture(scope="module")
def found(spawned):
    """What `dropin_checks` saved, by number of processes."""
    return {n: torch.load(spawned / str(n) / "dropin", weights_only=False) for n in PROCESSES}


def by_hand(visited, make=network, accumulate=1, skip=(), wire=torch.float64):
    """The same batches, gradients averaged here: unit gradients [epochs, workers, units, dim] and the last weights.
    wire: the type in which gradients are sent."""
    return _by_hand(json.dumps(visited), make, accumulate, skip, wire)


@cache  # many ways to exchange gradients lead to the same batches
def _by_hand(visited, make, accumulate, skip, wire):
    model, visited = make(), json.loads(visited)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    _, inputs, labels = dataset().tensors
    gradients, model.calls = [], 0
    for epoch in zip(*visited, strict=True):
        gradients.append([])
        for first in range(0, len(epoch[0]), accumulate):
            if first in skip:
                gradients[-1].append(torch.zeros_like(gradients[-1][0]))
                continue
            rows, calls = [], model.calls
            for batches in epoch:
                model.calls = calls
                model.zero_grad()
                for batch in batches[first : first + accumulate]:
                    nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
                rows.append(gradient(model).to(wire).double())
            gradients[-1].append(torch.stack(rows))
            mean, start = torch.stack(rows).mean(0).to(wire).double(), 0
            for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
                if parameter.grad is not None:
                    parameter.grad = mean[start : start + parameter.numel()].view_as(parameter).to(parameter, copy=True)
                start += parameter.numel()
            optimiser.step()
        gradients[-1] = torch.stack(gradients[-1], dim=1)
    return torch.stack(gradients), torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def in_order(units, orders):
    """Batches that the units of every worker are in these orders, by worker and epoch."""
    return [
        [[batch for unit in order.tolist() for batch in own[unit]] for order in orders[:, worker]]
        for worker, own in enumerate(units)
    ]


EXACT = [(n, name) for n, name in TRAINED if name not in NEAR]


@pytest.mark.parametrize(("processes", "name"), [(n, name) for n, name in EXACT if not CASES[name].like])
def test_orders_equal_the_suites_and_weights_those_of_averaging_by_hand(found, processes, name):
    result, case = found[processes][name], CASES[name]
    wire = torch.bfloat16 if "bf16" in name else torch.float64
    make = network if name == "compiled" else case.network
    gradients, weights = by_hand(result["visited"], make, case.accumulate, case.loop.get("skip", ()), wire)
    sketch = {key: value for key, value in case.sampler.items() if key.startswith("sketch")}
    assert result["visited"] == in_order(result["units"], sorted_alone(gradients, **sketch))
    for epoch in zip(*result["visited"], strict=True):
        numbers = [number for batches in epoch for batch in batches for number in batch]
        left_out = set(range(EXAMPLES)) - set(numbers)
        assert len(left_out) < (4 * processes if case.accumulate > 1 else 1)
        assert len(numbers) - len(set(numbers)) < (1 if case.accumulate > 1 else processes)
    torch.testing.assert_close(result["weights"], weights, rtol=0, atol=case.near)


@pytest.mark.parametrize(("processes", "name"), [(n, name) for n, name in EXACT if CASES[name].like])
def test_fully_sharded_models_have_the_orders_and_weights_of_ddp(found, processes, name):
    sharded, replicated = found[processes][name], found[processes][CASES[name].like]
    assert sharded["visited"] == replicated["visited"]
    torch.testing.assert_close(sharded["weights"], replicated["weights"], rtol=0, atol=1e-15)


@pytest.mark.parametrize("wrap", [parallel, by_layers])
def test_the_others_end_with_an_error_when_a_process_is_killed(tmp_path, wrap):
    with ExitStack() as running:
        for process in [running.enter_context(started(killed, rank, wrap, tmp_path)) for rank in range(3)]:
            process.join(60)
    for rank in range(2):
        steps, seconds, *told = (tmp_path / str(rank)).read_text().split()
        assert int(steps) in (4, 5) and float(seconds) < 10
        assert re.search(
            r"[Cc]onnection (closed|reset) by peer|connections? to ranks? [\d, ]+ (is|are) closed", " ".join(told)
        )


@pytest.mark.parametrize("name", ["collected", "divided", "sharded"])
@pytest.mark.parametrize("processes", PROCESSES)
def test_a_report_of_all_processes_together(found, processes, name):
    result = found[processes][name]
    gradients, _ = by_hand(result["visited"])
    check_report(result["report"], gradients, sorted_alone(gradients), common=True)


@pytest.mark.parametrize(("processes", "name"), [(n, name) for n, name in TRAINED if name in NEAR])
def test_other_ways_to_average_train_as_well(found, processes, name):
    """Compressed or sparse, the result is near the exact one; every example is visited in every epoch."""
    result = found[processes][name]
    for epoch in zip(*result["visited"], strict=True):
        assert {number for batches in epoch for batch in batches for number in batch} == set(range(EXAMPLES))
    assert result["visited"][0][0] != result["visited"][0][1]
    _, exact = by_hand(result["visited"], CASES[name].network)
    torch.testing.assert_close(result["weights"], exact, rtol=0, atol=NEAR[name])
    assert NEAR[name] < 1e-10 or not torch.equal(result["weights"], exact)


def test_a_changing_scale_changes_nothing_sparse_gradients_included(found):
    for name in ("divided", "exdyna"):
        plain, scaled = found[2][name], found[2][{"divided": "scaled"}.get(name, f"{name}, scaled")]
        assert plain["visited"] == scaled["visited"]
        torch.testing.assert_close(plain["weights"], scaled["weights"], rtol=0, atol=1e-13)


@pytest.mark.parametrize("processes", PROCESSES)
def test_nobody_takes_a_step_that_overflowed_somewhere(found, processes):
    for steps in found[processes]["overflowed"]:
        weights, scales = zip(*steps, strict=True)
        moved = [not torch.equal(before, after) for before, after in pairwise(weights)]
        assert moved == [True, True, False, True] and scales[3] == scales[2] / 2
        assert torch.equal(weights[-1], found[processes]["overflowed"][0][-1][0])


@pytest.mark.parametrize("processes", PROCESSES)
def test_traffic_is_that_of_an_all_reduce_or_reduce_scatter(found, processes):
    for sent, expected in found[processes]["traffic"]:
        assert 0.999 * expected <= sent < 1.01 * expected


def test_gradients_are_averaged_while_the_backward_pass_goes_on(found):
    assert found[2]["overlapped"] == [[True] * 4] * 2
    assert found[2]["skipped in 16 bits"] == (torch.float32, 77.0)


def test_coordinates_are_divided_as_buckets_want_it_as_soon_as_no_pair_is_open(found):
    assert found[2]["divided anew"] == [[False, False, True, True], [False, True, True, True], [True] * 4]


def test_no_process_waits_for_one_that_waits_for_it(found):
    first, second = found[2]["held up"]
    assert all(map(torch.equal, first, second))


def test_an_error_amid_an_exchange_leaves_no_message_for_the_next_step(found):
    for message, (first, second) in found[2]["failed once"]:
        assert message == "no room" and all(map(torch.equal, first, second))


@pytest.mark.parametrize("name", ["broken off", ("ahead", True), ("ahead", False)], ids=str)
def test_an_epoch_left_early_or_with_late_gradients(found, name):
    result = found[2][name]
    seen = [[batches[0]] for batches in result["visited"]]
    gradients, _ = by_hand(seen)
    _, workers, units, dim = gradients.shape
    alone = make_sorter("cd_grab", workers=workers, units=len(result["units"][0]), dim=dim, seed=3)
    alone.order(0)
    alone.observe(range(units), gradients[0])
    expected = in_order(result["units"], alone.order(1, cut_short=True)[None])
    assert [batches[1:] for batches in result["visited"]] == expected
    (told,) = result["told"]
    # that it has fetched a batch ahead cannot be told from having left one out
    assert told.startswith("epoch 0 ended with" if name == "broken off" else "at the end of the epoch 1 batch had no")


@pytest.mark.parametrize(("processes", "name", "stop_after"), RESUMED)
def test_resumes_mid_epoch_bit_by_bit(found, processes, name, stop_after):
    whole, resumed = found[processes][name], found[processes]["resumed", name, stop_after]
    for mine, theirs in zip(whole["visited"], resumed["visited"], strict=True):
        assert sum(mine, []) == sum(theirs, [])
    # Examples are seen beside DDP's own all-reduce, whose sums depend on how it has grouped its buckets.
    tolerance = 1e-14 if name == "examples" else 0
    torch.testing.assert_close(resumed["weights"], whole["weights"], rtol=0, atol=tolerance)


def test_one_process_may_look_at_a_batch_between_epochs(found):
    assert found[2]["looked at", (0,)] == found[2]["looked at", ()]


def test_a_group_of_some_processes_may_decide_beside_the_training(found):
    inline, beside = found[4]["in pairs"], found[4]["in pairs, beside"]
    assert inline == beside and inline[:2] == found[2]["in pairs"] == inline[2:]


def test_refusals_name_the_way_out(found):
    sentences = found[2]["refused"]
    assert "is not wrapped in DistributedDataParallel" in sentences["not wrapped"]
    assert "takes only one" in sentences["two hooks"]
    assert "compress= or sparsifier=" in sentences["two hooks"] and "keep the sampler" in sentences["two hooks"]
    assert "accumulation_steps=2" in sentences["accumulated"]
    assert "after 1 of accumulation_steps=2" in sentences["synced"]
    assert "no_sync" in sentences["synced"] and "accelerator.accumulate" in sentences["synced"]
    passes = len(found[2]["divided"]["visited"][0][0])
    assert f"the last {passes} backward passes ran inside no_sync" in sentences["never synced"]
    assert "do that first, and attach what comes of it" in sentences["not wrapped"]
    assert "zero_grad() after every step" in sentences["left over"]
    assert "process 0 of 1 for the sampler and 0 of 2 for DDP" in sentences["alone"]
    assert "init_process_group() without a name" in sentences["nccl"]
    assert "sparse=False" in sentences["sparse"]
    assert "accumulate with static_graph=False" in sentences["static"]
    assert "use 'ddp_optimizer'" in sentences["traced"]
    assert "seed is 0 on process 0 and something else on others" in sentences["seeds"]
    assert "batch_size is 3 on process 0" in sentences["sizes"] and "of the whole dataset" in sentences["sizes"]
    assert sentences["one rank"] == "rank 0 waited in vain: every rank must call sampler.state_dict()"
    assert "with a sparsifier, and this one is without" in sentences["states"]
    assert "use fully_shard of torch.distributed.fsdp instead" in sentences["FSDP1"]
    assert "divided by tensor parallelism" in sentences["tensors"]
    assert "use a mesh of one dimension, or sketch='countsketch'" in sentences["replicas"]
    assert "use DistributedDataParallel instead of fully_shard" in sentences["whole replicas"]
    assert "FSDP takes only one" in sentences["sharded twice"]
    assert "MixedPrecisionPolicy(reduce_dtype=…) instead" in sentences["sharded, compressed"]
    assert "use unit='batch'" in sentences["sharded, examples"]
    assert "process 0 of 1 for the sampler and 0 of 2 for FSDP" in sentences["sharded, alone"]
    assert "call set_requires_gradient_sync(True) before the last" in sentences["sharded, kept"]
    assert "set_gradient_divide_factor was called after sampler.attach" in sentences["sharded, divided"]
    assert "replaced or unfrozen after sampler.attach" in sentences["sharded, unfrozen"]
    assert len(found[2]["zeroed"][0]) == len(found[2]["divided"]["visited"][0][0])


def test_another_number_of_processes_is_refused_or_partitioned_anew(found, spawned):
    model = network()
    sampler = sampler_of().attach(model)
    state = loaded(spawned / "2" / "sharded", no_dist=True)  # that of FSDP is no other than that of DDP
    assert state.keys() == found[2]["resumed", "divided", 3]["state"].keys()
    with pytest.raises(CdgrabError, match="processes 2 there, 1 here"):
        sampler.load_state_dict(state)
    sampler.load_state_dict(state, repartition=True)
    assert sorted(number for batch in sampler for number in batch) == list(range(EXAMPLES))
