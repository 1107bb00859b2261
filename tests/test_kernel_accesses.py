"""No Triton kernel leaves its tensors, where their tests run on a CPU; here, that one which does is found."""

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton for this platform")
import triton
import triton.language as tl
from checked_accesses import Accesses, every_access_checked
from triton.runtime.errors import InterpreterError

from experiments.tasks import vocabulary_kernels

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has no interpreter; see compute-sanitizer")


@triton.jit
def _double(source, target, count, read, written, first, TILE: tl.constexpr):
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    values = tl.load(source + first + index, mask=index < read, other=0.0)
    tl.store(target + index, 2 * values, mask=index < written)


@triton.jit
def _copy_by_difference(source, target, difference):
    tl.store(target, tl.load(source + difference))


def double(read=10, written=10, first=0, target=None):
    source = torch.arange(16.0)[3:13]  # what lies around it is memory, too
    target = torch.zeros(10) if target is None else target
    _double[(2,)](source, target, 10, read, written, first, TILE=8)
    return source, target


def test_a_kernel_with_right_masks_works_as_ever():
    with every_access_checked() as accesses:
        source, target = double()
    assert torch.equal(target, 2 * source)
    assert accesses.count == 20


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"read": 11}, r"reads bytes 32 to 44 of a tensor of 40 bytes"),
        ({"written": 11}, r"writes bytes 32 to 44 of a tensor of 40 bytes"),
        ({"first": -1}, r"reads bytes -4 to 28 of a tensor of 40 bytes"),
        ({"first": 2**40}, r"reads bytes .* of a tensor of 40 bytes"),
        ({"target": torch.zeros(0)}, r"writes bytes 0 to 32 of a tensor of 0 bytes"),
        ({"target": torch.zeros(10)[::2]}, r"writes bytes 32 to 40 of a tensor of 36 bytes"),
    ],
)
def test_one_number_outside_is_found(wrong, words):
    with every_access_checked(), pytest.raises(InterpreterError, match=words):
        double(**wrong)


def test_one_tensor_is_not_reached_from_another():
    source, target = torch.arange(8.0), torch.zeros(1)
    apart = (source.data_ptr() - target.data_ptr()) // 4
    with every_access_checked(), pytest.raises(InterpreterError, match="a kernel reads"):
        _copy_by_difference[(1,)](target, target, apart)


@pytest.mark.parametrize("halved", [True, False], ids=["float32", "float64"])
def test_the_vocabulary_kernels_use_their_tensors_to_the_last_number(halved, monkeypatch):
    """So that of each of them, one number fewer is found."""
    dtype = torch.float32 if halved else torch.float64
    outputs, embeddings = torch.randn(1, 2, 3, 5, dtype=dtype), torch.randn(1, 7, 5, dtype=dtype)
    targets, into = torch.randint(7, (1, 2, 3)), torch.empty(1, 2, 7, 5, dtype=dtype)
    place, placed, short = Accesses.place, [], []

    def place_one_short(self, tensor):
        placed.append(tensor)
        return place(self, tensor.flatten()[:-1] if len(placed) in short else tensor)

    monkeypatch.setattr(Accesses, "place", place_one_short)
    with every_access_checked():
        vocabulary_kernels.cross_entropy(outputs, embeddings, targets, into)
        assert len(placed) == 18  # of both kernels
        for number in range(1, 19):
            placed.clear()
            short[:] = [number]
            with pytest.raises(InterpreterError, match="of a tensor of"):
                vocabulary_kernels.cross_entropy(outputs, embeddings, targets, into)
