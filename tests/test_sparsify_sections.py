"""Sections of a model, each with a sparsifier of its own. test_sparsify_processes.py trains with them."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cdgrab.errors import CdgrabError
from cdgrab.runtime.group import WorkerGroup
from cdgrab.sparsify import sparsifier_of
from cdgrab.sparsify.sections import Section, SectionedHook, sections_of

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=20)


def parameters(sizes):
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


def hook_of(sizes, number, **options):
    parts = sections_of(parameters(sizes), number)
    return SectionedHook([Section(part, sparsifier_of(part, "exdyna", WorkerGroup(1), **options)) for part in parts])


@given(SIZES, st.integers(1, 8))
def test_sections_are_all_parameters_from_the_last_one_on_and_about_equally_large(sizes, number):
    every = parameters(sizes)
    sections = sections_of(every, number)
    assert [id(p) for section in reversed(sections) for p in section] == [id(p) for p in every]
    assert all(sections) and len(sections) <= number
    assert all(sum(p.numel() for p in section) <= sum(sizes) / number + max(sizes) for section in sections)


def test_buckets_of_any_kind_give_what_each_section_gives_by_itself():
    """A bucket is done when all sections are that have a part in it, and those are sent in one order."""
    sizes = [30, 40, 50, 60]
    hook, alone = hook_of(sizes, 3, density=0.1), hook_of(sizes, 3, density=0.1)
    own = [list(section._parameters) for section in hook._sections]
    everything = [p for section in reversed(own) for p in section]
    for step, grouped in enumerate(([[3, 0], [1, 2]], [[2], [1, 3], [0]], [[0, 1, 2, 3]])):
        torch.manual_seed(step)
        gradients = {id(p): torch.randn(p.shape) for p in everything}
        expected = []
        for section, sparsifier in zip(own, alone.sparsifiers, strict=True):
            expected.append(sparsifier.reduce(torch.cat([gradients[id(p)] for p in section])[None]))
        promises = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cdgrab.sparsify.sections.after_backward", lambda call: None)
            for index, some in enumerate(grouped):
                theirs = [everything[i] for i in some]
                promises.append(hook.communicate(Bucket(index, theirs, [gradients[id(p)] for p in theirs])))
        for promise in promises:
            promise.wait()
        for section, update in zip(own, expected, strict=True):
            assert torch.equal(torch.cat([gradients[id(p)] for p in section]), update)
        assert hook.stats.density == pytest.approx(sum(u.count_nonzero().item() for u in expected) / 180)
        assert hook.stats.bytes == sum(one.stats.bytes for one in alone.sparsifiers)


class Bucket(SimpleNamespace):
    """What DDP hands over."""

    def __init__(self, index, parameters, gradients):
        super().__init__(index=lambda: index, parameters=lambda: parameters, gradients=lambda: gradients)
        self.buffer = lambda: gradients[0]


def test_a_state_of_other_sections_is_refused_and_changes_nothing():
    hook, other = hook_of([30, 40, 50], 3), hook_of([30, 40, 50], 2)
    with pytest.raises(CdgrabError, match="not the state of a hook with 3 sections"):
        hook.load_state_dict(other.state_dict())
    with pytest.raises(CdgrabError, match="not the state of a hook with 3 sections"):
        hook.load_state_dict(other.sparsifiers[0].state_dict())
    hook.sparsifiers[0].reduce(torch.ones(1, 50))
    before, later = hook.state_dict(), hook_of([30, 40, 50], 3)
    spoilt = {"sections": [before["sections"][0], before["sections"][1], before["sections"][0]]}
    with pytest.raises(CdgrabError):
        later.load_state_dict(spoilt)
    assert [one.iteration for one in later.sparsifiers] == [0, 0, 0]
    later.load_state_dict(before)
    assert [one.iteration for one in later.sparsifiers] == [1, 0, 0]


def test_parameters_that_may_not_be_used_are_refused():
    model = SimpleNamespace(find_unused_parameters=True)
    with pytest.raises(CdgrabError, match="sections=1 is all that goes with find_unused_parameters=True"):
        hook_of([30, 40], 2).register(model)
