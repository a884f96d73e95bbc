"""What happens to a batch of patches on the device: geometry, floats, normalisation, changes of the voxels' values.

Samples are prepared one after the other, not stacked: each has its own size of region and its own changes, and its
result cannot depend on its neighbours. A batch is a few samples of a million voxels each, so a kernel works for far
longer than its launch takes.

Choices are made on the host, from the samples' keys, and reach the kernels as arguments; only blurs and the control
points of an elastic deformation are copied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.config import Config
from stoker.loader.rng import uniforms
from stoker.tasks.device_copies import Copy, pack
from stoker.tasks.volumes.cases.survey import Normalization, Statistics
from stoker.tasks.volumes.formats.volume import Shape
from stoker.tasks.volumes.intensity import Chances, Changes, blur_arrays, change_voxels, deviation, draw_changes
from stoker.tasks.volumes.patches.patch_collate import PatchBatch
from stoker.tasks.volumes.patches.patches import MOST_DISPLACED, TransformRange

NO_CHANGES = Chances()
Floats = NDArray[np.float64]
ELASTIC = 110  # purpose of these draws; see stoker.tasks.volumes.patches.patches
# On a CPU the points of a patch are resampled in pieces, whose coordinates and corners stay in a core's cache: on one
# core that takes a quarter of the time of the whole patch at once, and half the time of torch's own grid_sample.
CPU_POINTS = 1 << 16
# Types that torch can only store: viewed as signed integers of the same size they can be moved, which keeps their bits.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32}
# The smallest deviation of a patch to divide by; a constant one has none.
SMALLEST_DEVIATION = 1e-6


@dataclass(frozen=True)
class VolumePrepare:
    """Turns a batch of patches, as they were read, into a network's inputs. All that is random about a sample follows
    from its key."""

    normalize: Normalization
    means: Statistics
    stds: Statistics
    """(cases, channels): what is subtracted from a case's voxels, and what divides them."""
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format
    chances: Chances = NO_CHANGES
    """How often voxels are changed; never in validation."""

    def prepare(self, batch: PatchBatch, copy: Copy) -> tuple[Tensor, Tensor]:
        """Inputs (samples, channels, z, y, x) and labels (samples, z, y, x) in int64.

        Outside of a volume the image is 0 *before* normalisation, as in the empty space of a scan, and the label is the
        one that never counts: both are in the rows already."""
        changes = draw_changes(batch.keys, self.chances, batch.layout.channels, batch.patch)
        there = _arrays_on_device(batch, changes, copy)
        # Only what is filled of each row: a sixth of it for most samples.
        voxels_read = batch.shapes.prod(axis=1).tolist()
        rows = [copy(row[: batch.layout.used_bytes(n)]) for row, n in zip(batch.images, voxels_read, strict=True)]
        device, size = rows[0].device, (len(batch), batch.layout.channels, *batch.patch)
        inputs = torch.empty(size, device=device, dtype=self.dtype, memory_format=self.memory_format)
        labels = torch.empty((len(batch), *batch.patch), device=device, dtype=torch.int64)
        for slot, (row, change) in enumerate(zip(rows, changes, strict=True)):
            target = inputs[slot]
            # In place where that is possible.
            in_place = target.dtype == torch.float32 and target.is_contiguous()
            voxels = target if in_place else torch.empty(size[1:], device=device, dtype=torch.float32)
            _cut(batch, slot, row, there[slot], voxels, labels[slot])
            case = int(batch.cases[slot])
            normalise(voxels, self.normalize, self.means[case].tolist(), self.stds[case].tolist())
            change_voxels(voxels, change, int(batch.keys[slot]), there[slot], unit_deviation=self.normalize != "range")
            if not in_place:
                target.copy_(voxels)
        return inputs, labels


def normalise(voxels: Tensor, kind: Normalization, means: Sequence[float], stds: Sequence[float]) -> None:
    """Normalises the voxels (channels, z, y, x) of a patch in place. `means` and `stds` have a number for each channel,
    on the host: they reach the kernels as arguments, and nothing is copied."""
    for channel, mean, std in zip(voxels, means, stds, strict=True):
        if kind == "patch":
            channel.sub_(channel.mean())
            channel.div_(deviation(channel).clamp_(min=SMALLEST_DEVIATION))
        else:
            channel.sub_(mean).mul_(1 / std)


def _cut(
    batch: PatchBatch, slot: int, row: Tensor, there: Mapping[str, Tensor], voxels: Tensor, labels: Tensor
) -> None:
    """Fills the sample's voxels and labels from its region."""
    image, label = batch.layout.parts(row, batch.shapes[slot])
    if batch.plain[slot]:
        order, flips = batch.orders[slot].tolist(), batch.flips[slot].tolist()
        voxels.copy_(turned(image, order, flips))
        labels.copy_(turned(label, order, flips))
        return
    moved, size = None, float(batch.elastic[slot])
    if size > 0:
        moved = displace(there["points"], [there[f"weights.{axis}"] for axis in range(3)], MOST_DISPLACED * size)
    points = Points(batch.patch, batch.matrices[slot], batch.offsets[slot], moved)
    resample(image, label, points, voxels, labels)


