"""Sign rules, reordering, the compiled kernels against the plain loops, and the random streams behind the draws."""

import math
import types

import numpy as np
import pytest
import torch
from conftest import GRADIENT_AWARE, assert_independent, make, make_gradients, run
from hypothesis import given
from hypothesis import strategies as st

from cdgrab import CdgrabError, balance, kernels, reference, streams

DRAWS = 20_000
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
layouts = pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype)


def uniform(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).uniform(-1.0, 1.0, shape))


def make_rows(positions, workers, dim, dtype, strided):
    """Rows with a repeated pair and a zero row; strided as the sorters pass them: [workers, positions] transposed."""
    rows = normal(positions, workers, dim, dtype=dtype)
    rows[5], rows[7] = rows[4], 0.0
    return rows.transpose(0, 1).contiguous().transpose(0, 1) if strided else rows


def assert_close_to_frequency(frequency, probability):
    """Within four standard deviations; the draws are seeded, so this never flickers."""
    assert abs(frequency - probability) <= 4 * math.sqrt(probability * (1 - probability) / DRAWS)


# -- sign rules -------------------------------------------------------------------------------------------------------


def test_greedy_sign_opposes_the_running_sum_and_ties_go_to_plus():
    running = torch.tensor([1.0, -2.0])
    signs = [balance.greedy_sign(running, torch.tensor(v)) for v in ([1.0, 0.0], [0.0, 1.0], [2.0, 1.0], [0.0, 0.0])]
    assert signs == [-1, 1, 1, 1]


@pytest.mark.parametrize("share", [-0.9, -0.3, 0.0, 0.5, 1.0])
def test_walk_takes_plus_with_probability_half_minus_inner_over_twice_the_width(share):
    width, running, vector = 4.0, torch.tensor([2.0, 0.0]), torch.tensor([2.0 * share, 1.0])  # inner = share·width
    expected = 0.5 - share / 2
    draws = streams.symmetric_uniform(DRAWS, 0, "walk", 0, 0)
    signs = [balance.walk_sign(running, vector, width, float(u)) for u in draws]
    assert_close_to_frequency(signs.count(1) / DRAWS, expected)
    sums = running.double().repeat(DRAWS, 1)  # as many workers as draws: the kernel's limits follow the same law
    by_kernel = kernels.balance(vector.double().expand(1, DRAWS, 2).contiguous(), sums, width * draws[None])
    assert by_kernel[0].tolist() == signs


def test_walking_sorters_follow_the_same_law():
    """With differences a, b the second sign agrees with the first with probability 1/2 − ab/(2w)."""
    a, b, width = 2.0, 3.0, 10.0
    sorter = make("id_grab_pair", DRAWS, 4, 1, initial="identity", rule="walk", walk_width=width)
    new = run(sorter, torch.tensor([a, 0.0, b, 0.0]).expand(1, DRAWS, 4)[..., None])[1]
    first, second = new[:, 0] == 0, new[:, 1] == 2
    assert_close_to_frequency(float(first.double().mean()), 0.5)
    assert_close_to_frequency(float((first == second).double().mean()), 0.5 - a * b / (2 * width))


@pytest.mark.parametrize("running, vector", [([1.5, 1.5], [1.0, 1.0]), ([0.0, -3.0], [1.0, 0.0])])
def test_a_strict_walk_fails_beyond_its_width_and_a_lenient_one_goes_on(running, vector):
    running, vector = torch.tensor(running), torch.tensor(vector)
    with pytest.raises(CdgrabError, match="failed"):
        balance.walk_sign(running, vector, 2.0, 0.0, strict=True)
    assert balance.walk_sign(running, vector, 2.0, 0.9) == (1 if running @ vector <= 1.8 else -1)
    assert balance.walk_sign(running, vector, 3.0, 0.9, strict=True) in (1, -1)


