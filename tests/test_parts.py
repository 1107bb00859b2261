"""A gradient in parts, as autograd leaves it, written to one row."""

import pytest
import torch
from sorter_cases import normal
from torch import nn

from cdgrab.dropin.parts import Layout, Parts


def laid_out(*parameters):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Layout([nn.Parameter(one.to(device)) for one in parameters])


def channels_last(tensor):
    return tensor.to(memory_format=torch.channels_last)


PARAMETERS = [normal(4, 6), channels_last(normal(5, 3, 3, 2)), normal(7), normal(2, 2, 1, 1), normal(1)]
TRANSPOSED = [*PARAMETERS, normal(6, 4).T]


def as_they_are(parameters):
    return [torch.randn_like(one) for one in parameters]


def in_another_order(parameters):
    """Contiguous, whatever their parameters are."""
    return [torch.randn(one.shape, device=one.device, dtype=one.dtype) for one in parameters]


def with_gaps(parameters):
    return [torch.randn(*one.shape, 2, device=one.device, dtype=one.dtype)[..., 0] for one in parameters]


def some_missing(parameters):
    return [None if index in (0, 3) else torch.randn_like(one) for index, one in enumerate(parameters)]


def all_missing(parameters):
    return [None] * len(parameters)


def of_two_types(parameters):
    return [torch.randn_like(one, dtype=(torch.float32, torch.bfloat16)[i % 2]) for i, one in enumerate(parameters)]


def in_half(parameters):
    return [torch.randn_like(one, dtype=torch.bfloat16) for one in parameters]


def one_sparse(parameters):
    first, *others = as_they_are(parameters)
    return [first.to_sparse(), *others]


KINDS = [as_they_are, in_another_order, with_gaps, some_missing, all_missing, of_two_types, in_half, one_sparse]


def in_order_of(parameter, gradient):
    """Its numbers in the order of the parameter's memory, if that has no gaps and a known order; else row by row."""
    if gradient is None:
        return torch.zeros(parameter.numel(), dtype=torch.float64)
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    is_last = parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    moved = dense.permute(0, 2, 3, 1) if is_last and not parameter.is_contiguous() else dense
    return moved.double().cpu().flatten()


HALVES = (in_half, of_two_types)


@pytest.mark.parametrize("scale", [1.0, 4.0, torch.tensor(4.0)], ids=["1", "4", "tensor"])
@pytest.mark.parametrize("parameters", [PARAMETERS, TRANSPOSED], ids=["regular", "one transposed"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_parts_are_written_and_subtracted_as_one_vector(kind, parameters, scale):
    layout = laid_out(*parameters)
    torch.manual_seed(0)
    first, second = kind(layout.parameters), kind(layout.parameters)
    wanted = [
        torch.cat([in_order_of(*pair) for pair in zip(layout.parameters, gradients, strict=True)]) / float(scale)
        for gradients in (first, second)
    ]
    like = Parts(layout, first).like
    assert like.dtype == (torch.float32 if kind in HALVES else torch.float64)
    scale = scale.to(like.device) if isinstance(scale, torch.Tensor) else scale
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if kind in HALVES else {"rtol": 1e-12, "atol": 1e-12}
    for row in like.new_full((2, layout.dim), torch.nan):  # in each of two places
        Parts(layout, first, scale).write(row)
        torch.testing.assert_close(row.double().cpu(), wanted[0], **tolerance)
        Parts(layout, second, scale).write(row, subtract=True)
        torch.testing.assert_close(row.double().cpu(), wanted[0] - wanted[1], **tolerance)
    vector = Parts(layout, first, scale).vector().double().cpu()
    torch.testing.assert_close(vector, wanted[0] * float(scale), **tolerance)
