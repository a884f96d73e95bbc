"""How a patch lies in its volume: drawn before anything is read, so that only the region it needs is read.

Without rotation, scaling and deformation a patch is a box of the volume, whose axes may be swapped and reversed:
exactly its own voxels are read. Otherwise it is a grid of points inside a larger box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import UserError
from stoker.loader.rng import Keys, uniforms
from stoker.tasks.volumes.formats.volume import Region, Shape

# Kinds of choices, as in stoker.loader.rng; far from the numbers there, which are those of images.
PLACE, SPATIAL = 101, 102
_SHRINK = 0.97
MOST_DISPLACED = 3.0
"""Limit of an elastic deformation along an axis, in standard deviations: this much more is read."""
IDENTITY = (0, 1, 2)
NO_FLIPS = (False, False, False)


@dataclass(frozen=True)
class TransformRange:
    """The transforms that a patch may have."""

    flips: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Probability of being reversed along z, y and x."""
    turns: float = 0.0
    """Probability of one, two or three 90° turns about one of `turn_axes`."""
    turn_axes: tuple[int, ...] = (0, 1, 2)
    rotation: float = 0.0
    """Probability of a rotation about all three axes."""
    degrees: tuple[float, float, float] = (30.0, 30.0, 30.0)
    """Largest angles about z, y and x, in both directions."""
    scaling: float = 0.0
    """Probability of being scaled."""
    scales: tuple[float, float] = (0.7, 1.4)
    """Voxels of the volume for one of the patch; the logarithm is uniform, so that both directions are alike."""
    elastic: float = 0.0
    """Probability of an elastic deformation."""
    elastic_size: float = 4.0
    """Standard deviation of its displacements, in voxels."""
    most_read: float = 6.0
    """Voxels read for a patch, in patches. A batch reserves this much, so the few draws that need more are scaled down
    until they fit."""

    def __post_init__(self) -> None:
        chances = (*self.flips, self.turns, self.rotation, self.scaling, self.elastic)
        if not all(0 <= chance <= 1 for chance in chances):
            raise UserError("bad-probability", f"the probabilities are {chances}", why="they lie between 0 and 1")
        if not set(self.turn_axes) <= {0, 1, 2} or (self.turns and not self.turn_axes):
            raise UserError("bad-axes", f"the axes of turns are {self.turn_axes}", why="z, y and x are 0, 1 and 2")
        if self.elastic_size <= 0:
            raise UserError("bad-elastic-size", f"displacements of {self.elastic_size} voxels", why="it is positive")
        if not 0 < self.scales[0] <= self.scales[1] or self.most_read < 1:
            raise UserError("bad-scales", f"scales {self.scales}, most_read {self.most_read}", why="they are positive")

    @property
    def is_plain(self) -> bool:
        """Whether no patch is rotated, scaled or deformed: every one reads its own voxels only."""
        return self.rotation == 0 and self.scaling == 0 and self.elastic == 0

    def most_voxels(self, patch: Shape) -> int:
        """The most voxels that are read for a patch."""
        voxels = patch[0] * patch[1] * patch[2]
        return voxels if self.is_plain else int(self.most_read * voxels)


UNCHANGED = TransformRange()
"""Every patch as it is in its volume."""


