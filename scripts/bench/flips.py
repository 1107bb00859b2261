"""Signs of a GPU's kernel against those of the CPU's on the same rows, in float32, random and structured."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cdgrab.balance import kernels

NEAR = 1e-6  # of |r||v|: inner products this near to zero may be decided either way
BYTES = 2**26  # of one kind of rows, unless a single position is larger
MOST_POSITIONS = 8


def some_rows(workers: int, dim: int, device: str) -> dict[str, Tensor]:
    """A few positions [positions, workers, dim] of every kind: `repeated` are copies of three rows, in any order;
    `correlated` differ from a common one by a tenth."""
    generator = torch.Generator(device).manual_seed(1)
    positions = max(1, min(MOST_POSITIONS, BYTES // (4 * workers * dim)))
    normal = lambda *shape: torch.randn(*shape, generator=generator, device=device)  # noqa: E731
    which = torch.randint(3, (positions, workers), generator=generator, device=device)
    return {
        "random": normal(positions, workers, dim),
        "repeated": normal(3, dim)[which],
        "correlated": normal(dim) + 0.1 * normal(positions, workers, dim),
    }


def count_flips(rows: dict[str, Tensor], balance: Callable[..., Tensor] = kernels.balance) -> dict[str, int]:
    """How many signs `balance` decides on the device of the rows, how many of them the CPU's kernel decides otherwise,
    and for how many of those the inner product is not near zero."""
    total = {"signs": 0, "flips": 0, "flips_beyond": 0}
    for some in rows.values():
        running = torch.zeros(1, some.shape[2], dtype=torch.float64, device=some.device)
        signs = balance(some, running, torch.zeros(some.shape[:2], dtype=torch.float64, device=some.device)).cpu()
        for key, count in _compare(some.cpu(), signs).items():
            total[key] += count
    return total


def _compare(rows: Tensor, signs: Tensor) -> dict[str, int]:
    count = {"signs": signs.numel(), "flips": 0, "flips_beyond": 0}
    running = torch.zeros(1, rows.shape[2], dtype=torch.float64)
    if torch.equal(kernels.balance(rows, running, torch.zeros(signs.shape, dtype=torch.float64)), signs):
        return count
    running.zero_()  # one by one: each against the running sum to which the signs before it have led
    for row, sign in zip(rows.flatten(0, 1).double(), signs.flatten().tolist(), strict=True):
        ours = int(kernels.balance(row[None, None], running.clone(), torch.zeros(1, 1, dtype=torch.float64)))
        if ours != sign:
            beyond = abs(float(running[0] @ row)) >= NEAR * float(running.norm() * row.norm())
            count["flips"], count["flips_beyond"] = count["flips"] + 1, count["flips_beyond"] + beyond
        running += sign * row
    return count
