"""Triton kernels for an output layer with many classes: cross-entropy and its gradients, with no score ever written.

The scores of all words for all classes would be most of what a step writes. Here every program computes a tile of them
from outputs [runs, rows, hidden] and embeddings [runs, classes, hidden], uses it and forgets it. What the mean
embedding under the softmax needs is what attention computes: the classes are its keys and values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-3e38)  # of float32; minus infinity less itself would not be zero
PRECISION = tl.constexpr("tf32x3")  # three products of tensor cores, which round like one of float32
ROWS, CLASSES = 64, 64  # of a tile
PROGRAMS = 1024  # keep a large GPU busy


def cross_entropy(outputs: Tensor, embeddings: Tensor, targets: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of all words and the gradients of each worker's mean loss. Embeddings of one run may lie apart from
    those of the next, as they do in vectors of all parameters; they are not copied.

    outputs [runs, workers, words, hidden], embeddings [runs, classes, hidden], targets [runs, workers, words] -> losses
    like `targets` and the gradient of `outputs`; that of the embeddings is written `into` [runs, workers, classes,
    hidden].
    """
    outputs, words = outputs.contiguous(), outputs.shape[2]
    rows, goals = outputs.flatten(1, 2), targets.flatten(1)
    losses, normalisers, means, wanted = _read(rows, embeddings, goals, means=True)
    _write(outputs, embeddings, targets.contiguous(), normalisers, into)
    return losses.view_as(targets), ((means - wanted) / words).view_as(outputs)


def losses(outputs: Tensor, embeddings: Tensor, targets: Tensor) -> Tensor:
    """Without gradients: outputs [runs, rows, hidden], targets [runs, rows]."""
    return _read(outputs.contiguous(), embeddings, targets, means=False)[0]


def add_rows(into: Tensor, rows: Tensor, values: Tensor) -> None:
    """into[r, w, rows[r, w, i]] += values[r, w, i] for all i, with the same order of additions every time: the values
    of a row that appears several times are summed first."""
    same = (rows[..., None] == rows[..., None, :]).to(values.dtype)
    index = rows[..., None].expand_as(values)
    into.scatter_(2, index, into.gather(2, index) + same @ values)


