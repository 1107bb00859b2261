"""Hooks at whatever a model returns: `hooks.at_outputs` finds every tensor through which gradients go."""

from collections import OrderedDict, deque, namedtuple

import pytest
import torch
from torch import nn

from cdgrab.dropin.hooks import at_outputs

Pair = namedtuple("Pair", "first second")


class Scores(OrderedDict):
    """A dict with an attribute that hides a method."""

    values = None


KINDS = {
    "a tensor": lambda one, other: one,
    "a dict": lambda one, other: {"one": one, "name": "scores", "other": other},
    "a dict of its own kind": lambda one, other: Scores(one=one, other=[other]),
    "nested": lambda one, other: [(one, 3), {"more": (other, None)}],
    "a named tuple": Pair,
    "what pytree knows": lambda one, other: deque([one, (other, 0.5)]),
    "with one that has no gradient": lambda one, other: (one, other.detach(), torch.ones(2)),
    "nothing": lambda one, other: None,
}
FOUND = {"a tensor": 1, "with one that has no gradient": 1, "nothing": 0}  # all others: 2


class Returning(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.make, self.both = kind, ()

    def forward(self, inputs):
        self.both = 2 * inputs, 3 * inputs
        return self.make(*self.both)


@pytest.mark.parametrize("name", KINDS)
def test_every_output_that_has_a_gradient_is_hooked_once(name):
    model, called = Returning(KINDS[name]), []
    handle = at_outputs(model, called.append)
    model(torch.ones(2, requires_grad=True))
    sum(one.sum() for one in model.both).backward()
    assert [one.tolist() for one in called] == [[1.0, 1.0]] * FOUND.get(name, 2)
    handle.remove()
    model(torch.ones(2, requires_grad=True))
    sum(one.sum() for one in model.both).backward()
    assert len(called) == FOUND.get(name, 2)


def test_without_gradients_nothing_is_hooked():
    model, called = Returning(KINDS["a dict"]), []
    at_outputs(model, called.append)
    with torch.no_grad():
        output = model(torch.ones(2, requires_grad=True))
    assert not output["one"].requires_grad and not called
