"""Rows that are divided among GPUs: the signs and sums of the plain loop, whoever holds which coordinates."""

import pytest
import torch
from kernel_cases import dtypes
from shards import Shards
from sorter_cases import normal, uniform
from test_kernel_ties import cancelling_rows

from cdgrab.balance import kernels, rules


@pytest.fixture
def divided(on_gpu, monkeypatch):
    """(the module, device)"""
    module, device = kernels.optional("divided_gpu"), on_gpu[1]
    if device == "cpu":  # several tiles for each, and not many: the interpreter takes long
        monkeypatch.setattr(module, "MOST_PROGRAMS", 3)
    return module, device


LONG = 40_000 if torch.cuda.is_available() else 700  # several tiles for each program
SHAPES = [(1, 4, 200), (9, 4, 130), (3, 16, 1), (2, 17, 65), (1, 33, 64), (5, 2, LONG), (0, 4, 20), (3, 2, 0)]


@pytest.mark.parametrize("width, dtype", [(0.0, torch.float32), (6.0, torch.float64)], ids=["greedy", "walk"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_signs_and_sums_are_those_of_the_plain_loop(divided, shape, width, dtype):
    module, device = divided
    rows, limits = normal(*shape, dtype=dtype), width * uniform(*shape[:2])
    plain = normal(1, shape[2], seed=1)
    found = plain.to(device, copy=True)
    expected = rules.balance(rows, plain, limits)
    signs = module.balance_divided(rows.to(device), found, limits.to(device), lambda products: products)
    assert signs.dtype == torch.int8 and torch.equal(signs.cpu(), expected)
    torch.testing.assert_close(found.cpu(), plain, rtol=1e-12, atol=1e-12)


@dtypes
@pytest.mark.parametrize("widths", [[100, 100], [5, 0, 195], [50] * 4])
def test_every_process_finds_the_signs_of_whole_rows(divided, widths, dtype):
    module, device = divided
    rows, limits = normal(9, 5, sum(widths), dtype=dtype), 6.0 * uniform(9, 5)
    plain = torch.zeros(1, sum(widths), dtype=torch.float64)
    found, sums = Shards(widths).balance(
        module.balance_divided, rows.to(device), plain.to(device, copy=True), limits.to(device)
    )
    expected = rules.balance(rows, plain, limits)
    assert all(torch.equal(signs.cpu(), expected) for signs in found)
    torch.testing.assert_close(sums.cpu(), plain, rtol=1e-12, atol=1e-12)


@dtypes
@pytest.mark.parametrize("workers", [1, 6])
@pytest.mark.parametrize("dim", [23, LONG])
def test_rows_that_cancel_are_ties(divided, dim, workers, dtype):
    module, device = divided
    rows, expected = cancelling_rows(36 // workers, workers, dim, dtype)
    limits = torch.zeros(expected.shape, dtype=torch.float64, device=device)
    found, _ = Shards([dim // 3, dim - dim // 3]).balance(
        module.balance_divided, rows.to(device), torch.zeros(1, dim).double().to(device), limits
    )
    assert all(torch.equal(signs.cpu(), expected) for signs in found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_goes_on_at_once(divided):
    rows, limits = normal(3, 4, 5000, dtype=torch.float32).cuda(), torch.zeros(3, 4, dtype=torch.float64).cuda()
    running = torch.zeros(1, 5000, dtype=torch.float64).cuda()
    kernels.balance_divided(rows, running, limits)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels.balance_divided(rows, running, limits)
    finally:
        torch.cuda.set_sync_debug_mode("default")
