"""Changes of the voxels' values: noise, blur, brightness, contrast, low resolution, gamma and cut-out, in this order.

Probabilities come from the config; ranges and order are those that nnU-Net trains with (batchgeneratorsv2 0.3), and are
meant for voxels with mean 0 and deviation 1. Strengths are drawn on the host, one for each channel. They reach the
kernels as arguments; statistics of the image stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from stoker.loader.rng import Keys, mix_numbers, uniforms
from stoker.tasks.volumes.formats.volume import Region, Shape, as_shape, box_at

# Kinds of choices; stoker.tasks.volumes.patches.patches has those before them.
NOISE, BLUR, BRIGHTNESS, CONTRAST, LOW_RESOLUTION, GAMMA, CUTOUT = range(111, 118)

NOISE_STD = (0.0, 0.1)
BLUR_SIGMA = (0.5, 1.0)
BRIGHTNESS_FACTOR = (0.75, 1.25)
CONTRAST_FACTOR = (0.75, 1.25)
KEPT_RESOLUTION = (0.5, 1.0)
GAMMA_POWER = (0.7, 1.5)
INVERTED_SHARE = 1 / 3
CUTOUT_SIDE = (0.1, 1 / 3)
"""As a share of the patch's side; nnU-Net's heavier augmentation ('DA5') blanks boxes of this size."""
_TRUNCATE = 4.0
"""A blur's weights are left out beyond this many standard deviations."""
_SMALLEST = 1e-7


@dataclass(frozen=True)
class Chances:
    """The probability of each change."""

    noise: float = 0.0
    blur: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    low_resolution: float = 0.0
    gamma: float = 0.0
    cutout: float = 0.0


PerChannel = tuple[float, ...]


@dataclass(frozen=True)
class Changes:
    """The changes to the voxels of one sample; None: unchanged. Tuples have a number for each channel."""

    noise: PerChannel | None = None
    """Standard deviations."""
    blur: tuple[tuple[float, float, float], ...] | None = None
    """Standard deviations along z, y and x, in voxels."""
    brightness: PerChannel | None = None
    """Factors."""
    contrast: PerChannel | None = None
    """Factors of the distance from the mean."""
    low_resolution: PerChannel | None = None
    """The share of the resolution that is kept."""
    gamma: PerChannel | None = None
    """Powers."""
    inverted: bool = False
    """Whether the gamma correction is applied to the negative."""
    cutout: Region | None = None


def draw_changes(keys: Keys, chances: Chances, channels: int, patch: Shape) -> list[Changes]:
    """The changes of each sample; a pure function of its key."""
    by_sample = zip(
        _drawn(keys, NOISE, chances.noise, channels),
        _drawn(keys, BLUR, chances.blur, 3 * channels),
        _drawn(keys, BRIGHTNESS, chances.brightness, channels),
        _drawn(keys, CONTRAST, chances.contrast, channels),
        _drawn(keys, LOW_RESOLUTION, chances.low_resolution, channels),
        _drawn(keys, GAMMA, chances.gamma, 1 + channels),
        _drawn(keys, CUTOUT, chances.cutout, 6),
        strict=True,
    )
    return [
        Changes(
            noise=_between(noise, NOISE_STD),
            # Three for each channel.
            blur=None if blur is None else tuple(zip(*[iter(_between(blur, BLUR_SIGMA))] * 3, strict=True)),
            brightness=_around_one(brightness, BRIGHTNESS_FACTOR),
            contrast=_around_one(contrast, CONTRAST_FACTOR),
            low_resolution=_between(low_resolution, KEPT_RESOLUTION),
            gamma=_around_one(None if gamma is None else gamma[1:], GAMMA_POWER),
            inverted=gamma is not None and gamma[0] < INVERTED_SHARE,
            cutout=None if cutout is None else _box(cutout, patch),
        )
        for noise, blur, brightness, contrast, low_resolution, gamma, cutout in by_sample
    ]


def _drawn(keys: Keys, purpose: int, chance: float, count: int) -> Sequence[list[float] | None]:
    """`count` numbers in [0, 1) for each sample that has this change, None for the others."""
    if chance == 0:
        return [None] * len(keys)
    return [row[1:] if row[0] < chance else None for row in uniforms(keys, purpose, 1 + count).tolist()]


def _between(numbers: Sequence[float] | None, bounds: tuple[float, float]) -> Any:
    low, high = bounds
    return None if numbers is None else tuple(low + (high - low) * number for number in numbers)


def _around_one(numbers: Sequence[float] | None, bounds: tuple[float, float]) -> PerChannel | None:
    """Half of them below 1, half above, and evenly spread on either side."""
    low, high = bounds
    if numbers is None:
        return None
    return tuple(low + (1 - low) * 2 * one if one < 0.5 else 1 + (high - 1) * (2 * one - 1) for one in numbers)


def _box(numbers: Sequence[float], patch: Shape) -> Region:
    low, high = CUTOUT_SIDE
    sides = [max(1, round(n * (low + (high - low) * one))) for n, one in zip(patch, numbers[:3], strict=True)]
    starts = [int(one * (n - side + 1)) for n, side, one in zip(patch, sides, numbers[3:], strict=True)]
    return box_at(as_shape(starts), as_shape(sides))


