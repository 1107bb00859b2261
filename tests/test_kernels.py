"""The compiled kernels against the plain loops: same signs, same sums; and what happens where they are missing."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import dtypes, long_rows_by
from sorter_cases import normal, uniform
from torch.overrides import TorchFunctionMode

from cdgrab.balance import kernels
from cdgrab.balance import rules as balance
from cdgrab.errors import CdgrabError
from experiments.store.files import ROOT

layouts = pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
rules = pytest.mark.parametrize("width", [0.0, 6.0], ids=["greedy", "walk"])


def make_rows(positions, workers, dim, dtype, strided):
    """Rows with a repeated pair and a zero row; strided as the sorters pass them: [workers, positions] transposed."""
    rows = normal(positions, workers, dim, dtype=dtype)
    rows[5], rows[7] = rows[4], 0.0
    return rows.transpose(0, 1).contiguous().transpose(0, 1) if strided else rows


@pytest.fixture(params=["numba", "gram", "triton"])
def fast(request):
    """(module, device) of a fast version."""
    if request.param == "numba":
        return kernels.optional("cpu"), "cpu"
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
@rules
@pytest.mark.parametrize("sums", [1, 3], ids=["shared", "own"])
def test_fast_balance_equals_the_plain_loop(fast, dtype, strided, width, sums, monkeypatch):
    monkeypatch.setattr(kernels.gram, "ROWS_AT_ONCE", {"cpu": 32, "cuda": 32})  # several blocks, the last one short
    rows, limits = make_rows(25, 3, 19, dtype, strided), width * uniform(25, 3)
    running = normal(sums, 19, seed=1) if width else torch.zeros(sums, 19, dtype=torch.float64)
    assert_same_by_both(fast, "balance", rows, running, limits)


@dtypes
@given(copied=st.integers(1, 400), most=st.integers(1, 30), sums=st.sampled_from([1, 3]))
def test_blocks_of_rows_are_decided_in_parts_as_whole(dtype, copied, most, sums):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.gram, "COPIED", copied)
        patch.setattr(kernels.gram, "MOST_PARTS", most)
        rows, limits = make_rows(25, 3, 19, dtype, True), 6.0 * uniform(25, 3)
        assert_same_by_both((kernels.gram, "cpu"), "balance", rows, normal(sums, 19, seed=1), limits)


def test_copies_of_rows_stay_small(monkeypatch):
    monkeypatch.setattr(kernels.gram, "COPIED", 500)
    sizes = []

    class Copies(TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), options=None):
            found = function(*arguments, **options or {})
            if isinstance(found, torch.Tensor) and found.dtype == torch.float64:
                sizes.append(found.numel())
            return found

    rows, running = normal(6, 2, 1000).float(), torch.zeros(1, 1000, dtype=torch.float64)
    with Copies():
        kernels.gram.balance(rows, running, torch.zeros(6, 2, dtype=torch.float64))
    assert max(sizes) <= 1000 and running.any()  # the 12 rows together have 12,000
    for sums, count, dim in [(1, 8, 0), (1, 1, 2**22), (1, 4, 2**25), (3, 256, 70_000), (2, 64, 19)]:
        parts = kernels.gram._parts(torch.empty(sums, count, dim, device="meta"))
        width = max(len(range(dim)[part]) for part in parts)
        assert sum(len(range(dim)[part]) for part in parts) == dim and len(parts) <= kernels.gram.MOST_PARTS
        assert sums * count * width <= max(kernels.gram.COPIED, sums * count * -(-dim // kernels.gram.MOST_PARTS))


def test_rows_may_have_more_than_2_31_coordinates(on_gpu):
    """Of which the first are looked at here."""
    gpu, device = on_gpu
    ones, products = torch.ones(16, device=device), torch.zeros(1, 2, dtype=torch.float64, device=device)
    running, sizes = torch.ones(16, dtype=torch.float64, device=device), {"COLUMNS": 16, "VECTOR": 4}
    gpu.single._multiply_row_kernel[(1, 1, 1)](ones, running, products, 2**29, 1, **sizes)
    assert products.tolist() == [[16.0, 16.0]]


@pytest.mark.parametrize(("dim", "dtype", "width"), [(5, torch.float64, 6.0), (37, torch.float32, 0.0)])
def test_rows_one_by_one_are_balanced_as_by_the_plain_loop(on_gpu, dim, dtype, width, monkeypatch):
    """What is not finite counts as zero."""
    gpu, device = on_gpu
    monkeypatch.setattr(gpu.single, "MOST_COLUMNS", 16)
    monkeypatch.setattr(gpu.single, "MOST_PROGRAMS", 2)
    rows, limits = make_rows(12, 1, dim, dtype, False).to(device), width * uniform(12, 1).to(device)
    rows[3, 0, 2], rows[8, 0, :2] = torch.nan, torch.tensor([torch.inf, -torch.inf])
    running, signs = torch.zeros(1, dim, dtype=torch.float64, device=device), torch.zeros(12, 1, dtype=torch.int8)
    expected, signs = running.clone(), signs.to(device)
    decide = gpu.RowByRow(running, limits, signs)
    for index, row in enumerate(rows):
        decide(row[None], index)
    assert torch.equal(signs, balance.balance(rows.nan_to_num(0.0, 0.0, 0.0), expected, limits))
    torch.testing.assert_close(running, expected, rtol=1e-12, atol=1e-12)


@rules
@pytest.mark.parametrize("workers", [3, 8])
@pytest.mark.parametrize(
    ("how", "dim", "dtype"),
    [
        *[("four rows at a time", dim, dtype) for dim in (600, 2**13 + 5) for dtype in (torch.float32, torch.float64)],
        ("by threads", 2**13 + 5, torch.float32),
        *[("divided", 2**13 + 5, dtype) for dtype in (torch.float32, torch.float64)],
    ],
)
def test_long_rows_are_balanced_as_by_the_plain_loop(how, dim, dtype, workers, width, monkeypatch):
    """Longer than a chunk of coordinates; in groups and blocks that are not always full."""
    rows, limits = make_rows(9, workers, dim, dtype, strided=True), 10 * width * uniform(9, workers)
    assert_same_by_both((long_rows_by(how, monkeypatch), "cpu"), "balance", rows, normal(1, dim, seed=1), limits)


@dtypes
@layouts
@rules
def test_fast_centred_balance_equals_the_plain_loop(fast, dtype, strided, width):
    running, stale_mean, fresh_sum = normal(3, 3, 19, seed=1)
    rows = make_rows(25, 3, 19, dtype, strided)
    assert_same_by_both(fast, "balance_centred", rows, running, stale_mean, fresh_sum, width * uniform(25, 3))


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
    rows, limits = make_rows(14, 3, 120, torch.float32, True), 9.0 * uniform(14, 3)
    running = normal(sums, 120, seed=1)
    mine = running.to(device, copy=True)
    signs = gpu.balance(rows.to(device), mine, limits.to(device), small)
    assert torch.equal(signs.cpu(), balance.balance(rows, running, limits))
    torch.testing.assert_close(mine.cpu(), running, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
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


# -- without numba or Triton ----------------------------------------------------------------------------------------


ORDERS = """
import sys, warnings
sys.path[:0] = sys.argv[2:]
if sys.argv[1] == "blocked":
    sys.modules.update(numba=None, triton=None)  # importing them then fails, as where they are not installed
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    import torch
    import cdgrab, experiments.studies.problems
    from cdgrab.balance import kernels
    if sys.argv[1] == "blocked":
        assert not any(map(kernels.optional, ("cpu", "divided", "gpu")))
    for name in sorted(cdgrab.SORTERS):
        sorter = cdgrab.make_sorter(name, workers=3, units=9, dim=5, seed=5)
        for epoch in range(2):
            sorter.order(epoch)
            generator = torch.Generator().manual_seed(epoch)
            sorter.observe(range(9), torch.randn(3, 9, 5, dtype=torch.float64, generator=generator))
        print(name, sorter.order(2).tolist())
    rows = torch.randn(100, 2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for balance in (kernels.gram.balance, kernels.balance_divided):
        running, limits = torch.zeros(1, 7, dtype=torch.float64), torch.zeros(100, 2, dtype=torch.float64)
        print(balance(rows, running, limits).flatten().tolist(), [f"{x:.9f}" for x in running[0].tolist()])
print(*[w.message for w in warned if "is not installed" in str(w.message)], sep="\\n", file=sys.stderr)
"""


def test_without_numba_and_triton_orders_are_the_same_and_a_warning_comes_once(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["-c", "installed"])
    exec(ORDERS, {})
    installed = capsys.readouterr()
    assert "cd_grab [[" in installed.out and "not installed" not in installed.err
    command = [sys.executable, "-c", ORDERS, "blocked", str(ROOT)]
    blocked = subprocess.run(command, capture_output=True, text=True, check=True)
    assert blocked.stdout == installed.out
    warned = [line for line in blocked.stderr.splitlines() if line.startswith("numba is not installed")]
    assert len(warned) == len(set(warned)) == 2  # plain loops, and blocks of rows


def test_numba_is_loaded_with_pythons_own_print(monkeypatch):
    """It fails to load where a script has put another function there, as that of torchvision does."""
    seen, own = [], print
    monkeypatch.setattr("builtins.print", lambda *_: None)
    monkeypatch.setattr("importlib.import_module", lambda _: seen.append(print))
    kernels.optional("cpu")
    assert seen == [own] and print is not own


def test_numba_without_a_place_for_compiled_code_is_no_obstacle(monkeypatch):
    assert kernels.optional("cpu").can_keep_code()
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])  # none of its places can be written
    assert not kernels.optional("cpu").can_keep_code()


WRONG = [
    ("balance", [(4, 2, 5), (2, 4), (4, 2)]),  # a running sum that is too short
    ("balance", [(4, 2, 5), (3, 5), (4, 2)]),
    ("balance", [(4, 2, 5), (1, 5), (3, 2)]),  # too few limits
    ("balance_centred", [(4, 2, 5), (2, 5), (2, 5), (2, 2), (4, 2)]),
    ("balance_kh", [(4, 2, 5), (2, 5), (1,), (4,), (4, 2)]),
    ("balance_kh", [(4, 2, 5), (2, 5), (2,), (3,), (4, 2)]),
]


@pytest.mark.parametrize("name, sizes", WRONG)
def test_compiled_loops_refuse_sizes_that_would_lead_them_outside(name, sizes):
    with pytest.raises(CdgrabError, match="must have shape"):
        getattr(kernels.optional("cpu"), name)(*(torch.zeros(size, dtype=torch.float64) for size in sizes))


def test_divided_loops_refuse_them_too():
    rows, running, limits = (torch.zeros(size, dtype=torch.float64) for size in ((4, 2, 5), (1, 4), (4, 2)))
    with pytest.raises(CdgrabError, match="must have shape"):
        kernels.balance_divided(rows, running, limits)
