"""What makes runs start quickly: steps are traced without PyTorch's compiler, and little is imported."""

import operator
import subprocess
import sys

import pytest
import torch
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from cdgrab.runtime.group import WorkerGroup
from experiments.store.files import ROOT
from experiments.tasks import make_task
from experiments.training.config import compose
from experiments.training.gradients import FlatParameters, gradient_function
from experiments.training.loop import alone
from experiments.training.tracing import recorded


def listed(graph):
    """Every node: what it calls, and on which others."""
    numbers = {node: number for number, node in enumerate(graph.graph.nodes)}
    targets = [node.target if callable(node.target) else None for node in numbers]
    arguments = [torch.fx.map_arg((node.args, node.kwargs), numbers.get) for node in numbers]
    return [(node.op, *rest) for node, *rest in zip(numbers, targets, arguments, strict=True)]


@pytest.mark.parametrize("settings", [["task=lr_hmda"], ["task=cifar10", "size=smoke"], ["task=mlp_m4", "workers=8"]])
def test_steps_are_recorded_as_make_fx_does(settings):
    run = compose(["data=embedded", *settings])
    cpu = torch.device("cpu")
    task = make_task(run.config, run.source, cpu)
    trainer = alone(run, task, WorkerGroup(run.config.workers), cpu)
    compute = gradient_function(task, FlatParameters(task.model), per_unit=True)
    inputs = trainer.loop.parameters, *task.fetch("train", trainer.owned[:, :2])
    with torch.no_grad():
        theirs = make_fx(compute)(*inputs)
    ours = recorded(compute, inputs)
    assert len(listed(ours)) > 30 and listed(ours) == listed(theirs)
    for one, other in zip(ours.graph.nodes, theirs.graph.nodes, strict=True):
        if isinstance(other.meta.get("val"), torch.Tensor):
            made, expected = one.meta["val"], other.meta["val"]
            assert (made.shape, made.stride(), made.dtype) == (expected.shape, expected.stride(), expected.dtype)


def test_constants_parts_and_changes_in_place_are_recorded():
    constant = torch.tensor([2.0, 3.0])

    def function(x, y):
        values, order = (x * constant).sort()
        values.add_(y).unsqueeze_(0)
        return values, order, vmap(grad(lambda v: (v * constant).sum()))(x[None])

    graph = recorded(function, (torch.tensor([5.0, 1.0]), torch.tensor([10.0, 20.0])))
    inputs = torch.tensor([1.0, 7.0]), torch.tensor([30.0, 40.0])
    for one, other in zip(graph(*inputs), function(*inputs), strict=True):
        assert torch.equal(one, other)
    assert operator.getitem in [node.target for node in graph.graph.nodes]


SLOW = [
    *("torch._dynamo", "torch.distributed.launcher", "sympy", "pandas", "matplotlib", "transformers", "tokenizers"),
    *("datasets", "IPython", "experiments.tasks.cifar10", "experiments.report"),
]


def test_a_run_imports_what_it_needs_and_no_more(tmp_path):
    """Each of these takes a tenth of a second to several seconds."""
    code = f"""
import sys
from experiments import launch
settings = ["data=embedded", "epochs=1", "task.limit=64", "run_dir={tmp_path / "run"}"]
assert launch.main(settings) == 0
print([name for name in {SLOW} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