def blur_arrays(changes: Changes, patch: Shape) -> dict[str, NDArray[np.float32]]:
    """What the device needs for a blur: a matrix for each channel and axis."""
    return {
        f"blur.{channel}.{axis}": _blur_matrix(patch[axis], sigma)
        for channel, sigmas in enumerate(changes.blur or ())
        for axis, sigma in enumerate(sigmas)
    }


def _blur_matrix(length: int, sigma: float) -> NDArray[np.float32]:
    """A Gaussian blur along an axis of this length as a matrix; mirrored at the ends."""
    reach = math.ceil(_TRUNCATE * sigma)
    offsets = np.arange(-reach, reach + 1)
    weights = np.exp(-0.5 * (offsets / sigma) ** 2)
    weights /= weights.sum()
    matrix = np.zeros((length, length))
    voxels = np.arange(length)
    period = max(1, 2 * (length - 1))
    for offset, weight in zip(offsets, weights, strict=True):
        source = np.abs(voxels + offset) % period
        np.add.at(matrix, (voxels, np.minimum(source, period - source) if length > 1 else voxels), weight)
    return matrix.astype(np.float32)


def change_voxels(
    voxels: Tensor, changes: Changes, key: int, there: Mapping[str, Tensor], *, unit_deviation: bool
) -> None:
    """Changes the voxels (channels, z, y, x; float32, contiguous) of a sample, in place.

    `there` has the sample's `blur_arrays` on the device. Without a unit deviation, noise is a share of the image's."""
    for channel, image in enumerate(voxels):
        if changes.noise is not None:
            noise = normals(image.numel(), mix_numbers(key, NOISE + 1000 * channel), image.device).view_as(image)
            if not unit_deviation:
                noise.mul_(deviation(image - image.mean()))
            image.add_(noise, alpha=changes.noise[channel])
        if changes.blur is not None:
            # Products with matrices: three kernels, which need no copies with padding.
            along_z, along_y, along_x = (there[f"blur.{channel}.{axis}"] for axis in range(3))
            blurred = torch.matmul(along_y, torch.matmul(image, along_x.T))
            torch.mm(along_z, blurred.view(len(image), -1), out=image.view(len(image), -1))
        if changes.brightness is not None:
            image.mul_(changes.brightness[channel])
        if changes.contrast is not None:
            _change_contrast(image, changes.contrast[channel])
        if changes.low_resolution is not None:
            _lower_resolution(image, changes.low_resolution[channel])
        if changes.gamma is not None:
            _correct_gamma(image, changes.gamma[channel], inverted=changes.inverted)
        if changes.cutout is not None:
            image[changes.cutout.slices].copy_(image.mean())


def deviation(centred: Tensor) -> Tensor:
    """The standard deviation of voxels whose mean is 0. (torch's `std` takes eight times as long on a CPU.)"""
    found: Tensor = torch.linalg.vector_norm(centred) * centred.numel() ** -0.5
    return found


def _change_contrast(image: Tensor, factor: float) -> None:
    """Values move away from their mean, or towards it, but never out of their range."""
    mean, (low, high) = image.mean(), torch.aminmax(image)
    image.mul_(factor).add_(mean, alpha=1 - factor)
    torch.clamp(image, low, high, out=image)


def _lower_resolution(image: Tensor, kept: float) -> None:
    """Simulates a scan at a lower resolution: some voxels are kept, and the others interpolated."""
    size = [max(1, round(kept * length)) for length in image.shape]
    small = functional.interpolate(image[None, None], size, mode="nearest-exact")
    image.copy_(functional.interpolate(small, list(image.shape), mode="trilinear")[0, 0])


def _correct_gamma(image: Tensor, power: float, *, inverted: bool) -> None:
    """Gamma correction within the image's range; mean and deviation stay the same."""
    sign = -1.0 if inverted else 1.0
    mean, (low, high) = image.mean(), torch.aminmax(image)
    base = high if inverted else low
    before = deviation(image - mean)
    # Clamped: rounding could make the lowest voxel negative, and its power NaN.
    image.sub_(base).mul_(sign / (high - low).clamp_(min=_SMALLEST)).clamp_(min=0).pow_(power)
    image.sub_(image.mean())
    image.mul_(sign * before / deviation(image).clamp_(min=_SMALLEST)).add_(mean)


def normals(count: int, key: int, device: torch.device) -> Tensor:
    """`count` normal numbers from a key: a hash of each one's place, so the same on every kind of device, with no
    generator whose state something else could have changed."""
    half = (count + 1) // 2
    bits = torch.arange(2 * half, device=device, dtype=torch.int32)
    for part in (key & 0xFFFFFFFF, key >> 32):
        _scramble(bits.bitwise_xor_(part - (1 << 32) if part >= 1 << 31 else part))
    # 24 bits are what a float holds; the half keeps the logarithm finite.
    uniform = bits.bitwise_and_(0xFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-24)
    distance, angle = uniform[:half].log_().mul_(-2).sqrt_(), uniform[half:].mul_(2 * math.pi)
    found = torch.empty(2 * half, device=device, dtype=torch.float32)
    torch.mul(distance, angle.cos(), out=found[:half])
    torch.mul(distance, angle.sin_(), out=found[half:])
    return found[:count]


def _scramble(bits: Tensor) -> None:
    """A hash of 32 bits, in place: two rounds of shift and odd multiplier with a low bias (found by C. Wellons)."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (32 - shift)) - 1))
        bits.mul_(factor)
    bits.bitwise_xor_((bits >> 15).bitwise_and_((1 << 17) - 1))
