"""The drop-in sampler with DDP on 2 and 4 processes, against the same training by hand in this one."""

import pytest
import torch
from dropin_cases import EXAMPLES, dataset, gradient, network, sorted_alone
from dropin_checks import CASES, sampler_of
from process_runs import PROCESSES
from torch import nn

from cdgrab import CdgrabError

ORDERED = [name for name in CASES if name not in ("examples", "oblivious")]


@pytest.fixture(scope="module")
def found(spawned):
    """What `dropin_checks` saved, by number of processes."""
    return {n: torch.load(spawned / str(n) / "dropin", weights_only=False) for n in PROCESSES}


def by_hand(visited, accumulate):
    """The same batches, gradients averaged here: unit gradients [epochs, workers, units, dim] and the last weights."""
    model = network()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    _, inputs, labels = dataset().tensors
    gradients = []
    for epoch in zip(*visited, strict=True):
        gradients.append([])
        for first in range(0, len(epoch[0]), accumulate):
            rows = []
            for batches in epoch:
                model.zero_grad()
                for batch in batches[first : first + accumulate]:
                    nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
                rows.append(gradient(model))
            gradients[-1].append(torch.stack(rows))
            mean, start = torch.stack(rows).mean(0), 0
            for parameter in model.parameters():
                parameter.grad = mean[start : start + parameter.numel()].view_as(parameter).clone()
                start += parameter.numel()
            optimiser.step()
        gradients[-1] = torch.stack(gradients[-1], dim=1)
    return torch.stack(gradients), torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("name", [name for name in ORDERED if name not in ("bf16", "exdyna")])
def test_orders_equal_the_suites_and_weights_those_of_averaging_by_hand(found, processes, name):
    result, (_, options, _, accumulate) = found[processes][name], CASES[name]
    gradients, weights = by_hand(result["visited"], accumulate)
    sketch = {key: value for key, value in options.items() if key.startswith("sketch")}
    orders = sorted_alone(gradients, **sketch)
    for worker, units in enumerate(result["units"]):
        expected = [[batch for unit in order for batch in units[unit]] for order in orders[:, worker].tolist()]
        assert result["visited"][worker] == expected
    torch.testing.assert_close(result["weights"], weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("name", ["bf16", "exdyna", "examples", "oblivious"])
def test_other_ways_to_average_train_as_well(found, processes, name):
    """Compressed or sparse, the result is near the exact one or at least lower in loss than at the start; every example
    is visited in every epoch."""
    result = found[processes][name]
    for epoch in zip(*result["visited"], strict=True):
        assert {number for batches in epoch for batch in batches for number in batch} == set(range(EXAMPLES))
    assert result["visited"][0][0] != result["visited"][0][1]
    _, exact = by_hand(result["visited"], 1)
    tolerance = {"bf16": 2e-2, "exdyna": 0.5}.get(name, 1e-12)
    torch.testing.assert_close(result["weights"], exact, rtol=0, atol=tolerance)
    assert name in ("examples", "oblivious") or not torch.equal(result["weights"], exact)


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("stop_after", [3, 6])
def test_resumes_mid_epoch_bit_by_bit(found, processes, stop_after):
    whole, resumed = found[processes]["divided"], found[processes]["resumed", stop_after]
    for mine, theirs in zip(whole["visited"], resumed["visited"], strict=True):
        assert sum(mine, []) == theirs
    assert torch.equal(whole["weights"], resumed["weights"])


@pytest.mark.parametrize("processes", PROCESSES)
def test_refusals_name_the_way_out(found, processes):
    sentences = found[processes]["refused"]
    assert "is not wrapped in DistributedDataParallel" in sentences["not wrapped"]
    assert "takes only one" in sentences["two hooks"]
    assert "accumulation_steps=2" in sentences["accumulated"]


def test_another_number_of_processes_is_refused_or_partitioned_anew(found):
    model = network()
    sampler = sampler_of().attach(model)
    state = found[2]["resumed", 3]["state"]
    with pytest.raises(CdgrabError, match="processes 2 there, 1 here"):
        sampler.load_state_dict(state)
    sampler.load_state_dict(state, repartition=True)
    assert sorted(number for batch in sampler for number in batch) == list(range(EXAMPLES))