def test_kh_threshold_and_penalties_by_hand():
    assert balance.kh_threshold(0.0, 4.0, 3.0) == (4.0, 8.0)  # rho = 0
    assert balance.kh_threshold(2.0, 6.0, 3.0) == (6.0, 12.0)  # rho = 1, still the first branch
    assert balance.kh_threshold(12.0, 1.0, 3.0) == (6.0, 12.0)  # rho = 36: max(3.5 − 6, 0) = 0
    assert balance.kh_threshold(3.0, 1.0, 3.0) == (3.0, 3.0 + 2.0 * 0.5 / 3.0)  # rho = 9: 3.5 − 3 = 0.5
    assert balance.kh_threshold(5.0, 0.0, 3.0) == (0.0, 5.0)  # equal gradients
    penalties = balance.kh_penalties(2, epoch=3, epochs=10, delta=0.25)
    inside = 16 * (math.log(10) + 1) * (math.log(2) + 1) * 3
    torch.testing.assert_close(penalties, torch.tensor([math.log(inside), math.log(2 * inside)], dtype=torch.float64))
    assert len(balance.kh_penalties(0, epoch=1, epochs=1)) == 0


# -- reordering -------------------------------------------------------------------------------------------------------


def test_reorder_by_hand():
    order = torch.tensor([[4, 2, 0, 1, 3], [0, 1, 2, 3, 4]])
    signs = torch.tensor([[1, -1, -1, 1, -1], [-1, -1, -1, -1, -1]], dtype=torch.int8)
    assert balance.reorder(order, signs).tolist() == [[4, 1, 3, 0, 2], [4, 3, 2, 1, 0]]
    pair_signs = torch.tensor([[1, -1], [-1, 1]], dtype=torch.int8)
    assert balance.reorder_pairs(order, pair_signs).tolist() == [[4, 1, 3, 0, 2], [1, 2, 4, 3, 0]]


