"""What every sparsifier must do."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from sparsify_checks import VARIANTS
from sparsify_oracles import as_sets, gradients_of

import cdgrab
from cdgrab.sparsify import SPARSIFIERS, SparseAverager, make_sparsifier, sparsifier_options
from cdgrab.sparsify.base import warming_up

CONFIGS = Path(__file__).parents[1] / "configs" / "sparsifier"
EXCLUSIVE = [case for case in VARIANTS if case[0] in ("exdyna", "micro", "deft")]


@pytest.mark.parametrize("variant", EXCLUSIVE, ids=str)
def test_workers_never_select_the_same_coordinate(variant):
    name, options = variant
    for workers, dim in ((5, 400), (8, 33), (1, 50), (6, 4)):
        found = make_sparsifier(name, workers=workers, dim=dim, density=0.1, **options)
        for gradients in gradients_of(25, workers, dim):
            found.reduce(torch.from_numpy(gradients))
            chosen = torch.cat(found.selected)
            assert len(chosen.unique()) == len(chosen)


@pytest.mark.parametrize("variant", [case for case in VARIANTS if "momentum_correction" not in case[1]], ids=str)
@given(
    st.integers(0, 1000),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 40),
    st.sampled_from([0.01, 0.2, 1.0]),
    st.integers(1, 6),
)
def test_updates_and_residuals_add_up_to_the_gradients(variant, seed, workers, dim, density, iterations):
    name, options = variant
    found = make_sparsifier(name, workers=workers, dim=dim, density=density, **options)
    # whole numbers: sums over up to 8 workers and their division are exact
    gradients = torch.from_numpy(np.random.default_rng(seed).integers(-9, 10, size=(iterations, workers, dim)) * 1.0)
    updates = sum(found.reduce(step) for step in gradients)
    left = found.state_dict()["per_worker"]["_residual"].sum(0) if name != "dense" else 0
    assert torch.equal(workers * updates + left, gradients.sum((0, 1)))


@given(
    st.sampled_from([case for case in VARIANTS if case[0] != "dense"]),
    st.integers(0, 1000),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([0.5, 0.75]),
    st.integers(0, 5),
    st.booleans(),
)
def test_momentum_is_kept_by_workers_until_it_is_sent(variant, seed, workers, factor, warm_up, masking):
    """Whatever is selected: the recursion of Deep Gradient Compression, exactly, on whole numbers. Not masked, momentum
    goes on where it was sent."""
    name, options = variant
    options = options | {"momentum_correction": factor, "warm_up_steps": warm_up, "momentum_masking": masking}
    found = make_sparsifier(name, workers=workers, dim=20, density=0.1, **options)
    momentum = owed = np.zeros((workers, 20))
    for gradients in np.random.default_rng(seed).integers(-9, 10, size=(6, workers, 20)) * 1.0:
        momentum = factor * momentum + gradients
        owed = owed + momentum
        update, union = found.reduce(torch.from_numpy(gradients)), sorted(set().union(*as_sets(found.selected)))
        assert np.array_equal(update.numpy()[union], owed[:, union].mean(0)) and update.count_nonzero() <= len(union)
        owed[:, union] = 0
        momentum[:, union] *= not masking
        state = found.state_dict()["per_worker"]
        assert np.array_equal(state["_residual"], owed) and np.array_equal(state["_momentum"], momentum)


@pytest.mark.parametrize("name", SPARSIFIERS)
@pytest.mark.parametrize("feedback", [True, False])
def test_gradients_are_the_callers_and_stay_what_they_are(name, feedback):
    options = {"error_feedback": feedback} if "error_feedback" in sparsifier_options(name) else {}
    found = make_sparsifier(name, workers=2, dim=40, density=0.2, **options)
    for gradients in torch.randn(3, 2, 40):
        before = gradients.clone()
        found.reduce(gradients)
        assert torch.equal(gradients, before)


def test_with_everything_sent_momentum_that_is_not_masked_is_the_optimisers():
    found = make_sparsifier("topk", workers=2, dim=6, density=1.0, momentum_correction=0.9, momentum_masking=False)
    weights = torch.nn.Parameter(torch.zeros(6))
    optimiser, ours = torch.optim.SGD([weights], lr=1.0, momentum=0.9), torch.zeros(6)
    for gradients in torch.randn(5, 2, 6):
        weights.grad = gradients.mean(0)
        optimiser.step()
        ours -= found.reduce(gradients)
    torch.testing.assert_close(ours, weights.detach())


@given(st.floats(1e-4, 1), st.floats(0, 1), st.integers(1, 50))
def test_the_density_falls_by_the_same_factor_in_every_step_of_the_warm_up(first, share, steps):
    density = max(1e-5, first * share)
    found = [warming_up(first, density, steps, step) for step in range(steps + 3)]
    assert found[0] == first and set(found[steps:]) == {density}
    assert np.diff(np.log(found[: steps + 1])) == pytest.approx(np.log(density / first) / steps, rel=1e-6, abs=1e-9)


def test_statistics_of_an_epoch_know_what_was_wanted_in_the_warm_up():
    options = {"density": 0.01, "warm_up_steps": 10, "warm_up_density": 0.2}
    mean, wanted = SparseAverager(make_sparsifier("cltk", workers=2, dim=1000, **options)), []
    for step in range(16):
        wanted.append(0.2 * 0.05 ** (min(step, 10) / 10))
        mean.average(torch.randn(2, 1000))
        assert mean.sparsifier.stats.density == max(1, int(1000 * wanted[-1] + 1e-6)) / 1000
        if step % 4 == 3:
            line, wanted = mean.epoch_means(), []
            assert line["build_up"] == pytest.approx(1, rel=0.05)
    assert line["density"] == 0.01 and line["build_up"] == 1


def test_time_stands_still_for_coordinates_that_are_held_back():
    found, place = make_sparsifier("topk", workers=2, dim=30, density=0.1, momentum_correction=0.9), slice(5, 12)
    gradients = torch.from_numpy(gradients_of(8, 2, 30))
    for step in gradients[:4]:
        found.reduce(step)
    before = found.state_dict()["per_worker"]
    for step in gradients[4:]:
        step[:, place] = 0
        with found.holding_back([place]):
            found.reduce(step)
    after = found.state_dict()["per_worker"]
    for name, values in after.items():
        assert values[:, place].any() and torch.equal(values[:, place], before[name][:, place])
        assert not torch.equal(values, before[name])


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_state_goes_on_where_it_was_taken(variant):
    name, options = variant
    settings = {"workers": 4, "dim": 300, "density": 0.05, **options}
    gradients = torch.from_numpy(gradients_of(24, 4, 300)).float()
    found = make_sparsifier(name, **settings)
    for step in gradients[:13]:
        found.reduce(step)
    stored = io.BytesIO()
    torch.save(found.state_dict(), stored)
    stored.seek(0)
    other = make_sparsifier(name, **settings)
    other.load_state_dict(torch.load(stored, weights_only=True))
    for step in gradients[13:]:
        assert torch.equal(found.reduce(step), other.reduce(step))
        assert as_sets(found.selected) == as_sets(other.selected) and found.stats == other.stats


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_zero_gradients_give_zero_updates_and_recovery(variant):
    name, options = variant
    found = make_sparsifier(name, workers=4, dim=1000, density=0.05, **options)
    zero = torch.zeros(4, 1000)
    for _ in range(12):
        assert not found.reduce(zero).any()
        assert found.stats.density <= (1 if name == "dense" else 0.2)
    for gradients in gradients_of(12, 4, 1000):
        update = found.reduce(torch.from_numpy(gradients).float())
    assert update.any() and update.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_keeps_the_type_of_the_gradients_and_their_buffer(dtype):
    found = make_sparsifier("exdyna", workers=2, dim=64, density=0.1)
    buffer = torch.randn(2, 64).to(dtype)
    kept = buffer.clone()
    update = found.reduce(buffer)
    assert update.dtype == dtype and torch.equal(buffer, kept)
    residual = found.state_dict()["per_worker"]["_residual"]
    buffer.zero_()
    assert torch.equal(found.state_dict()["per_worker"]["_residual"], residual)
    assert residual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["topk", "exdyna", "cltk"])
def test_what_16_bits_cannot_hold_stays_in_the_residuals(name, dtype):
    """Residuals pile up until they are beyond the range of float16, and averages have more digits than 16 bits hold."""
    found, owed, largest = make_sparsifier(name, workers=2, dim=8, density=0.125), torch.zeros(8).double(), 0.0
    for step in range(20):
        gradients = (4e4 + 1e3 * torch.randn(2, 8, generator=torch.Generator().manual_seed(step))).to(dtype)
        update = found.reduce(gradients)
        owed += gradients.double().mean(0) - update.double()
        largest = max(largest, float(update.abs().max()))
    residual = found.state_dict()["per_worker"]["_residual"].double().mean(0)
    torch.testing.assert_close(residual, owed, rtol=1e-6, atol=1.0)
    assert largest == torch.finfo(dtype).max if dtype == torch.float16 else largest > 66_000


def test_bytes_follow_the_formula():
    workers, dim, density = 8, 4000, 0.01
    found = make_sparsifier("exdyna", workers=workers, dim=dim, density=density, threshold="paper")
    for gradients in gradients_of(5, workers, dim):
        found.reduce(torch.from_numpy(gradients).float())
        counts = found.stats.counts
        formula = (workers - 1) * (1 + 4 + 4 * max(counts)) + 2 * (workers - 1) * 4 * sum(counts) // workers
        assert found.stats.bytes == formula
        assert found.stats.imbalance == pytest.approx(workers * max(counts) / sum(counts) - 1)
    dense = make_sparsifier("dense", workers=workers, dim=dim)
    dense.reduce(torch.randn(workers, dim))
    assert dense.stats.bytes == workers - 1 + 2 * (workers - 1) * 4 * dim // workers
    alone = make_sparsifier("exdyna", workers=1, dim=dim)
    alone.reduce(torch.randn(1, dim))
    assert alone.stats.bytes == 0


def test_every_sparsifier_has_a_yaml_that_builds_it_and_shows_all_options():
    library = {name for name, kind in SPARSIFIERS.items() if kind.__module__.startswith("cdgrab.")}
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == library
    for path in CONFIGS.glob("*.yaml"):
        config = OmegaConf.load(path)
        assert config.name == path.stem and set(config) - {"name", "density"} == set(sparsifier_options(path.stem))
        built, plain = make_sparsifier(workers=2, dim=100, **config), make_sparsifier(config.name, workers=2, dim=100)
        assert built._identity() == plain._identity(), "the yaml shows the defaults"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"error_feedback": False}])
def test_a_gradient_in_parts_gives_the_same_update_in_place(options, dtype):
    """Parts in another order than their places, one of them with other strides."""
    shapes = [(slice(12, 36), (2, 3, 2, 2)), (slice(40, 50), (10,)), (slice(0, 12), (3, 4)), (slice(36, 40), (4,))]
    whole, parts = (make_sparsifier("exdyna", workers=1, dim=50, density=0.2, **options) for _ in range(2))
    for step in range(4):
        gradient = torch.randn(50, generator=torch.Generator().manual_seed(step)).to(dtype)
        mine = [(place, gradient[place].clone().view(size)) for place, size in shapes]
        mine[0] = (mine[0][0], mine[0][1].to(memory_format=torch.channels_last))
        if step == 2:
            spoilt = [(place, part * torch.nan) for place, part in mine]
            with pytest.raises(cdgrab.CdgrabError, match="must be finite"):
                parts.reduce_parts(spoilt, dtype)
        parts.reduce_parts(mine, dtype)
        update = whole.reduce(gradient[None])
        assert update.any() and not update.all()
        for place, part in mine:
            assert torch.equal(part.flatten(), update[place])
    assert torch.equal(whole._residual, parts._residual) and whole.stats == parts.stats


def test_each_part_gets_what_its_own_type_can_hold():
    """Parameters in float16 beside others in float32: what is owed to them piles up beyond their range."""
    sparsifier = cdgrab.make_sparsifier("topk", workers=1, dim=3, density=0.4)
    given = sent = torch.zeros(3, dtype=torch.float64)
    for size in (1e6, 1e6, 1e6, 0.0, 0.0, 0.0):
        parts = [(slice(2, 3), torch.tensor([size / 17]).half()), (slice(0, 2), torch.tensor([0.0, size]))]
        given = given + torch.cat([parts[1][1], parts[0][1]])
        sparsifier.reduce_parts(parts, torch.float32)
        sent = sent + torch.cat([parts[1][1], parts[0][1]])
        assert torch.equal(sent + sparsifier._residual[0], given)
    assert torch.equal(sent, given)
