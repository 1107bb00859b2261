"""What every sparsifier refuses: bad gradients, settings and states, in one sentence and without a trace."""

import math

import pytest
import torch
from sparsify_checks import VARIANTS
from sparsify_oracles import gradients_of

import cdgrab
from cdgrab.runtime.group import WorkerGroup
from cdgrab.sparsify import ddp_hook, make_sparsifier
from scripts.fuzz.gradients import given_back


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_refused_gradients_change_nothing(variant):
    name, options = variant
    settings = {"workers": 2, "dim": 40, "density": 0.1, **options}
    found, undisturbed = make_sparsifier(name, **settings), make_sparsifier(name, **settings)
    for step in torch.from_numpy(gradients_of(8, 2, 40)):
        for bad in (math.nan, math.inf):
            spoilt = step.clone()
            spoilt[1, 7] = bad
            with pytest.raises(cdgrab.CdgrabError, match="finite"):
                found.reduce(spoilt)
        with pytest.raises(cdgrab.CdgrabError, match=r"shape \[workers, dim\] = \[2, 40\]"):
            found.reduce(step[:1])
        for bad in (given_back(step), given_back(step, 8), step.to("meta"), step.to_sparse()):
            with pytest.raises(cdgrab.CdgrabError, match="a dense tensor .* in memory"):
                found.reduce(bad)
        assert torch.equal(found.reduce(step), undisturbed.reduce(step))


def tampered(name, value, change):
    """Load a state with one value changed."""
    settings = {"workers": 2, "dim": 9, "density": 0.3, "momentum_correction": 0.9}
    found = make_sparsifier(name, **settings)
    found.reduce(torch.randn(2, 9))
    state = found.state_dict()
    part = next(part for part in (state, state["per_worker"], state["common"]) if value in part)
    part[value] = change(part[value])
    make_sparsifier(name, **settings).load_state_dict(state)


TAMPERED = [
    ("topk", "_residual", lambda residual: residual[:, :3]),
    ("topk", "_residual", lambda residual: residual * torch.nan),
    ("topk", "iteration", lambda iteration: -1),
    ("topk", "_momentum", lambda momentum: momentum[:, :3]),
    ("exdyna", "_runs", lambda runs: [runs[0] + 1, *runs[1:]]),
    ("exdyna", "_loads", lambda loads: loads[:2]),
    ("exdyna", "_value", lambda value: float("nan")),
    ("exdyna", "_counted_at", lambda when: 10**9),
    ("sidco", "_stages", lambda stages: stages * 10**9),
    ("sidco", "_direction", torch.zeros_like),
]


@pytest.mark.parametrize("name, value, change", TAMPERED)
def test_a_tampered_state_is_refused(name, value, change):
    with pytest.raises(cdgrab.CdgrabError, match=f"damaged: {value} must be"):
        tampered(name, value, change)


REFUSED = [
    ("unknown sparsifier 'best'", lambda: make_sparsifier("best", workers=2, dim=3)),
    ("has no option blocks; it takes error_feedback", lambda: make_sparsifier("topk", workers=2, dim=3, blocks=4)),
    ("it takes none", lambda: make_sparsifier("dense", workers=2, dim=3, error_feedback=True)),
    ("density must be", lambda: make_sparsifier("topk", workers=2, dim=3, density=0)),
    ("density must be", lambda: make_sparsifier("topk", workers=2, dim=3, density=1.5)),
    ("dim must be", lambda: make_sparsifier("topk", workers=2, dim=0)),
    ("workers must be", lambda: make_sparsifier("topk", workers=0, dim=3)),
    ("group has 4 workers", lambda: make_sparsifier("topk", workers=2, dim=3, group=WorkerGroup(4))),
    ("rule must be", lambda: make_sparsifier("exdyna", workers=2, dim=3, rule="none")),
    ("threshold must be", lambda: make_sparsifier("exdyna", workers=2, dim=3, threshold=0.1)),
    ("blocks must be", lambda: make_sparsifier("exdyna", workers=2, dim=3, blocks=0)),
    ("faithful must be", lambda: make_sparsifier("exdyna", workers=2, dim=3, faithful="yes")),
    ("got rule=static", lambda: make_sparsifier("exdyna", workers=2, dim=10**5, rule="static", faithful=True)),
    ("32 coordinates for each of 1024", lambda: make_sparsifier("exdyna", workers=2, dim=32_767, faithful=True)),
    ("error_feedback must be", lambda: make_sparsifier("topk", workers=2, dim=3, error_feedback="yes")),
    ("momentum_correction must be", lambda: make_sparsifier("topk", workers=2, dim=3, momentum_correction=1.0)),
    (
        "momentum_masking=false needs momentum_correction",
        lambda: make_sparsifier("topk", workers=2, dim=3, momentum_masking=False),
    ),
    (
        "momentum_correction needs error_feedback",
        lambda: make_sparsifier("topk", workers=2, dim=3, momentum_correction=0.9, error_feedback=False),
    ),
    ("warm_up_steps must be", lambda: make_sparsifier("topk", workers=2, dim=3, warm_up_steps=-1)),
    (
        "warm_up_density must be at least density = 0.5, got 0.25",
        lambda: make_sparsifier("topk", workers=2, dim=3, density=0.5, warm_up_steps=1),
    ),
    (
        "leave out value or warm_up_steps",
        lambda: make_sparsifier("hard_threshold", workers=2, dim=3, value=1.0, warm_up_steps=1),
    ),
    (
        "another sparsifier: momentum_correction None there, 0.9 here",
        lambda: make_sparsifier("topk", workers=2, dim=3, momentum_correction=0.9).load_state_dict(
            make_sparsifier("topk", workers=2, dim=3).state_dict()
        ),
    ),
    ("value must be", lambda: make_sparsifier("hard_threshold", workers=2, dim=3, value=-1.0)),
    ("layers must sum to dim = 3", lambda: make_sparsifier("deft", workers=2, dim=3, layers=[1, 1])),
    ("floating-point", lambda: make_sparsifier("topk", workers=2, dim=3).reduce(torch.ones(2, 3, dtype=torch.long))),
    ("unknown sparsifier", lambda: make_sparsifier(["topk"], workers=2, dim=3)),
    ("unknown sorter", lambda: cdgrab.make_sorter(["cd_grab"], workers=2, units=3, dim=3)),
    ("not the state", lambda: make_sparsifier("topk", workers=2, dim=3).load_state_dict({})),
    ("needs a DistributedDataParallel model", lambda: ddp_hook(torch.nn.Linear(2, 2), "topk")),
    (
        "another sparsifier: dim 4 there, 3 here",
        lambda: make_sparsifier("topk", workers=2, dim=3).load_state_dict(
            make_sparsifier("topk", workers=2, dim=4).state_dict()
        ),
    ),
]


@pytest.mark.parametrize("message, call", REFUSED, ids=[message for message, _ in REFUSED])
def test_refusals_are_one_sentence(message, call):
    with pytest.raises(cdgrab.CdgrabError, match=message) as refused:
        call()
    assert "\n" not in str(refused.value)