def _arrays_on_device(batch: PatchBatch, changes: Sequence[Changes], copy: Copy) -> list[dict[str, Tensor]]:
    """The arrays that samples need on the device besides their rows: few need any, and all of them are one copy."""
    arrays: dict[str, NDArray[Any]] = {}
    for slot, change in enumerate(changes):
        found: dict[str, NDArray[Any]] = dict(blur_arrays(change, batch.patch))
        if batch.elastic[slot] > 0:
            found["points"], weights = draw_deformation(int(batch.keys[slot]), batch.patch, float(batch.elastic[slot]))
            found |= {f"weights.{axis}": one for axis, one in enumerate(weights)}
        arrays |= {f"{slot} {name}": array for name, array in found.items()}
    there: list[dict[str, Tensor]] = [{} for _ in changes]
    if arrays:
        for name, tensor in pack(arrays).to_device(copy).items():
            slot_name, array_name = name.split(" ")
            there[int(slot_name)][array_name] = tensor
    return there


def build_volume_augment(
    config: Config, means: Statistics, stds: Statistics, dtype: torch.dtype = torch.float32
) -> VolumePrepare:
    """The augmentation that the config asks for; `dtype` is what the network's inputs have."""
    chances = Chances(
        config.volume_noise, config.volume_blur, config.volume_brightness, config.volume_contrast,
        config.volume_low_resolution, config.volume_gamma, config.volume_cutout,
    )  # fmt: skip
    return VolumePrepare(config.normalize, means, stds, dtype, memory_format_of(config), chances)


def build_volume_eval(
    config: Config, means: Statistics, stds: Statistics, dtype: torch.dtype = torch.float32
) -> VolumePrepare:
    """The same without anything random, for validation."""
    return VolumePrepare(config.normalize, means, stds, dtype, memory_format_of(config))


def transform_range(config: Config) -> TransformRange:
    """How patches may be placed in their volumes: drawn when they are read, carried out here."""
    return TransformRange(
        flips=config.volume_flips, turns=config.volume_turns, rotation=config.volume_rotation,
        degrees=config.volume_degrees, scaling=config.volume_scaling, scales=config.volume_scales,
        elastic=config.volume_elastic, elastic_size=config.volume_elastic_size,
    )  # fmt: skip


def memory_format_of(config: Config) -> torch.memory_format:
    """The layout of a network's inputs: that of its weights."""
    return torch.channels_last_3d if config.channels_last else torch.contiguous_format


# From a region to a patch.


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


def resample(image: Tensor, label: Tensor, points: Points, inputs: Tensor, labels: Tensor) -> None:
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
        labels.flatten()[taken].copy_(label.flatten().index_select(0, _nearest(found, label.shape)))
        _interpolate(source, found, image.shape[1:], wanted[:, taken])


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


def _interpolate(image: Tensor, coordinates: Sequence[Tensor], shape: Sequence[int], wanted: Tensor) -> None:
    """Fills `wanted` (channels, points) from the eight voxels around each point."""
    # The number of the one with the smallest coordinates, and how far the point is from it along each axis.
    lowest, fractions = torch.zeros_like(coordinates[0], dtype=torch.int32), []
    for place, size in zip(coordinates, shape, strict=True):
        low = place.floor().clamp_(0, max(0, size - 2))
        fractions.append((place - low).clamp_(0, 1))
        lowest.mul_(size).add_(low.to(torch.int32))
    z, y, x = fractions
    _, height, width = shape
    # From a voxel to the next one along each axis; 0 where there is only one.
    up, down, right = (step if size > 1 else 0 for step, size in zip((height * width, width, 1), shape, strict=True))

    def row(voxels: Tensor, start: int) -> Tensor:
        left, next_one = (voxels[at:].index_select(0, lowest) for at in (start, start + right))
        return left.lerp_(next_one, x)

    for voxels, out in zip(image, wanted, strict=True):
        near = row(voxels, 0).lerp_(row(voxels, down), y)
        far = row(voxels, up).lerp_(row(voxels, up + down), y)
        torch.lerp(near, far, z, out=out)


def _spline_weights(length: int, spacing: float) -> Floats:
    """The weights (length, control points) of a cubic B-spline through points that are `spacing` voxels apart."""
    places = np.arange(length) / spacing
    numbers = np.arange(-1, int(places[-1]) + 3)
    away = np.abs(places[:, None] - numbers[None])
    near, far = 2 / 3 - away**2 + away**3 / 2, np.clip(2 - away, 0, None) ** 3 / 6
    return np.where(away < 1, near, far)


def draw_deformation(
    key: int, patch: Shape, size: float
) -> tuple[NDArray[np.float32], tuple[NDArray[np.float32], ...]]:
    """A smooth random displacement of a patch's points, with this standard deviation in voxels; a pure function of the
    key. Control points (3, z, y, x), and for each axis their weights (voxels, control points)."""
    # Control points so far apart that neighbouring voxels do not change places.
    weights = [_spline_weights(length, max(8.0, 8 * size)) for length in patch]
    shape = (3, *(one.shape[1] for one in weights))
    chance, angle = uniforms(np.array([key], np.uint64), ELASTIC, 2 * math.prod(shape)).reshape(2, *shape)
    normals = np.sqrt(-2 * np.log1p(-chance)) * np.cos(2 * np.pi * angle)
    # The share of the control points' variance that is left, on average over the patch.
    share = math.prod(float(np.square(one).sum(axis=1).mean()) for one in weights)
    points = normals * (size / math.sqrt(share))
    return points.astype(np.float32), tuple(one.astype(np.float32) for one in weights)


def displace(control_points: Tensor, weights: Sequence[Tensor], most: float) -> Tensor:
    """The displacement (3, z, y, x) of every voxel, at most `most` anywhere: nothing was read further away."""
    along_z, along_y, along_x = weights
    rows = torch.matmul(along_y, torch.matmul(control_points, along_x.T))
    return torch.matmul(along_z, rows.flatten(2)).view(3, len(along_z), *rows.shape[2:]).clamp_(-most, most)
