"""What PyTorch's hooks do, against plain loops in float64. test_sparsify_processes.py has the hooks themselves."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sparsify_checks import MATRICES, PEERS
from sparsify_oracles import gradients_of

import cdgrab
from cdgrab.sparsify import make_sparsifier


def made(name, options, dim, workers=4):
    shapes = {"shapes": MATRICES[dim]} if name == "powersgd" else {}
    return make_sparsifier(name, workers=workers, dim=dim, **shapes, **options)


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize(("rank", "factored"), [(1, [0, 2]), (4, [0])])
def test_power_sgd_is_one_step_of_the_power_iteration_for_each_matrix(rank, factored, feedback):
    """One worker and one matrix after the other. [5, 2, 5] has 5 rows of 10: factors of rank 4 would save nothing."""
    found, owed = made("powersgd", {"rank": rank, "error_feedback": feedback}, 1000), np.zeros((4, 1000))
    columns = dict(zip(factored, (q.numpy() for q in found._columns(torch.empty(0).double())), strict=True))
    for gradients in gradients_of(6, 4, 1000):
        update, start, numbers = found.reduce(torch.from_numpy(gradients)), 0, [0, 0]
        owed = owed + gradients
        for which, shape in enumerate(MATRICES[1000]):
            place = slice(start, start := start + int(np.prod(shape)))
            mean = owed[:, place].mean(0)
            if which in factored:
                own = owed[:, place].reshape(4, shape[0], -1)
                basis = np.linalg.qr(sum(matrix @ columns[which] for matrix in own))[0]
                columns[which] = sum(matrix.T @ basis for matrix in own) / 4
                mean = (basis @ columns[which].T).flatten()
                numbers = [numbers[0] + basis.size, numbers[1] + columns[which].size]
                owed[:, place] -= mean
            else:
                numbers[0] += len(mean)
                owed[:, place] = 0
            np.testing.assert_allclose(update[place], mean, rtol=1e-9, atol=1e-12)
        owed *= feedback
        assert found.stats.bytes == 3 + sum(2 * 3 * 8 * some // 4 for some in numbers) and found.stats.density == 1


@given(st.integers(0, 1000), st.integers(1, 4), st.sampled_from([1, 2, 3]))
def test_what_has_a_low_rank_is_sent_as_it_is_and_nothing_is_lost(seed, workers, rank):
    rng = np.random.default_rng(seed)
    found = make_sparsifier("powersgd", workers=workers, dim=12 * 30, shapes=[[12, 30]], rank=rank)
    rows, columns = rng.normal(size=(12, rank)), rng.normal(size=(workers, rank, 30))
    gradients = torch.from_numpy(np.stack([(rows @ own).flatten() for own in columns]))
    update = found.reduce(gradients)
    torch.testing.assert_close(update, gradients.mean(0), rtol=1e-7, atol=1e-7)
    more = torch.from_numpy(rng.normal(size=(workers, 360)))
    sent = workers * (update + found.reduce(more))
    left = found.state_dict()["per_worker"]["_residual"].sum(0)
    torch.testing.assert_close(sent + left, (gradients + more).sum(0), rtol=1e-9, atol=1e-9)


def test_half_precision_is_the_mean_of_rounded_gradients():
    found, gradients = made("fp16", {}, 1000), torch.from_numpy(gradients_of(1, 4, 1000)[0])
    gradients[0, 0] = 1e30  # beyond the range
    update, half = found.reduce(gradients), np.clip(gradients.numpy(), -65504, 65504).astype(np.float16)
    np.testing.assert_array_equal(update, half.astype(np.float64).mean(0).astype(np.float16))
    assert found.stats.bytes == 3 + 2 * 3 * 2 * 1000 // 4 and found.stats.counts == [1000] * 4


@pytest.mark.parametrize("case", PEERS, ids=str)
def test_states_refusals_and_parts(case):
    """A state goes on where it was taken, a refused call changes nothing, parts give what the whole gives."""
    whole, parts = (made(*case, 1000, workers=1) for _ in range(2))
    places = [(slice(800, 950), (150,)), (slice(0, 800), (25, 32)), (slice(950, 1000), (5, 2, 5))]
    for step, gradients in enumerate(torch.from_numpy(gradients_of(5, 1, 1000)).float()):
        mine = [(place, gradients[0, place].clone().view(shape)) for place, shape in places]
        with pytest.raises(cdgrab.CdgrabError, match="must be finite"):
            parts.reduce_parts([(place, part * torch.nan) for place, part in mine], torch.float32)
        parts.reduce_parts(mine, torch.float32)
        update = whole.reduce(gradients)
        assert all(torch.equal(part.flatten(), update[place]) for place, part in mine) and update.any()
        if step == 2:
            stored = io.BytesIO()
            torch.save(parts.state_dict(), stored)
            stored.seek(0)
            parts = made(*case, 1000, workers=1)
            parts.load_state_dict(torch.load(stored, weights_only=True))
    assert whole.stats == parts.stats and whole.iteration == 5


@pytest.mark.parametrize("case", PEERS, ids=str)
def test_zero_gradients_give_zero_updates_and_recovery(case):
    found = made(*case, 40)
    for _ in range(3):
        assert not found.reduce(torch.zeros(4, 40)).any()
    gradients = torch.from_numpy(gradients_of(8, 4, 40))
    updates = sum(found.reduce(step) for step in gradients)
    assert torch.nn.functional.cosine_similarity(updates, gradients.mean(1).sum(0), dim=0) > 0.7


REFUSED = [
    ("rank must be a whole number of at least 1", {"rank": 0}),
    ("shapes must have dim = 9 numbers together, got 8", {"shapes": [[2, 4]]}),
    ("shapes must be a list of lists", {"shapes": [9]}),
    ("a size in shapes must be", {"shapes": [[0], [9]]}),
    ("has no option momentum_correction; it takes error_feedback, rank, shapes", {"momentum_correction": 0.9}),
]


@pytest.mark.parametrize(("message", "options"), REFUSED)
def test_refusals_are_one_sentence(message, options):
    with pytest.raises(cdgrab.CdgrabError, match=message):
        make_sparsifier("powersgd", workers=2, dim=9, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nothing_is_lost_that_16_bits_cannot_hold(dtype):
    """Of each worker's gradients, what was not sent is still owed, to the precision of float32."""
    found, given_so_far, sent = made("powersgd", {"rank": 1}, 1000), 0.0, 0.0
    for gradients in gradients_of(6, 4, 1000):
        gradients = torch.from_numpy(gradients).to(dtype)
        given_so_far, sent = given_so_far + gradients.double(), sent + found.reduce(gradients).double()
    left = found.state_dict()["per_worker"]["_residual"].double()
    torch.testing.assert_close(4 * sent + left.sum(0), given_so_far.sum(0), rtol=1e-5, atol=1e-4)
