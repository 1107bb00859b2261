"""Triton kernels for an output layer with many classes: cross-entropy and its gradients, with no score ever written.

The scores of all words for all classes would be most of what a step writes. Here every program computes a tile of them
from outputs [runs, rows, hidden] and embeddings [runs, classes, hidden], uses it and forgets it. What the mean
embedding under the softmax needs is what attention computes: the classes are its keys and values.

Tensor cores multiply 16-bit numbers fastest. Every float32 is the sum of two of them, but for its last two bits, so
three such products give one of float32 (what the two remainders would give together is below its rounding).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-3e38)  # of float32; minus infinity less itself would not be zero
LARGEST = 15  # 2 ** 15 is the largest power that a 16-bit number holds
UNIT = tl.constexpr(2.0**15)  # 1 as a 16-bit number, where small ones keep their bits
ROWS, CLASSES = 64, 64  # of a tile that is read; of one that is written half and twice as many
PROGRAMS = 1024  # keep a large GPU busy


@dataclass(frozen=True)
class Parts:
    """A tensor [runs, ...] as the sum of two 16-bit ones, all divided by a scale of the run. Float64 stays whole."""

    most: Tensor
    rest: Tensor
    scale: Tensor  # [runs]

    @classmethod
    def of(cls, tensor: Tensor) -> Parts:
        if tensor.dtype == torch.float64:
            whole = tensor.contiguous()
            return cls(whole, whole, tensor.new_ones(len(tensor)))
        exponent = torch.frexp(tensor.abs().flatten(1).amax(1)).exponent
        scale = torch.ldexp(torch.ones_like(exponent, dtype=tensor.dtype), exponent - LARGEST)
        scaled = (tensor / scale[:, None, None]).contiguous()
        most = scaled.half()
        return cls(most, (scaled - most).half(), scale)

    @property
    def halved(self) -> bool:
        return self.most.dtype == torch.float16

    @property
    def tile(self) -> int:
        """Classes of a tile that is read: numbers of 64 bits need the room of four."""
        return CLASSES if self.halved else CLASSES // 2

    @property
    def width(self) -> int:
        return max(16, triton.next_power_of_2(self.most.shape[-1]))


def cross_entropy(outputs: Tensor, embeddings: Tensor, targets: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of all words and the gradients of each worker's mean loss.

    outputs [runs, workers, words, hidden], embeddings [runs, classes, hidden], targets [runs, workers, words] -> losses
    like `targets` and the gradient of `outputs`; that of the embeddings is written `into` [runs, workers, classes,
    hidden].
    """
    rows, classes = Parts.of(outputs.flatten(1, 2)), Parts.of(embeddings)
    whole, means = _read(rows, classes, means=True)
    _write(rows, classes, targets.contiguous(), whole, into)
    wanted = _rows(embeddings, targets.flatten(1)).view_as(outputs)
    losses = whole.view_as(targets) - (outputs * wanted).sum(-1)
    return losses, (means.view_as(outputs) - wanted) / outputs.shape[2]


def losses(outputs: Tensor, embeddings: Tensor, targets: Tensor) -> Tensor:
    """Without gradients: outputs [runs, rows, hidden], targets [runs, rows]."""
    whole, _ = _read(Parts.of(outputs), Parts.of(embeddings), means=False)
    return whole - (outputs * _rows(embeddings, targets)).sum(-1)


def add_rows(into: Tensor, rows: Tensor, values: Tensor) -> None:
    """into[r, w, rows[r, w, i]] += values[r, w, i] for all i, with the same order of additions every time: the values
    of a row that appears several times are summed first."""
    same = (rows[..., None] == rows[..., None, :]).to(values.dtype)
    index = rows[..., None].expand_as(values)
    into.scatter_(2, index, into.gather(2, index) + same @ values)


def _rows(of: Tensor, numbers: Tensor) -> Tensor:
    """of [runs, classes, hidden], numbers [runs, n] -> [runs, n, hidden]"""
    return of.gather(1, numbers[..., None].expand(-1, -1, of.shape[-1]))