def _read(outputs: Tensor, embeddings: Tensor, targets: Tensor, means: bool) -> tuple[Tensor, ...]:
    """Losses, logarithms of the softmax's denominator, embeddings' means under the softmax, and the targets'."""
    (runs, rows, size), classes = outputs.shape, embeddings.shape[1]
    blocks, (tile, width) = triton.cdiv(rows, ROWS), _tile(size)
    parts = max(1, min(16, PROGRAMS // (blocks * runs), classes // tile))  # of the classes, each by its own program
    each = tile * triton.cdiv(classes, tile * parts)
    tops, totals = (outputs.new_empty(parts, runs, rows) for _ in range(2))
    sums = outputs.new_empty(parts, runs, rows, size) if means else outputs.new_empty(0)
    _read_classes[blocks, parts, runs](
        outputs, embeddings, tops, totals, sums, embeddings.stride(0),
        rows, classes, each, size, ROWS, tile, width, means,
    )  # fmt: skip
    whole = torch.logsumexp(tops + totals.log(), dim=0)
    wanted = embeddings.gather(1, targets[..., None].expand(-1, -1, size))
    found = (sums * (tops - whole).exp()[..., None]).sum(0) if means else sums
    return whole - (outputs * wanted).sum(-1), whole, found, wanted


def _write(outputs: Tensor, embeddings: Tensor, targets: Tensor, normalisers: Tensor, into: Tensor) -> None:
    (runs, workers, words, size), classes = outputs.shape, embeddings.shape[1]
    tile, width = _tile(size)
    _write_classes[triton.cdiv(classes, tile), workers, runs](
        into, outputs, embeddings, targets, normalisers, embeddings.stride(0), *into.stride()[:2],
        words, classes, size, 32, tile, width,
    )  # fmt: skip


def _tile(size: int) -> tuple[int, int]:
    """Classes in a tile, and its width; with both large, registers would not suffice."""
    width = max(16, triton.next_power_of_2(size))
    return (CLASSES if width <= 64 else CLASSES // 2), width


@triton.jit
def _read_classes(
    outputs, embeddings, tops, totals, sums, apart, rows, classes, each, size,
    ROWS: tl.constexpr, CLASSES: tl.constexpr, WIDTH: tl.constexpr, MEANS: tl.constexpr,
):  # fmt: skip
    """Some rows of one run against some classes: the highest score, the sum of exponentials relative to it, and with
    them as weights that of the embeddings."""
    run, row, unit = tl.program_id(2).to(tl.int64), tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside, real = row < rows, unit < size
    here = run * rows + row
    mine = tl.load(outputs + here[:, None] * size + unit[None, :], mask=inside[:, None] & real[None, :], other=0.0)
    top = tl.full((ROWS,), LOWEST, mine.dtype)
    total, mean = tl.zeros((ROWS,), mine.dtype), tl.zeros((ROWS, WIDTH), mine.dtype)
    start = tl.program_id(1) * each
    for first in range(start, tl.minimum(start + each, classes), CLASSES):
        number = first + tl.arange(0, CLASSES)
        where = embeddings + run * apart + number[:, None] * size + unit[None, :]
        its = tl.load(where, mask=(number < classes)[:, None] & real[None, :], other=0.0)
        scores = tl.dot(mine, tl.trans(its), input_precision=PRECISION, out_dtype=mine.dtype)
        scores = tl.where((number < classes)[None, :], scores, LOWEST)
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights, kept = tl.exp(scores - higher[:, None]), tl.exp(top - higher)
        total = total * kept + tl.sum(weights, axis=1)
        if MEANS:
            mean = mean * kept[:, None] + tl.dot(weights, its, input_precision=PRECISION, out_dtype=mine.dtype)
        top = higher
    there = tl.program_id(1).to(tl.int64) * tl.num_programs(2) * rows + here
    tl.store(tops + there, top, mask=inside)
    tl.store(totals + there, total, mask=inside)
    if MEANS:
        tl.store(sums + there[:, None] * size + unit[None, :], mean, mask=inside[:, None] & real[None, :])


@triton.jit
def _write_classes(
    into, outputs, embeddings, targets, normalisers, apart, run_stride, worker_stride, words, classes, size,
    ROWS: tl.constexpr, CLASSES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradients of some embeddings for the words of one worker of one run."""
    run, worker, unit = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
    number, real = tl.program_id(0) * CLASSES + tl.arange(0, CLASSES), unit < size
    known = (number < classes)[:, None] & real[None, :]
    its = tl.load(embeddings + run * apart + number[:, None] * size + unit[None, :], mask=known, other=0.0)
    found = tl.zeros((CLASSES, WIDTH), its.dtype)
    first = (run * tl.num_programs(1) + worker) * words
    for start in range(0, words, ROWS):
        word = start + tl.arange(0, ROWS)
        inside = word < words
        where = outputs + (first + word)[:, None] * size + unit[None, :]
        mine = tl.load(where, mask=inside[:, None] & real[None, :], other=0.0)
        whole = tl.load(normalisers + first + word, mask=inside, other=0.0)
        target = tl.load(targets + first + word, mask=inside, other=-1)
        scores = tl.dot(its, tl.trans(mine), input_precision=PRECISION, out_dtype=its.dtype)
        slopes = tl.exp(scores - whole[None, :]) - (number[:, None] == target[None, :])
        found += tl.dot(slopes, mine, input_precision=PRECISION, out_dtype=its.dtype)  # rows outside are zero
    there = into + run * run_stride + worker * worker_stride + number[:, None] * size + unit[None, :]
    tl.store(there, found / words, mask=known)
