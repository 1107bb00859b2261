"""Sections of a model, each with a sparsifier of its own, sent early. test_sparsify_processes.py trains with them."""

import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cdgrab.errors import NotFiniteError
from cdgrab.runtime.group import WorkerGroup
from scripts.bench import sections
from scripts.bench.sections import SectionedHook, sections_of


def parameters(sizes):
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 8))
def test_sections_are_all_parameters_from_the_last_one_on_and_about_equally_large(sizes, number):
    every = parameters(sizes)
    found = sections_of(every, number)
    assert [id(p) for section in reversed(found) for p in section] == [id(p) for p in every]
    assert all(found) and len(found) <= number
    assert all(sum(p.numel() for p in section) <= sum(sizes) / number + max(sizes) for section in found)


class Bucket(SimpleNamespace):
    """What DDP hands over."""

    def __init__(self, index, last, parameters, gradients):
        super().__init__(index=lambda: index, is_last=lambda: last, parameters=lambda: parameters)
        self.gradients, self.buffer = lambda: gradients, lambda: gradients[0]


SIZES = [30, 40, 50, 60]  # the sections of 3 are 60, 50, and 40 with 30


@pytest.fixture
def made(monkeypatch):
    """A hook, one like it whose sparsifiers are called one by one, and the call that DDP would make at the end."""
    ends = []
    monkeypatch.setattr(sections, "after_backward", ends.append)
    hook, alone = (SectionedHook(parameters(SIZES), "exdyna", WorkerGroup(1), 3, density=0.1) for _ in range(2))
    every = [p for section in reversed(hook.sections) for p in section.parameters]
    return hook, alone, every, ends


def hand_over(hook, every, grouped, gradients):
    """Buckets of these parameters, by number, one after the other, as DDP does it."""
    for index, some in enumerate(grouped):
        bucket = Bucket(index, index + 1 == len(grouped), [every[i] for i in some], [gradients[i] for i in some])
        yield hook.communicate(bucket)


@pytest.mark.parametrize("grouped", [[[3, 0], [1, 2]], [[2], [1, 3], [0]], [[0, 1, 2, 3]]])
def test_buckets_of_any_kind_give_what_each_section_gives_by_itself(made, grouped):
    hook, alone, every, ends = made
    for step in range(3):
        gradients = list(torch.randn(180, generator=torch.Generator().manual_seed(step)).split(SIZES))
        expected = [part.clone() for part in gradients]
        for sparsifier, some in zip(alone.sparsifiers, ([3], [2], [0, 1]), strict=True):
            update = sparsifier.reduce(torch.cat([expected[i] for i in some])[None])
            for i, part in zip(some, update.split([SIZES[i] for i in some]), strict=True):
                expected[i] = part
        for promise in list(hand_over(hook, every, grouped, gradients)):
            promise.wait()
        assert all(map(torch.equal, gradients, expected))
        assert hook.stats.density == pytest.approx(torch.cat(expected).count_nonzero().item() / 180)
        assert hook.stats.bytes == sum(one.stats.bytes for one in alone.sparsifiers)
        ends.pop()()
    assert not ends, "one call for each backward pass"


def test_a_section_is_sent_before_the_next_bucket_comes_and_in_its_turn(made):
    hook, _, every, _ = made
    sent = []
    for number, section in enumerate(hook.sections):
        section.reduce = lambda number=number: sent.append((number, threading.current_thread()))
    gradients = list(torch.ones(180).split(SIZES))
    handed = hand_over(hook, every, [[3], [0, 1], [2]], gradients)
    next(handed).wait()
    assert [number for number, _ in sent] == [0] and sent[0][1] is not threading.main_thread()
    second = next(handed)
    assert not second.done(), "the section before its own is not there"
    next(handed).wait()
    second.wait()
    assert [number for number, _ in sent] == [0, 1, 2]


def test_after_a_failure_nothing_more_is_sent_and_the_backward_pass_fails(made):
    hook, _, every, ends = made
    gradients = list(torch.ones(180).split(SIZES))
    gradients[2] = gradients[2] * torch.nan
    for promise in list(hand_over(hook, every, [[3], [2], [0, 1]], gradients)):
        promise.wait()
    assert [one.iteration for one in hook.sparsifiers] == [1, 0, 0]
    assert gradients[3].isfinite().all() and all(gradients[i].isnan().all() for i in (0, 1, 2))
    with pytest.raises(NotFiniteError):
        ends.pop()()
    for promise in list(hand_over(hook, every, [[3], [2], [0, 1]], list(torch.ones(180).split(SIZES)))):
        promise.wait()
    ends.pop()()
    assert [one.iteration for one in hook.sparsifiers] == [2, 1, 1]