def _read(outputs: Parts, embeddings: Parts, means: bool) -> tuple[Tensor, Tensor]:
    """Of every row the logarithm of the softmax's denominator and, if wanted, the embeddings' mean under it."""
    (runs, rows, size), classes = outputs.most.shape, embeddings.most.shape[1]
    blocks, tile = triton.cdiv(rows, ROWS), outputs.tile
    parts = max(1, min(16, PROGRAMS // (blocks * runs), classes // tile))  # of the classes, each by its own program
    each = tile * triton.cdiv(classes, tile * parts)
    tops, totals = (outputs.scale.new_empty(parts, runs, rows) for _ in range(2))
    sums = outputs.scale.new_empty((parts, runs, rows, size) if means else 0)
    _read_classes[blocks, parts, runs](
        outputs.most, outputs.rest, outputs.scale, embeddings.most, embeddings.rest, embeddings.scale, tops, totals,
        sums, rows, classes, each, size, ROWS, tile, outputs.width, means, outputs.halved, num_stages=2,
    )  # fmt: skip
    whole = torch.logsumexp(tops + totals.log(), dim=0)
    return whole, (sums * (tops - whole).exp()[..., None]).sum(0) if means else sums


def _write(outputs: Parts, embeddings: Parts, targets: Tensor, normalisers: Tensor, into: Tensor) -> None:
    (runs, workers, words), (_, classes, size) = targets.shape, embeddings.most.shape
    tile = 2 * outputs.tile
    _write_classes[triton.cdiv(classes, tile), workers, runs](
        into, outputs.most, outputs.rest, outputs.scale, embeddings.most, embeddings.rest, embeddings.scale, targets,
        normalisers, *into.stride()[:2], words, classes, size, ROWS // 2, tile, outputs.width, outputs.halved,
        num_stages=2,
    )  # fmt: skip


@triton.jit
def _parts(values, HALVED: tl.constexpr):
    """Numbers between -1 and 1 as the sum of two, times UNIT."""
    most, rest = values, values
    if HALVED:
        scaled = values * UNIT
        most = scaled.to(tl.float16)
        rest = (scaled - most.to(tl.float32)).to(tl.float16)
    return most, rest


@triton.jit
def _add_product(total, a, a_rest, b, b_rest, HALVED: tl.constexpr):
    if HALVED:
        total = tl.dot(a_rest, b, total)
        total = tl.dot(a, b_rest, total)
    return tl.dot(a, b, total, input_precision="ieee", out_dtype=total.dtype)


@triton.jit
def _read_classes(
    outputs, outputs_rest, outputs_scale, embeddings, embeddings_rest, embeddings_scale, tops, totals, sums,
    rows, classes, each, size,
    ROWS: tl.constexpr, CLASSES: tl.constexpr, WIDTH: tl.constexpr, MEANS: tl.constexpr, HALVED: tl.constexpr,
):  # fmt: skip
    """Some rows of one run against some classes: the highest score, the sum of exponentials relative to it, and with
    them as weights that of the embeddings."""
    run, row, unit = tl.program_id(2).to(tl.int64), tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside, real = row < rows, unit < size
    here, mask = run * rows + row, inside[:, None] & real[None, :]
    mine = tl.load(outputs + here[:, None] * size + unit[None, :], mask=mask, other=0.0)
    mine_rest = tl.load(outputs_rest + here[:, None] * size + unit[None, :], mask=mask, other=0.0)
    its_scale = tl.load(embeddings_scale + run)
    scale = tl.load(outputs_scale + run) * its_scale
    top = tl.full((ROWS,), LOWEST, scale.dtype)
    total, mean = tl.zeros((ROWS,), scale.dtype), tl.zeros((ROWS, WIDTH), scale.dtype)
    start = tl.program_id(1) * each
    for first in range(start, tl.minimum(start + each, classes), CLASSES):
        number = first + tl.arange(0, CLASSES)
        where = (run * classes + number)[:, None] * size + unit[None, :]
        known = (number < classes)[:, None] & real[None, :]
        its = tl.load(embeddings + where, mask=known, other=0.0)
        its_rest = tl.load(embeddings_rest + where, mask=known, other=0.0)
        scores = tl.zeros((ROWS, CLASSES), scale.dtype)
        scores = _add_product(scores, mine, mine_rest, tl.trans(its), tl.trans(its_rest), HALVED) * scale
        scores = tl.where((number < classes)[None, :], scores, LOWEST)
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights, kept = tl.exp(scores - higher[:, None]), tl.exp(top - higher)
        total = total * kept + tl.sum(weights, axis=1)
        if MEANS:
            most, rest = _parts(weights, HALVED)
            mean = _add_product(mean * kept[:, None], most, rest, its, its_rest, HALVED)
        top = higher
    there = tl.program_id(1).to(tl.int64) * tl.num_programs(2) * rows + here
    tl.store(tops + there, top, mask=inside)
    tl.store(totals + there, total, mask=inside)
    if MEANS:
        if HALVED:
            its_scale /= UNIT
        tl.store(sums + there[:, None] * size + unit[None, :], mean * its_scale, mask=mask)


@triton.jit
def _write_classes(
    into, outputs, outputs_rest, outputs_scale, embeddings, embeddings_rest, embeddings_scale, targets, normalisers,
    run_stride, worker_stride, words, classes, size,
    ROWS: tl.constexpr, CLASSES: tl.constexpr, WIDTH: tl.constexpr, HALVED: tl.constexpr,
):  # fmt: skip
    """The gradients of some embeddings for the words of one worker of one run."""
    run, worker, unit = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
    number, real = tl.program_id(0) * CLASSES + tl.arange(0, CLASSES), unit < size
    known = (number < classes)[:, None] & real[None, :]
    at = (run * classes + number)[:, None] * size + unit[None, :]
    its = tl.load(embeddings + at, mask=known, other=0.0)
    its_rest = tl.load(embeddings_rest + at, mask=known, other=0.0)
    mine_scale = tl.load(outputs_scale + run)
    scale = tl.load(embeddings_scale + run) * mine_scale
    found = tl.zeros((CLASSES, WIDTH), scale.dtype)
    first = (run * tl.num_programs(1) + worker) * words
    for start in range(0, words, ROWS):
        word = start + tl.arange(0, ROWS)
        inside = word < words
        where, mask = (first + word)[:, None] * size + unit[None, :], inside[:, None] & real[None, :]
        mine = tl.load(outputs + where, mask=mask, other=0.0)  # rows outside are zero
        mine_rest = tl.load(outputs_rest + where, mask=mask, other=0.0)
        whole = tl.load(normalisers + first + word, mask=inside, other=0.0)
        target = tl.load(targets + first + word, mask=inside, other=-1)
        scores = tl.zeros((CLASSES, ROWS), scale.dtype)
        scores = _add_product(scores, its, its_rest, tl.trans(mine), tl.trans(mine_rest), HALVED) * scale
        slopes = tl.exp(scores - whole[None, :]) - (number[:, None] == target[None, :])
        most, rest = _parts(slopes, HALVED)
        found = _add_product(found, most, rest, mine, mine_rest, HALVED)
    if HALVED:
        mine_scale /= UNIT
    there = into + run * run_stride + worker * worker_stride + number[:, None] * size + unit[None, :]
    tl.store(there, found * (mine_scale / words), mask=known)
