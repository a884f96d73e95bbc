"""Which patch is at a position of an epoch: a pure function of (seed, epoch, position), with no generator's state.

Training: cases take turns, in a new random order for every turn; a labelled voxel of the case is drawn, and the patch
is centred on it, as far as the volume's border allows. Validation: a grid over every case that leaves nothing out.

How a patch lies in its volume is drawn before anything is read, so that only the region it needs is read. Without
rotation, scaling and deformation a patch is a box of the volume, whose axes may be swapped and reversed: only its own
voxels are read. Otherwise it is a grid of points inside a larger box.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import UserError
from stoker.loader.rng import Keys, mix_numbers, sample_keys, uniforms
from stoker.loader.sampler import Positions, Steps, permute
from stoker.tasks.volumes.formats.volume import Region, Shape, as_shape, box_at, sizes_text
from stoker.tasks.volumes.patches.label_index import LabelIndex

Small = Literal["pad", "refuse"]
_TURN = 7
_MOST_COLOURS = 4
# Kinds of choices, as in stoker.loader.rng; far from the numbers there, which are those of images.
PLACE, SPATIAL = 101, 102
_SHRINK = 0.97
MOST_DISPLACED = 3.0
"""Limit of an elastic deformation along an axis, in standard deviations: this much more is read."""
IDENTITY = (0, 1, 2)


@dataclass(frozen=True)
class TransformRange:
    """The transforms that a patch may have."""

    flips: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Probability of being reversed along z, y and x."""
    turns: float = 0.0
    """Probability of one, two or three 90° turns about one of the axes."""
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

    @property
    def is_plain(self) -> bool:
        """Whether no patch is rotated, scaled or deformed: every one reads its own voxels only."""
        return self.rotation == 0 and self.scaling == 0 and self.elastic == 0

    def most_voxels(self, patch: Shape) -> int:
        """The most voxels that are read for a patch."""
        return math.prod(patch) if self.is_plain else int(self.most_read * math.prod(patch))


UNCHANGED = TransformRange()


@dataclass(frozen=True)
class Transform:
    """Where a patch's voxels come from: rotated and scaled about its centre, then with axes swapped and reversed."""

    order: tuple[int, int, int] = IDENTITY
    """The volume's axis that each axis of the patch runs along."""
    flips: tuple[bool, bool, bool] = (False, False, False)
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
        return as_shape(shape)

    def region(self, patch: Shape, start: Shape) -> Region:
        """What has to be read for a patch whose box begins at `start`: all voxels between which it interpolates."""
        source = self.source_shape(patch)
        if self.is_plain:
            return box_at(start, source)
        centre = np.array(start) + (np.array(source) - 1) / 2
        reach = self.reach(patch)
        low, high = np.floor(centre - reach).astype(int), np.ceil(centre + reach).astype(int) + 1
        return Region(as_shape(low.tolist()), as_shape(high.tolist()))

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
        axis = int(numbers[4] * 3)
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
        z, y, x = (float(np.deg2rad(most)) * (2 * u - 1) for most, u in zip(bounds.degrees, numbers[7:10], strict=True))
        angles = (z, y, x)
    scale = 1.0
    if numbers[10] < bounds.scaling:
        low, high = bounds.scales
        scale = float(low * (high / low) ** numbers[11])
    elastic = bounds.elastic_size if numbers[12] < bounds.elastic else 0.0
    made = Transform(as_shape(order), (flips[0], flips[1], flips[2]), angles, scale, elastic)
    most = bounds.most_voxels(patch)
    # The position changes a region by a voxel at most; a box in the middle of two voxels is the largest.
    while not made.is_plain and math.prod(int(size) for size in np.floor(2 * made.reach(patch)) + 3) > most:
        scale = made.scale if made.is_rigid else made.scale * _SHRINK
        made = replace(made, scale=scale, elastic=made.elastic * _SHRINK)
    return made


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


@dataclass(frozen=True)
class Placement:
    """One patch: its place, and the region that is read for it."""

    case: int
    """The case's number in the plan."""
    start: Shape
    """Where its box begins in the volume, rotation and scaling apart; negative if it sticks out."""
    transform: Transform
    region: Region
    """All that is read; it may stick out of the volume, and is padded there."""
    voxel: Shape | None = None
    """The labelled voxel that it was drawn for."""


