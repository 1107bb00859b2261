"""The loops of `lstm_batched` in plain words; `lstm_kernels` has the same for a GPU.

States are [runs, rows, hidden], gates [runs, rows, 4 · hidden] in the order of nn.LSTM (enter, forget, new, leave),
weights [runs, 4 · hidden, hidden]. A sequence has a first dimension of time.
"""

from __future__ import annotations

import torch
from torch import Tensor


def recur(gates: Tensor, hidden: Tensor, cell: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From the gates' inputs to all hidden states and cells, the first ones included, and the gates' values."""
    hiddens, cells, values = [hidden], [cell], []
    for now in gates:
        enter, forget, new, leave = (now + hiddens[-1] @ weights.mT).chunk(4, dim=-1)
        enter, forget, new, leave = enter.sigmoid(), forget.sigmoid(), new.tanh(), leave.sigmoid()
        cells.append(forget * cells[-1] + enter * new)
        hiddens.append(leave * cells[-1].tanh())
        values.append(torch.cat([enter, forget, new, leave], dim=-1))
    return torch.stack(hiddens), torch.stack(cells), torch.stack(values)


def recur_backward(gradient: Tensor, cells: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """From the gradient of the hidden states, the first one left out, to that of the gates' inputs."""
    found, to_hidden, to_cell = [], torch.zeros_like(cells[0]), torch.zeros_like(cells[0])
    sequences = (part.flip(0) for part in (gradient, cells[:-1], cells[1:], values))
    for direct, before, after, now in zip(*sequences, strict=True):
        (enter, forget, new, leave), shown = now.chunk(4, dim=-1), after.tanh()
        to_hidden = to_hidden + direct
        to_cell = to_cell + to_hidden * leave * (1 - shown.square())
        to_enter, to_forget = to_cell * new * enter * (1 - enter), to_cell * before * forget * (1 - forget)
        to_new, to_leave = to_cell * enter * (1 - new.square()), to_hidden * shown * leave * (1 - leave)
        found.append(torch.cat([to_enter, to_forget, to_new, to_leave], dim=-1))
        to_hidden, to_cell = found[-1] @ weights, to_cell * forget
    return torch.stack(found[::-1])


def cross_entropy_(scores: Tensor, targets: Tensor) -> Tensor:
    """The losses [rows] of scores [rows, classes], which are overwritten with their gradients."""
    chosen, logarithms = targets[:, None], scores.log_softmax(-1)
    torch.exp(logarithms, out=scores).scatter_add_(1, chosen, -torch.ones_like(chosen, dtype=scores.dtype))
    return -logarithms.gather(1, chosen)[:, 0]
