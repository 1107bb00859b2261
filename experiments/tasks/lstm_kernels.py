"""Triton kernels for LSTMs: all time steps of a layer in one launch.

States are [runs, rows, hidden], gates [runs, rows, 4 · hidden] in the order of nn.LSTM (enter, forget, new, leave),
weights [runs, 4 · hidden, hidden]. A sequence has a first dimension of time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def recur(gates: Tensor, hidden: Tensor, cell: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From the gates' inputs to all hidden states and cells, the first ones included, and the gates' values."""
    hiddens, cells = (torch.cat([state[None], state.new_empty(len(gates), *state.shape)]) for state in (hidden, cell))
    values = torch.empty_like(gates)
    _launch(_recur, values, gates.contiguous(), hiddens, cells, weights.contiguous())
    return hiddens, cells, values


def recur_backward(gradient: Tensor, cells: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """From the gradient of the hidden states, the first one left out, to that of the gates' inputs."""
    found = torch.empty_like(values)
    _launch(_recur_backward, found, values, gradient.contiguous(), cells, weights.contiguous())
    return found


def _launch(kernel, gates: Tensor, *rest: Tensor) -> None:
    steps, runs, rows, size = *gates.shape[:3], gates.shape[3] // 4
    kernel[(rows, runs)](gates, *rest, steps, size, SIZE=max(16, triton.next_power_of_2(size)))


@triton.jit
def _load_four(start, apart, inside):
    return (
        tl.load(start, mask=inside, other=0.0),
        tl.load(start + apart, mask=inside, other=0.0),
        tl.load(start + 2 * apart, mask=inside, other=0.0),
        tl.load(start + 3 * apart, mask=inside, other=0.0),
    )


@triton.jit
def _store_four(start, apart, inside, one, two, three, four):
    tl.store(start, one, mask=inside)
    tl.store(start + apart, two, mask=inside)
    tl.store(start + 2 * apart, three, mask=inside)
    tl.store(start + 3 * apart, four, mask=inside)


@triton.jit
def _product(row, matrix):
    return tl.sum(row[:, None] * matrix, axis=0)


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _recur(values, gates, hiddens, cells, weights, steps, size, SIZE: tl.constexpr):
    """One row of one run, as in the backward pass. The weights stay in registers."""
    unit = tl.arange(0, SIZE)
    row, rows, inside = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.num_programs(0), unit < size
    matrix = weights + tl.program_id(1) * 4 * size * size + unit[None, :] * size + unit[:, None]
    w_enter, w_forget, w_new, w_leave = _load_four(matrix, size * size, inside[:, None] & inside[None, :])
    here = row * size + unit
    hidden = tl.load(hiddens + here, mask=inside, other=0.0)
    cell = tl.load(cells + here, mask=inside, other=0.0)
    for step in range(steps):
        there = (step * tl.num_programs(1) * rows + row) * 4 * size + unit
        enter, forget, new, leave = _load_four(gates + there, size, inside)
        enter = tl.sigmoid(enter + _product(hidden, w_enter))
        forget = tl.sigmoid(forget + _product(hidden, w_forget))
        new = _tanh(new + _product(hidden, w_new))
        leave = tl.sigmoid(leave + _product(hidden, w_leave))
        cell = forget * cell + enter * new
        hidden = leave * _tanh(cell)
        _store_four(values + there, size, inside, enter, forget, new, leave)
        here += tl.num_programs(1) * rows * size
        tl.store(cells + here, cell, mask=inside)
        tl.store(hiddens + here, hidden, mask=inside)


@triton.jit
def _recur_backward(found, values, gradient, cells, weights, steps, size, SIZE: tl.constexpr):
    unit = tl.arange(0, SIZE)
    row, rows, inside = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.num_programs(0), unit < size
    matrix = weights + tl.program_id(1) * 4 * size * size + unit[:, None] * size + unit[None, :]
    w_enter, w_forget, w_new, w_leave = _load_four(matrix, size * size, inside[:, None] & inside[None, :])
    here = (steps * tl.num_programs(1) * rows + row) * size + unit
    to_hidden = tl.zeros((SIZE,), values.dtype.element_ty)
    to_cell, shown = to_hidden, _tanh(tl.load(cells + here, mask=inside, other=0.0))
    for back in range(steps):
        here -= tl.num_programs(1) * rows * size
        there = ((steps - 1 - back) * tl.num_programs(1) * rows + row) * 4 * size + unit
        enter, forget, new, leave = _load_four(values + there, size, inside)
        cell = tl.load(cells + here, mask=inside, other=0.0)
        to_hidden += tl.load(gradient + here, mask=inside, other=0.0)
        to_cell += to_hidden * leave * (1 - shown * shown)
        to_enter, to_forget = to_cell * new * enter * (1 - enter), to_cell * cell * forget * (1 - forget)
        to_new, to_leave = to_cell * enter * (1 - new * new), to_hidden * shown * leave * (1 - leave)
        _store_four(found + there, size, inside, to_enter, to_forget, to_new, to_leave)
        to_hidden = _product(to_enter, w_enter) + _product(to_forget, w_forget)
        to_hidden += _product(to_new, w_new) + _product(to_leave, w_leave)
        to_cell, shown = to_cell * forget, _tanh(cell)
