"""Triton kernels that normalise groups of channels of pictures whose channels lie side by side in memory.

That is how a GPU's tensor cores want the pictures of a convolution. PyTorch's own kernels want them channel by channel,
and copying them to and fro takes longer than the convolutions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 16384  # of a program's tile, two of which fit into the registers
FEWEST, MOST = 8, 64  # channels of a program: fewer would not fill what a GPU reads at once


def takes(images: Tensor, groups: int) -> bool:
    return (
        images.dtype == torch.float32
        and images.dim() == 4
        and images.is_contiguous(memory_format=torch.channels_last)
        and (channels := _channels(images, groups)) >= FEWEST
        and images.shape[1] % channels == 0
    )


def _channels(images: Tensor, groups: int) -> int:
    """Of a program: whole groups, a power of two; 0 if there is no such number."""
    count, positions = images.shape[1], images.shape[2] * images.shape[3]
    together = count // groups
    room = min(MOST, count, NUMBERS // triton.next_power_of_2(positions))
    fits = together & (together - 1) == 0 and together <= room
    return 1 << (room.bit_length() - 1) if fits else 0


def normalise(images: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised images [n, channels, height, width], times `weight` and plus `bias` [channels]; the means that
    were subtracted and the scales that they were multiplied by [n, channels]."""
    found, (count, channels) = torch.empty_like(images), images.shape[:2]
    means, scales = (images.new_empty(count, channels) for _ in range(2))
    grid, shape = _shape(images, groups)
    _normalise[grid](found, means, scales, images, weight.contiguous(), bias.contiguous(), eps, *shape, num_warps=8)
    return found, means, scales


def passed_back(
    slopes: Tensor, images: Tensor, groups: int, weight: Tensor, means: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the images, and of weight and bias, image by image [n, channels]."""
    of_images, of_weight, of_bias = torch.empty_like(images), torch.empty_like(means), torch.empty_like(means)
    grid, shape = _shape(images, groups)
    results, inputs = (of_images, of_weight, of_bias), (slopes, images, weight.contiguous(), means, scales)
    _pass_back[grid](*results, *inputs, *shape, num_warps=8)
    return results


def _shape(images: Tensor, groups: int) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Programs, and the sizes that a kernel is told."""
    count, channels, height, width = images.shape
    together, own = channels // groups, _channels(images, groups)
    positions = height * width
    return (count, channels // own), (channels, positions, triton.next_power_of_2(positions), own, together)


@triton.jit
def _by_group(numbers, CHANNELS: tl.constexpr, TOGETHER: tl.constexpr):
    """For each channel the sum over the channels of its group."""
    sums = tl.sum(tl.reshape(numbers, (CHANNELS // TOGETHER, TOGETHER)), 1)
    return tl.reshape(tl.broadcast_to(sums[:, None], (CHANNELS // TOGETHER, TOGETHER)), (CHANNELS,))


@triton.jit
def _tile(channels, positions, POSITIONS: tl.constexpr, CHANNELS: tl.constexpr):
    """This program's channels, their place in a table by image, the tile's in the images, and what of it is there."""
    image = tl.program_id(0).to(tl.int64)
    own = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    places = tl.arange(0, POSITIONS)
    at = (image * positions + places[:, None]) * channels + own[None, :]
    inside = (places < positions)[:, None] & (own < channels)[None, :]
    return own, image * channels + own, at, inside


@triton.jit
def _normalise(
    found,
    means,
    scales,
    images,
    weight,
    bias,
    eps,
    channels,
    positions,
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    own, row, at, inside = _tile(channels, positions, POSITIONS, CHANNELS)
    values = tl.load(images + at, mask=inside, other=0.0)
    count = TOGETHER * positions
    mean = _by_group(tl.sum(values, 0), CHANNELS, TOGETHER) / count
    far = tl.where(inside, values - mean[None, :], 0.0)
    scale = 1 / tl.sqrt(_by_group(tl.sum(far * far, 0), CHANNELS, TOGETHER) / count + eps)
    factor, shift = tl.load(weight + own) * scale, tl.load(bias + own)
    tl.store(found + at, far * factor[None, :] + shift[None, :], mask=inside)
    tl.store(means + row, mean)
    tl.store(scales + row, scale)


@triton.jit
def _pass_back(
    of_images,
    of_weight,
    of_bias,
    slopes,
    images,
    weight,
    means,
    scales,
    channels,
    positions,
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    own, row, at, inside = _tile(channels, positions, POSITIONS, CHANNELS)
    mean, scale, factor = tl.load(means + row), tl.load(scales + row), tl.load(weight + own)
    slope = tl.load(slopes + at, mask=inside, other=0.0)
    value = (tl.load(images + at, mask=inside, other=0.0) - mean[None, :]) * scale[None, :]
    along, total = tl.sum(slope * value, 0), tl.sum(slope, 0)
    tl.store(of_weight + row, along)
    tl.store(of_bias + row, total)
    count = TOGETHER * positions
    along = _by_group(factor * along, CHANNELS, TOGETHER) / count
    total = _by_group(factor * total, CHANNELS, TOGETHER) / count
    passed = scale[None, :] * (factor[None, :] * slope - total[None, :] - value * along[None, :])
    tl.store(of_images + at, passed, mask=inside)