@given(seed=st.integers(0, 2**32), workers=st.integers(1, 7), units=st.integers(1, 40))
def test_pair_form_equals_two_fingers_moving_inwards(seed, workers, units):
    rng = np.random.default_rng(seed)
    order = torch.from_numpy(np.stack([rng.permutation(units) for _ in range(workers)]))
    signs = torch.from_numpy(rng.choice([-1, 1], size=(workers, units // 2))).to(torch.int8)
    expected = [reference.place_pairs(*row) for row in zip(order.tolist(), signs.tolist(), strict=True)]
    assert balance.reorder_pairs(order, signs).tolist() == expected


# -- kernels ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def on_gpu():
    """(kernels.gpu, device): on a GPU, or on the CPU by Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if torch.cuda.is_available():
        yield kernels.gpu, "cuda"
        return
    from triton.runtime import interpreter

    patch_tensors = interpreter._patch_lang_tensor

    def with_numbers(tensor, scope):  # as loop bounds; Triton 3.6 converts arrays of one number, numpy 2.4 no longer
        patch_tensors(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", with_numbers)
        yield kernels.gpu, "cpu"


@pytest.fixture(params=["numba", "gram", "triton"])
def fast(request):
    """(module, device) of a fast version."""
    if request.param == "numba":
        return pytest.importorskip("cdgrab.kernels.cpu"), "cpu"
    if request.param == "gram":
        return kernels.gram, "cpu"
    return request.getfixturevalue("on_gpu")


def assert_same_by_both(fast, function, *arguments):
    """The fast and the plain version give the same signs and leave the same sums behind."""
    module, device = fast
    by_plain, by_fast = (
        [a.to(where).clone(memory_format=torch.preserve_format) for a in arguments] for where in ("cpu", device)
    )
    expected, signs = getattr(balance, function)(*by_plain), getattr(module, function)(*by_fast)
    assert signs.dtype == expected.dtype == torch.int8 and torch.equal(signs.cpu(), expected)
    assert 0.2 < (expected > 0).double().mean() < 0.8, "not a test if all signs are alike"
    for compiled, plain in zip(by_fast, by_plain, strict=True):
        torch.testing.assert_close(compiled.cpu(), plain, rtol=1e-12, atol=1e-12)


@dtypes
@layouts
@pytest.mark.parametrize("width", [0.0, 6.0], ids=["greedy", "walk"])
@pytest.mark.parametrize("sums", [1, 3], ids=["shared", "own"])
def test_fast_balance_equals_the_plain_loop(fast, dtype, strided, width, sums, monkeypatch):
    monkeypatch.setattr(kernels.gram, "ROWS_AT_ONCE", {"cpu": 32, "cuda": 32})  # several blocks, the last one short
    rows, limits = make_rows(40, 3, 19, dtype, strided), width * uniform(40, 3)
    assert_same_by_both(fast, "balance", rows, torch.zeros(sums, 19, dtype=torch.float64), limits)
    assert_same_by_both(fast, "balance", rows, normal(sums, 19, seed=1), limits)


@pytest.mark.parametrize("workers", [3, 8, 9])
@pytest.mark.parametrize("how", ["four rows at a time", "by threads", "divided"])
def test_long_rows_are_balanced_as_by_the_plain_loop(how, workers, monkeypatch):
    """Longer than a chunk of coordinates; in groups and blocks that are not always full."""
    compiled = pytest.importorskip("cdgrab.kernels.cpu")
    module = types.SimpleNamespace(balance=compiled.balance)
    if how == "by threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    elif how == "divided":
        monkeypatch.setattr(kernels.divided, "ROWS_AT_ONCE", 10)
        module.balance = lambda *arguments: kernels.balance_divided(*arguments, lambda products: products)
    rows, limits = make_rows(9, workers, compiled.CHUNK + 5, torch.float32, strided=True), 60.0 * uniform(9, workers)
    assert_same_by_both((module, "cpu"), "balance", rows, normal(1, rows.shape[2], seed=1), limits)


@dtypes
@layouts
@pytest.mark.parametrize("width", [0.0, 6.0], ids=["greedy", "walk"])
def test_fast_centred_balance_equals_the_plain_loop(fast, dtype, strided, width):
    running, stale_mean, fresh_sum = normal(3, 3, 19, seed=1)
    rows = make_rows(40, 3, 19, dtype, strided)
    assert_same_by_both(fast, "balance_centred", rows, running, stale_mean, fresh_sum, width * uniform(40, 3))


@dtypes
@layouts
def test_fast_kernel_halving_equals_the_plain_loop(fast, dtype, strided):
    rows, penalties = make_rows(40, 3, 19, dtype, strided), balance.kh_penalties(40, 2, 10)
    rows[20:] *= 0.03  # small rows after large ones: the branch with rho > 1
    q = torch.tensor([0.0, 1.0, 50.0], dtype=torch.float64)
    assert_same_by_both(fast, "balance_kh", rows, normal(3, 19, seed=1), q, penalties, uniform(40, 3))


@pytest.mark.parametrize("sums", [1, 3], ids=["shared", "own"])
def test_many_programs_balance_as_one(on_gpu, sums, monkeypatch):
    """Several coordinates' programs with several tiles each, several launches, a last block that is not full."""
    gpu, device = on_gpu
    monkeypatch.setattr(gpu, "MOST_BLOCKS", 2)
    small = gpu.Shape(16, gram_columns=16, gram_programs=6, columns=16, programs=4)
    rows, limits = make_rows(30, 3, 190, torch.float32, True), 9.0 * uniform(30, 3)
    running = normal(sums, 190, seed=1)
    mine = running.to(device, copy=True)
    signs = gpu.balance(rows.to(device), mine, limits.to(device), small)
    assert torch.equal(signs.cpu(), balance.balance(rows, running, limits))
    torch.testing.assert_close(mine.cpu(), running, rtol=1e-12, atol=1e-12)


def test_rows_that_cancel_are_ties_for_blocks_of_rows_too(on_gpu):
    """A zero row, then pairs of equal ones: the running sum is exactly zero after each. Blocks end inside a pair."""
    gpu, device = on_gpu
    rows = normal(100, 1, 23, dtype=torch.float32)
    rows[0], rows[2::2] = 0.0, rows[1:-1:2]
    for way, where in ((balance, "cpu"), (gpu, device)):
        limits = torch.zeros(100, 1, dtype=torch.float64, device=where)
        signs = way.balance(rows.to(where), torch.zeros(1, 23, dtype=torch.float64, device=where), limits)
        assert signs.flatten().tolist() == [1, *[1, -1] * 49, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("workers, dim", [(64, 62_006), (16, 1_080_000), (4, 7_000_000)])
def test_signs_on_a_gpu_are_those_of_float64_but_for_rounding_and_the_same_every_time(workers, dim):
    """Each is checked against the running sum that the earlier ones lead to."""
    rows = torch.randn(6, workers, dim, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    limits = torch.zeros(6, workers, dtype=torch.float64, device="cuda")
    sums = torch.zeros(2, 1, dim, dtype=torch.float64, device="cuda")
    signs, again = (kernels.balance(rows, running, limits) for running in sums)
    assert torch.equal(signs, again) and torch.equal(sums[0], sums[1])
    running = torch.zeros(dim, dtype=torch.float64, device="cuda")
    for row, sign in zip(rows.flatten(0, 1).double(), signs.flatten().tolist(), strict=True):
        inner = float(running @ row)
        assert sign == (1 if inner <= 0 else -1) or abs(inner) < 1e-6 * float(running.norm() * row.norm())
        running += sign * row
    torch.testing.assert_close(sums[0, 0], running, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sums", [1, 3], ids=["shared", "own"])
def test_plain_balance_applies_the_sign_rule_one_by_one(sums):
    rows, draws = normal(20, 3, 4), uniform(20, 3)
    running, by_hand = torch.zeros(sums, 4, dtype=torch.float64), torch.zeros(sums, 4, dtype=torch.float64)
    signs = balance.balance(rows, running, 2.0 * draws)
    for k in range(20):
        for w in range(3):
            r = by_hand[w % sums]
            sign = balance.walk_sign(r, rows[k, w], 2.0, float(draws[k, w]))
            assert sign == signs[k, w]
            r += sign * rows[k, w]
    assert torch.equal(running, by_hand)


@pytest.mark.parametrize("name", GRADIENT_AWARE)
def test_without_numba_the_plain_loops_give_the_same_orders(name, monkeypatch):
    gradients = make_gradients("random", 2, 3, 9, 5)
    expected = run(make(name, units=9), gradients, {4})
    monkeypatch.setattr(kernels, "cpu", None)
    assert torch.equal(run(make(name, units=9), gradients, {4}), expected)


# -- random streams ---------------------------------------------------------------------------------------------------


def test_streams_differ_by_seed_purpose_worker_and_epoch_and_repeat_themselves():
    keys = [(seed, purpose, w, e) for seed in (0, 1) for purpose in streams.PURPOSES for w in (0, 1) for e in (0, 1)]
    assert_independent([streams.permutation(500, *key) for key in keys])
    assert torch.equal(streams.permutation(500, *keys[0]), streams.permutation(500, *keys[0]))


def test_walk_draws_are_uniform_on_minus_one_to_one_and_uncorrelated_across_workers_and_epochs():
    draws = torch.stack([streams.symmetric_uniform(DRAWS, 0, "walk", w, e) for w in range(3) for e in range(3)])
    assert draws.min() >= -1 and draws.max() < 1
    moments = torch.stack([draws.mean(1), draws.pow(2).mean(1) - 1 / 3])
    assert moments.abs().max() < 4 / math.sqrt(DRAWS)
    assert (torch.corrcoef(draws) - torch.eye(9)).abs().max() < 4 / math.sqrt(DRAWS)


def test_numba_without_a_place_for_compiled_code_is_no_obstacle(monkeypatch):
    assert kernels.cpu.can_keep_code()
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])  # none of its places can be written
    assert not kernels.cpu.can_keep_code()