@dataclass(frozen=True)
class Transform:
    """Where a patch's voxels come from: rotated and scaled about its centre, then its axes swapped and reversed."""

    order: tuple[int, int, int] = IDENTITY
    """The volume's axis that each axis of the patch runs along."""
    flips: tuple[bool, bool, bool] = NO_FLIPS
    """Which axes of the patch run backwards."""
    angles: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """About z, y and x, in radians."""
    scale: float = 1.0
    elastic: float = 0.0
    """Standard deviation of the displacements of its points, in voxels of the volume; 0: none."""

    @property
    def is_plain(self) -> bool:
        """Whether it only swaps and reverses axes."""
        return self.is_rigid and self.elastic == 0.0

    @property
    def is_rigid(self) -> bool:
        """Whether it neither rotates nor scales."""
        return self.angles == (0.0, 0.0, 0.0) and self.scale == 1.0

    @cached_property
    def matrix(self) -> NDArray[np.float64]:
        """From offsets in the patch to offsets in the volume, both from the centre."""
        oriented = np.zeros((3, 3))
        for axis, (source, is_reversed) in enumerate(zip(self.order, self.flips, strict=True)):
            oriented[source, axis] = -1.0 if is_reversed else 1.0
        return oriented if self.is_rigid else oriented @ (self.scale * _rotation(self.angles))

    def source_shape(self, patch: Shape) -> Shape:
        """The box that a patch takes from the volume, apart from rotation and scaling."""
        shape = [0, 0, 0]
        for axis, source in enumerate(self.order):
            shape[source] = patch[axis]
        return shape[0], shape[1], shape[2]

    def region(self, patch: Shape, start: Shape) -> Region:
        """What has to be read for a patch whose box begins at `start`: all voxels between which it interpolates."""
        source = self.source_shape(patch)
        if self.is_plain:
            z, y, x = (a + size for a, size in zip(start, source, strict=True))
            return Region(start, (z, y, x))
        centre = np.array(start) + (np.array(source) - 1) / 2
        reach = self.reach(patch)
        low, high = np.floor(centre - reach).astype(int), np.ceil(centre + reach).astype(int) + 1
        return Region((int(low[0]), int(low[1]), int(low[2])), (int(high[0]), int(high[1]), int(high[2])))

    def reach(self, patch: Shape) -> NDArray[np.float64]:
        """How far its points may be from the centre, along each axis of the volume."""
        found: NDArray[np.float64] = np.abs(self.matrix) @ ((np.array(patch) - 1) / 2) + MOST_DISPLACED * self.elastic
        return found

    def offset(self, patch: Shape, start: Shape, region: Region) -> NDArray[np.float64]:
        """The place of the patch's first voxel in the region: voxel p of the patch is at `offset + matrix @ p`."""
        centre = np.array(start) + (np.array(self.source_shape(patch)) - 1) / 2 - np.array(region.start)
        found: NDArray[np.float64] = centre - self.matrix @ ((np.array(patch) - 1) / 2)
        return found


def draw_transforms(keys: Keys, bounds: TransformRange, patch: Shape) -> list[Transform]:
    """The transform of each sample; a pure function of its key."""
    return [_drawn(numbers, bounds, patch) for numbers in uniforms(keys, SPATIAL, 13).tolist()]


def _drawn(numbers: Sequence[float], bounds: TransformRange, patch: Shape) -> Transform:
    flips = [chance < probability for chance, probability in zip(numbers[:3], bounds.flips, strict=True)]
    order = list(IDENTITY)
    if numbers[3] < bounds.turns:
        axis = bounds.turn_axes[int(numbers[4] * len(bounds.turn_axes))]
        quarters = 1 + int(numbers[5] * 3)
        first, second = (other for other in range(3) if other != axis)
        if quarters == 2:
            flips[first], flips[second] = not flips[first], not flips[second]
        else:
            order[first], order[second] = order[second], order[first]
            turned = first if quarters == 1 else second
            flips[turned] = not flips[turned]
    angles = (0.0, 0.0, 0.0)
    if numbers[6] < bounds.rotation:
        z, y, x = (np.deg2rad(most) * (2 * u - 1) for most, u in zip(bounds.degrees, numbers[7:10], strict=True))
        angles = (float(z), float(y), float(x))
    scale = 1.0
    if numbers[10] < bounds.scaling:
        low, high = bounds.scales
        scale = float(low * (high / low) ** numbers[11])
    elastic = bounds.elastic_size if numbers[12] < bounds.elastic else 0.0
    made = Transform((order[0], order[1], order[2]), (flips[0], flips[1], flips[2]), angles, scale, elastic)
    most = bounds.most_voxels(patch)
    # The position changes a region by a voxel at most; a box in the middle of two voxels is the largest.
    while not made.is_plain and _most_read(made, patch) > most:
        scale = made.scale if made.is_rigid else made.scale * _SHRINK
        made = replace(made, scale=scale, elastic=made.elastic * _SHRINK)
    return made


def _most_read(transform: Transform, patch: Shape) -> int:
    depth, height, width = (int(size) for size in np.floor(2 * transform.reach(patch)) + 3)
    return depth * height * width


def _rotation(angles: tuple[float, float, float]) -> NDArray[np.float64]:
    """About z, then y, then x."""
    result = np.eye(3)
    for axis, angle in enumerate(angles):
        first, second = (other for other in range(3) if other != axis)
        turn = np.eye(3)
        turn[first, first] = turn[second, second] = np.cos(angle)
        turn[first, second], turn[second, first] = -np.sin(angle), np.sin(angle)
        result = turn @ result
    return result
