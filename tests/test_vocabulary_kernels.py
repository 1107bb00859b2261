"""Cross-entropy of many classes by Triton kernels, against float64; on a CPU by Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="there is no Triton for this platform")
from experiments.tasks import vocabulary_kernels


@pytest.mark.parametrize(("size", "classes", "factor"), [(3, 70, 1e-3), (100, 200, 1.0), (20, 150, 1e4)])
def test_float32_products_of_16_bit_parts_round_like_float32(triton_device, size, classes, factor):
    """Also where numbers are too small or too large for 16 bits, and differ by run."""
    generator = torch.Generator().manual_seed(size)
    outputs = torch.randn(2, 2, 5, size, generator=generator) * torch.tensor([factor, 3.0])[:, None, None, None]
    embeddings = torch.randn(2, classes, size, generator=generator) / torch.tensor([factor, 1.0])[:, None, None]
    targets = torch.randint(classes, (2, 2, 5), generator=generator)
    outputs, embeddings, targets = (tensor.to(triton_device) for tensor in (outputs, embeddings, targets))

    def plain(dtype):
        """Losses, gradients of the outputs, and those of the embeddings by worker."""
        o, e = outputs.to(dtype).requires_grad_(), embeddings.to(dtype)[:, None].repeat(1, 2, 1, 1).requires_grad_()
        losses = F.cross_entropy((o @ e.mT).flatten(0, 2), targets.flatten(), reduction="none").view_as(targets)
        return losses.detach(), *torch.autograd.grad(losses.mean(-1).sum(), (o, e))

    into = torch.empty(2, 2, classes, size, device=triton_device)
    found = *vocabulary_kernels.cross_entropy(outputs, embeddings, targets, into), into
    for ours, usual, exact in zip(found, plain(torch.float32), plain(torch.float64), strict=True):
        for run in range(2):
            scale = exact[run].abs().max()
            rounding = (usual[run] - exact[run]).abs().max() / scale
            assert (ours[run] - exact[run]).abs().max() / scale < 4 * rounding + 1e-6
    alone = vocabulary_kernels.losses(outputs.flatten(1, 2), embeddings, targets.flatten(1))
    torch.testing.assert_close(alone.view_as(targets), found[0])