@dataclass(frozen=True)
class RandomPatches:
    """Patches for training."""

    patch: Shape
    shapes: tuple[Shape, ...]
    labels: LabelIndex
    seed: int = 0
    foreground: float = 1 / 3
    """Share of patches whose voxel is drawn from a class other than 0: a class first, then one of its voxels. For the
    others it is any labelled voxel."""
    transforms: TransformRange = UNCHANGED

    is_random = True
    """A patch that cannot be read may be replaced by one of another case."""

    @property
    def most_voxels(self) -> int:
        """The most voxels that are read for one patch."""
        return self.transforms.most_voxels(self.patch)

    def keys(self, epoch: int, positions: Positions) -> Keys:
        """The key of each position, from which every random choice about its sample follows."""
        return sample_keys(self.seed, epoch, positions, np.zeros_like(positions))

    def cases(self, epoch: int, positions: Positions) -> NDArray[np.int64]:
        """The case at each position: every case once in each turn, so none waits longer than two turns."""
        total = len(self.shapes)
        turns, places = np.divmod(np.asarray(positions, np.int64), total)
        cases = np.empty_like(places)
        of_epoch = mix_numbers(self.seed, epoch)
        for turn in np.unique(turns).tolist():
            mine = turns == turn
            cases[mine] = permute(places[mine], total, mix_numbers(mix_numbers(of_epoch, turn), _TURN))
        return cases

    def place(self, cases: NDArray[np.int64], keys: Keys, positions: Positions) -> list[Placement]:  # noqa: ARG002
        """The patches of these cases for these keys and positions."""
        transforms = draw_transforms(keys, self.transforms, self.patch)
        chances = uniforms(keys, PLACE, 3).tolist()
        return [
            self._placed(case, transform, draws)
            for case, transform, draws in zip(cases.tolist(), transforms, chances, strict=True)
        ]

    def _placed(self, case: int, transform: Transform, draws: Sequence[float]) -> Placement:
        voxel, source = self._voxel(case, draws), transform.source_shape(self.patch)
        # The box around the voxel, moved into the volume; a volume smaller than the box is centred in it.
        start = as_shape(
            min(max(at - length // 2, 0), size - length) if size >= length else -((length - size) // 2)
            for at, length, size in zip(voxel, source, self.shapes[case], strict=True)
        )
        if not transform.is_plain and not _contains(transform, self.patch, start, voxel):
            # Rotated about a centre that the border has moved away from it, the patch would miss its voxel, and with it
            # perhaps everything labelled: it is centred on the voxel, and padded.
            start = as_shape(at - length // 2 for at, length in zip(voxel, source, strict=True))
        return Placement(case, start, transform, transform.region(self.patch, start), voxel)

    @cached_property
    def _classes(self) -> list[tuple[list[int], list[int]]]:
        """For each case, the classes besides 0 that it has, and the running sum of the voxels of all classes. As lists:
        numpy takes longer for a few numbers, and this is asked for every patch."""
        return [
            ([label for label, voxels in enumerate(counts) if label and voxels], list(itertools.accumulate(counts)))
            for counts in self.labels.counts.tolist()
        ]

    def _voxel(self, case: int, draws: Sequence[float]) -> Shape:
        which, of_class, of_voxel = draws
        present, ends = self._classes[case]
        if which < self.foreground and present:
            label = present[int(of_class * len(present))]
        else:
            label = bisect_right(ends, int(of_class * ends[-1]))
        return self.labels[case].voxel(label, of_voxel)


@dataclass(frozen=True)
class GridPatches:
    """Patches that cover every voxel of every case, in order; neighbours overlap where a grid does not fit evenly."""

    patch: Shape
    shapes: tuple[Shape, ...]
    used: int | None = None
    """How many of the patches there are positions for, evenly spread over all of them; None for all."""

    is_random = False

    @property
    def most_voxels(self) -> int:
        return math.prod(self.patch)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        sizes = [int(np.prod([len(axis) for axis in self._axes(shape)])) for shape in self.shapes]
        return np.cumsum(sizes, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.shapes else 0

    def keys(self, epoch: int, positions: Positions) -> Keys:  # noqa: ARG002 - nothing about validation is random
        return np.zeros(len(positions), np.uint64)

    def cases(self, epoch: int, positions: Positions) -> NDArray[np.int64]:  # noqa: ARG002
        return np.searchsorted(self._ends, self._numbers(positions), side="right").astype(np.int64)

    def place(self, cases: NDArray[np.int64], keys: Keys, positions: Positions) -> list[Placement]:  # noqa: ARG002
        placed, plain = [], Transform()
        for case, number in zip(cases.tolist(), self._numbers(positions).tolist(), strict=True):
            axes = self._axes(self.shapes[case])
            first = int(self._ends[case - 1]) if case else 0
            z, y, x = np.unravel_index(number - first, [len(axis) for axis in axes])
            start = (axes[0][int(z)], axes[1][int(y)], axes[2][int(x)])
            placed.append(Placement(case, start, plain, plain.region(self.patch, start)))
        return placed

    def _numbers(self, positions: Positions) -> Positions:
        """The numbers of the patches: with `used`, from the middle of each of that many equal stretches."""
        if self.used is None:
            return positions
        found: Positions = (2 * np.asarray(positions, np.int64) + 1) * len(self) // (2 * self.used)
        return found

    def _axes(self, shape: Shape) -> list[list[int]]:
        return [grid_starts(size, length, overlap=0) for size, length in zip(shape, self.patch, strict=True)]


Patches: TypeAlias = RandomPatches | GridPatches


def grid_starts(size: int, length: int, overlap: float) -> list[int]:
    """Where windows of a length begin to cover an axis: evenly spaced, the last one ends with the axis.

    A window longer than the axis is centred on it, and sticks out on both sides."""
    if size <= length:
        return [-((length - size) // 2)]
    step = max(1, int(length * (1 - overlap)))
    count = -(-(size - length) // step) + 1
    return [round(number * (size - length) / (count - 1)) for number in range(count)]


def training_steps(
    steps_per_epoch: int, batch_size: int, *, accumulate: int = 1, world: int = 1, rank: int = 0
) -> Steps:
    """An epoch of this many updates, whatever the batch: a larger batch sees more patches, and not fewer updates."""
    return Steps(steps_per_epoch * accumulate * batch_size * world, batch_size, world, rank)


def check_patch_fits(patch: Shape, shapes: Sequence[Shape], names: Sequence[str], small: Small) -> None:
    """Refuses volumes smaller than the patch, unless they are to be padded."""
    too_small = [
        (name, shape)
        for name, shape in zip(names, shapes, strict=True)
        if any(size < length for size, length in zip(shape, patch, strict=True))
    ]
    if too_small and small == "refuse":
        name, shape = too_small[0]
        fits = [min(length, *(sizes[axis] for sizes in shapes)) for axis, length in enumerate(patch)]
        others = f" (and {len(too_small) - 1} others)" if len(too_small) > 1 else ""
        is_colour = min(shape) <= _MOST_COLOURS < min(patch)
        raise UserError(
            "patch-larger-than-volume",
            f"the patch is {sizes_text(patch)}; {name} is {sizes_text(shape)}{others}",
            why=f"an axis of length {min(shape)} looks like colours or channels; a volume has the axes z, y, x"
            if is_colour
            else "what lies outside a volume would be padding, which teaches nothing",
            hint="save each channel as a separate volume, and list them as the images of a case"
            if is_colour
            else f"a patch of at most {sizes_text(fits)}, or small_volumes=pad",
        )


def _contains(transform: Transform, patch: Shape, start: Shape, voxel: Shape) -> bool:
    """Whether a voxel is within a patch: at least half a voxel inside its border."""
    centre = np.array(start) + (np.array(transform.source_shape(patch)) - 1) / 2
    place = np.linalg.solve(transform.matrix, np.array(voxel) - centre)
    return bool((np.abs(place) <= (np.array(patch) - 1) / 2).all())
