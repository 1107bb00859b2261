"""Microseconds per pair position: one sign for every worker.

Contenders: the published code's way (for every worker one inner product, one decision on the host, one addition), our
kernel on blocks of many positions, our kernel on one position at a time; and the floor, the time it takes to
read the rows twice at the highest bandwidth that this device shows. On a GPU also

* `ours_training_us`: on blocks as large as training hands over, half of `parts.BLOCK_BYTES` (two gradients, one row);
* `chain_us`: our kernel on 32 coordinates of the same rows: each sign needs those before it, and this is what that
  takes with hardly a row to read;
* `gram_us`, `walk_us`: its two kinds of launches apart, by the GPU's clock, at 64 workers and 62,006 coordinates;
* `signs`, `flips`, `flips_beyond`: see `count_flips`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import product
from types import ModuleType
from unittest.mock import patch

import torch
from torch import Tensor

from cdgrab.balance import kernels
from experiments.studies.timing import finish_on
from experiments.training import parts
from scripts.bench.flips import count_flips, some_rows
from scripts.bench.measure import alternately, summary

WORKERS, DIMS = (4, 16, 64), (19, 62_006, 1_080_000, 7_000_000)
BLOCK_BYTES = {"cpu": 2**26, "cuda": 2**32}  # of a block
MOST_POSITIONS = {"cpu": 1024, "cuda": parts.MOST_STEPS_PER_BLOCK // 2}
MOST_ROWS = 1024  # that the author-style loop goes through before the clock is read
CHAIN_DIM = 32
LAUNCHES = (64, 62_006)  # workers and dim at which they are timed one by one
BANDWIDTH_BYTES = {"cpu": 2**28, "cuda": 2**32}
GRID = {"smoke": ((4,), (19, 500)), "quick": (WORKERS, DIMS), "full": (WORKERS, DIMS)}
REPEATS = {"smoke": 2, "quick": 5, "full": 15}
describe = (
    "{threads} threads, {workers} workers, dim {dim}: author-style {author_us} µs, ours {ours_us}, floor {floor_us}"
).format_map


def author_style(rows: Tensor, running: Tensor) -> list[int]:
    """Signs of rows [n, dim] one by one; `running` [dim] moves along."""
    signs = []
    for row in rows:
        sign = 1 if torch.dot(running, row).item() <= 0 else -1
        running.add_(row, alpha=sign)
        signs.append(sign)
    return signs


def measure(device: str, size: str) -> Iterator[dict]:
    """One row per grid point; on a CPU with all cores, then with one thread."""
    threads_before, (all_workers, dims) = torch.get_num_threads(), GRID[size]
    cores = sorted({os.cpu_count() or 1, 1}, reverse=True) if device == "cpu" else [threads_before]
    try:
        for threads in cores:
            torch.set_num_threads(threads)
            for workers, dim in product(all_workers, dims):
                yield _grid_point(device, workers, dim, REPEATS[size]) | {"threads": threads}
    finally:
        torch.set_num_threads(threads_before)


def _grid_point(device: str, workers: int, dim: int, repeats: int) -> dict:
    position_bytes = workers * dim * 4
    block = max(1, min(MOST_POSITIONS[device], BLOCK_BYTES[device] // position_bytes))
    rows = _rows(block, workers, dim, device)
    limits = torch.zeros(block, workers, dtype=torch.float64, device=device)
    running = torch.zeros(1, dim, dtype=torch.float64, device=device)
    author_running = torch.zeros(dim, device=device)
    some = max(1, min(block, MOST_ROWS // workers))

    def one_by_one() -> None:
        for position in range(some):
            kernels.balance(rows[position : position + 1], running, limits[position : position + 1])

    source = torch.ones(BANDWIDTH_BYTES[device] // 4, device=device)
    target = torch.empty_like(source)
    contenders = {
        "author_us": (lambda: author_style(rows[:some].flatten(0, 1), author_running), some),
        "ours_us": (lambda: kernels.balance(rows, running, limits), block),
        "ours_one_position_us": (one_by_one, some),
    }
    if device == "cuda":
        few, few_running = rows[..., :CHAIN_DIM], running[:, :CHAIN_DIM].clone()
        contenders["chain_us"] = (lambda: kernels.balance(few, few_running, limits), block)
        trained = max(1, min(block, parts.BLOCK_BYTES["cuda"] // 2 // position_bytes))
        contenders["ours_training_us"] = (lambda: kernels.balance(rows[:trained], running, limits[:trained]), trained)
    bandwidth_tests = {"read": source.sum, "copy": lambda: target.copy_(source)}
    calls = {key: call for key, (call, _) in contenders.items()} | bandwidth_tests
    seconds = alternately(calls, repeats, finish_on(device))
    # the better one of reading and copying, each at its best
    bandwidth = BANDWIDTH_BYTES[device] * max(1 / min(seconds["read"]), 2 / min(seconds["copy"]))
    row = {"device": device, "workers": workers, "dim": dim}
    for key, (_, positions) in contenders.items():
        row |= summary(key, [1e6 * s / positions for s in seconds[key]])
    if device == "cuda":
        row |= count_flips(some_rows(workers, dim, device))
    if device == "cuda" and (workers, dim) == LAUNCHES and (gpu := kernels.optional("gpu")):
        row |= launches(gpu, contenders["ours_us"][0], block, repeats)
    return row | {
        "floor_us": float(f"{1e6 * 2 * position_bytes / bandwidth:.5g}"),
        "bandwidth_gb_s": round(bandwidth / 1e9, 2),
        "block_positions": block,
    }


def launches(
    gpu: ModuleType, call: Callable[[], object], positions: int, repeats: int
) -> dict[str, float | list[float]]:
    """Microseconds per position of the launches that multiply rows with each other, and of those that decide signs."""
    launch, kernels = gpu.launch, {"gram_us": "_gram_kernel", "walk_us": "_decide_kernel"}
    found = {key: [] for key in kernels}
    for _ in range(repeats):
        marks = []

        def marked(kernel, *arguments, marks=marks):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            launch(kernel, *arguments)
            events[1].record()
            marks.append((kernel.__name__, events))

        with patch.object(gpu, "launch", marked):
            call()
        torch.cuda.synchronize()
        for key, values in found.items():
            milliseconds = [a.elapsed_time(b) for name, (a, b) in marks if name == kernels[key]]
            values.append(1e3 * sum(milliseconds) / positions)
    return {key: value for name, values in found.items() for key, value in summary(name, values).items()}


def _rows(positions: int, workers: int, dim: int, device: str) -> Tensor:
    """Random numbers, repeated where there are very many: drawing gigabytes takes longer than all the rest."""
    generator = torch.Generator(device).manual_seed(0)
    count = positions * workers * dim
    numbers = torch.randn(min(count, 2**24 + 3), generator=generator, device=device)
    return numbers.repeat(-(-count // len(numbers)))[:count].view(positions, workers, dim)
