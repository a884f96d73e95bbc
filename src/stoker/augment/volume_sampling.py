"""From the region that was read for a patch to the patch: axes swapped and reversed, or points between the voxels.

Everything about a sample's geometry is known on the host and reaches the device as arguments of its kernels: nothing is
copied for it but the few control points of an elastic deformation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from stoker.data.draws import uniforms
from stoker.data.volumes.volume import Shape

Floats = NDArray[np.float64]
ELASTIC = 110  # purpose of these draws; see stoker.data.volumes.transforms

# Numbers that torch can only store: as signed ones of the same size they can be moved, which keeps their bits.
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
    """Where the voxels of a patch lie in its region: voxel p is at `offset + matrix @ p`, plus its displacement."""

    patch: Shape
    matrix: Floats
    offset: Floats
    displacement: Tensor | None = None
    """(3, z, y, x): along the region's axes, in voxels."""


def resample(image: Tensor, label: Tensor | None, points: Points, inputs: Tensor, labels: Tensor | None) -> None:
    """Fills `inputs` (channels, z, y, x) by linear interpolation in the image and `labels` (z, y, x) with the nearest
    label's value.

    The region holds all voxels between which a patch interpolates, padded where it sticks out of the volume: so no
    point lies outside of it but by rounding, which is undone."""
    depth, height, width = points.patch
    shape = image.shape[1:]
    grid = torch.empty((depth, 1, height, width, 3), device=image.device, dtype=torch.float32)
    index = None
    for axis, size in enumerate(shape):
        place = _coordinate(points, axis, image.device)
        if label is not None:
            nearest = place.add(0.5).floor_().clamp_(0, size - 1).to(torch.int32)
            index = nearest if index is None else index.mul_(size).add_(nearest)
        # In grid_sample's units, whose axes are x, y, z: -1 and 1 are the centres of the outermost voxels.
        grid[:, 0, :, :, 2 - axis] = place.mul_(2 / max(1, size - 1)).sub_(1)
    if index is not None and label is not None and labels is not None:
        labels.view(-1).copy_(label.flatten().index_select(0, index.view(-1)))
    # Every layer of the patch as a sample of its own, all of them from the same image: on a CPU it is samples that
    # torch divides between threads.
    source = image.float().expand(depth, *image.shape)
    found = functional.grid_sample(source, grid, "bilinear", "border", align_corners=True)
    inputs.copy_(found.view(depth, -1, height, width).transpose(0, 1))


def _coordinate(points: Points, axis: int, device: torch.device) -> Tensor:
    """Where the patch's voxels (z, y, x) lie along an axis of the region."""
    z, y, x = (torch.arange(length, device=device, dtype=torch.float32) for length in points.patch)
    by_z, by_y, by_x = points.matrix[axis].tolist()
    plane = torch.add(x.mul_(by_x).add_(float(points.offset[axis])), y.view(-1, 1), alpha=by_y)
    place = torch.add(plane, z.view(-1, 1, 1), alpha=by_z)
    return place if points.displacement is None else place.add_(points.displacement[axis])


def spread(length: int, spacing: float) -> Floats:
    """The weights (length, control points) of a cubic B-spline through points that are `spacing` voxels apart."""
    places = np.arange(length) / spacing
    numbers = np.arange(-1, int(places[-1]) + 3)
    away = np.abs(places[:, None] - numbers[None])
    near, far = 2 / 3 - away**2 + away**3 / 2, np.clip(2 - away, 0, None) ** 3 / 6
    return np.where(away < 1, near, far)


class Deformation(NamedTuple):
    """A smooth random displacement of a patch's points, to be worked out on the device."""

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
    # What is left of the variance of the control points, on average over the patch.
    share = math.prod(float(np.square(one).sum(axis=1).mean()) for one in weights)
    points = normals * (size / math.sqrt(share))
    return Deformation(points.astype(np.float32), tuple(one.astype(np.float32) for one in weights))


def displace(control_points: Tensor, weights: Sequence[Tensor], most: float) -> Tensor:
    """The displacement (3, z, y, x) of every voxel, nowhere more than `most`: further away nothing has been read."""
    along_z, along_y, along_x = weights
    rows = torch.matmul(along_y, torch.matmul(control_points, along_x.T))
    return torch.matmul(along_z, rows.flatten(2)).view(3, len(along_z), *rows.shape[2:]).clamp_(-most, most)
