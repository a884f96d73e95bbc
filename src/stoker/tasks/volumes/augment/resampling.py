"""From the region that was read for a patch to the patch: axes swapped and reversed, or points between the voxels.

A sample's geometry is known on the host and reaches the device as arguments of its kernels; only the few control points
of an elastic deformation are copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.loader.rng import uniforms
from stoker.tasks.volumes.formats.volume import Shape

Floats = NDArray[np.float64]
ELASTIC = 110  # purpose of these draws; see stoker.tasks.volumes.patches.patches

# On a CPU the points of a patch are resampled in pieces, whose coordinates and corners stay in a core's cache: on one
# core that takes a quarter of the time of the whole patch at once, and half the time of torch's own grid_sample.
CPU_POINTS = 1 << 16
# Types that torch can only store: viewed as signed integers of the same size they can be moved, which keeps their bits.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32}


def turned(voxels: Tensor, order: Sequence[int], flips: Sequence[bool]) -> Tensor:
    """Voxels (..., z, y, x) whose last three axes are swapped, then reversed."""
    kind, first = voxels.dtype, voxels.ndim - 3
    signed = voxels.view(_SIGNED.get(kind, kind))
    swapped = signed.permute(*range(first), *(first + int(axis) for axis in order))
    reverse = [first + axis for axis, is_reversed in enumerate(flips) if is_reversed]
    found = swapped.flip(reverse) if reverse else swapped
    return found if kind == found.dtype else found.contiguous().view(kind)


class Points(NamedTuple):
    """Maps a patch's voxels into its region: voxel p is at `offset + matrix @ p`, plus its displacement."""

    patch: Shape
    matrix: Floats
    offset: Floats
    displacement: Tensor | None = None
    """(3, z, y, x): along the region's axes, in voxels."""


def resample(image: Tensor, label: Tensor | None, points: Points, inputs: Tensor, labels: Tensor | None) -> None:
    """Fills `inputs` (channels, z, y, x) by linear interpolation in the image and `labels` (z, y, x) with the nearest
    label's value.

    The region holds all voxels between which a patch interpolates, padded where it sticks out of the volume: so no
    point is outside except by rounding, which is undone."""
    depth, height, width = points.patch
    source = image.flatten(1).float()
    wanted = inputs.flatten(1)
    layers = depth if image.device.type != "cpu" else max(1, CPU_POINTS // (height * width))
    for first in range(0, depth, layers):
        last = min(first + layers, depth)
        taken = slice(first * height * width, last * height * width)
        found = _coordinates(points, first, last, image.device)
        if label is not None and labels is not None:
            nearest = _nearest(found, label.shape)
            labels.flatten()[taken].copy_(label.flatten().index_select(0, nearest))
        corners = _corners(found, image.shape[1:])
        for channel, out in zip(source, wanted, strict=True):
            _interpolate(channel, corners, out[taken])


def _coordinates(points: Points, first: int, last: int, device: torch.device) -> list[Tensor]:
    """The coordinates of the points of these layers, along each axis of the region."""
    _, height, width = points.patch
    z = torch.arange(first, last, device=device, dtype=torch.float32).view(-1, 1, 1)
    y = torch.arange(height, device=device, dtype=torch.float32).view(1, -1, 1)
    x = torch.arange(width, device=device, dtype=torch.float32).view(1, 1, -1)
    found = []
    for axis in range(3):
        by_z, by_y, by_x = points.matrix[axis].tolist()
        plane = torch.add(x.mul(by_x).add_(float(points.offset[axis])), y, alpha=by_y)
        place = torch.add(plane, z, alpha=by_z)
        if points.displacement is not None:
            place += points.displacement[axis, first:last]
        found.append(place.flatten())
    return found


def _nearest(coordinates: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """The number of the voxel that is nearest to each point."""
    index = torch.zeros_like(coordinates[0], dtype=torch.int32)
    for place, size in zip(coordinates, shape, strict=True):
        index.mul_(size).add_(place.add(0.5).floor_().clamp_(0, size - 1).to(torch.int32))
    return index


class Corners(NamedTuple):
    """The eight voxels around each point."""

    lowest: Tensor
    """The number of the one with the smallest coordinates."""
    fractions: tuple[Tensor, ...]
    """How far the point is from that one along each axis, in voxels."""
    steps: tuple[int, ...]
    """From a voxel to the next one along each axis; 0 where there is only one."""


def _corners(coordinates: Sequence[Tensor], shape: Sequence[int]) -> Corners:
    lowest, fractions = torch.zeros_like(coordinates[0], dtype=torch.int32), []
    for place, size in zip(coordinates, shape, strict=True):
        low = place.floor().clamp_(0, max(0, size - 2))
        fractions.append((place - low).clamp_(0, 1))
        lowest.mul_(size).add_(low.to(torch.int32))
    _, height, width = shape
    steps = (height * width, width, 1)
    return Corners(lowest, tuple(fractions), tuple(a if n > 1 else 0 for a, n in zip(steps, shape, strict=True)))


def _interpolate(voxels: Tensor, corners: Corners, out: Tensor) -> None:
    z, y, x = corners.fractions
    up, down, right = corners.steps

    def row(start: int) -> Tensor:
        left, next_one = (voxels[at:].index_select(0, corners.lowest) for at in (start, start + right))
        return left.lerp_(next_one, x)

    near = row(0).lerp_(row(down), y)
    far = row(up).lerp_(row(up + down), y)
    torch.lerp(near, far, z, out=out)


def spread(length: int, spacing: float) -> Floats:
    """The weights (length, control points) of a cubic B-spline through points that are `spacing` voxels apart."""
    places = np.arange(length) / spacing
    numbers = np.arange(-1, int(places[-1]) + 3)
    away = np.abs(places[:, None] - numbers[None])
    near, far = 2 / 3 - away**2 + away**3 / 2, np.clip(2 - away, 0, None) ** 3 / 6
    return np.where(away < 1, near, far)


class Deformation(NamedTuple):
    """A smooth random displacement of a patch's points, computed on the device."""

    control_points: NDArray[np.float32]
    """(3, z, y, x)."""
    weights: tuple[NDArray[np.float32], ...]
    """Along z, y and x: (voxels, control points)."""


def draw_deformation(key: int, patch: Shape, size: float) -> Deformation:
    """Displacements with this standard deviation, in voxels; a pure function of the key."""
    # Control points so far apart that neighbouring voxels do not change places.
    weights = [spread(length, max(8.0, 8 * size)) for length in patch]
    shape = (3, *(one.shape[1] for one in weights))
    chance, angle = uniforms(np.array([key], np.uint64), ELASTIC, 2 * math.prod(shape)).reshape(2, *shape)
    normals = np.sqrt(-2 * np.log1p(-chance)) * np.cos(2 * np.pi * angle)
    # The share of the control points' variance that is left, on average over the patch.
    share = math.prod(float(np.square(one).sum(axis=1).mean()) for one in weights)
    points = normals * (size / math.sqrt(share))
    return Deformation(points.astype(np.float32), tuple(one.astype(np.float32) for one in weights))


def displace(control_points: Tensor, weights: Sequence[Tensor], most: float) -> Tensor:
    """The displacement (3, z, y, x) of every voxel, at most `most` anywhere: nothing was read further away."""
    along_z, along_y, along_x = weights
    rows = torch.matmul(along_y, torch.matmul(control_points, along_x.T))
    return torch.matmul(along_z, rows.flatten(2)).view(3, len(along_z), *rows.shape[2:]).clamp_(-most, most)
