"""Which patch is at a position of an epoch: a pure function of (seed, epoch, position), and never a generator's state.

Training: cases take turns, in an order drawn anew for every turn; a labelled voxel of the case is drawn, and the patch
is centred on it, as far as the volume's border allows. Validation: a grid over every case that leaves nothing out.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import UserError
from stoker.loader.rng import Keys, mix_numbers, sample_keys, uniforms
from stoker.loader.sampler import Positions, Steps, permute
from stoker.tasks.volumes.formats.volume import Region, Shape
from stoker.tasks.volumes.patches.label_index import LabelIndex
from stoker.tasks.volumes.patches.transforms import PLACE, UNCHANGED, Transform, TransformRange, draw_transforms

Small = Literal["pad", "refuse"]
_TURN = 7
_MOST_COLOURS = 4


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


class Patches(Protocol):
    """The patches of a split."""

    @property
    def patch(self) -> Shape: ...

    @property
    def most_voxels(self) -> int:
        """The most voxels that are read for one patch."""

    @property
    def is_random(self) -> bool:
        """Whether a patch that cannot be read may be replaced by one of another case."""

    def keys(self, epoch: int, positions: Positions) -> Keys:
        """The key of each position, from which every random choice about its sample follows."""

    def cases(self, epoch: int, positions: Positions) -> NDArray[np.int64]:
        """The case at each position."""

    def place(self, cases: NDArray[np.int64], keys: Keys, positions: Positions) -> list[Placement]:
        """The patches of these cases for these keys and positions."""


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

    @property
    def most_voxels(self) -> int:
        return self.transforms.most_voxels(self.patch)

    def keys(self, epoch: int, positions: Positions) -> Keys:
        return sample_keys(self.seed, epoch, positions, np.zeros_like(positions))

    def cases(self, epoch: int, positions: Positions) -> NDArray[np.int64]:
        """Every case once in each turn: no case waits longer than two turns for its next patch."""
        total = len(self.shapes)
        turns, places = np.divmod(np.asarray(positions, np.int64), total)
        cases = np.empty_like(places)
        of_epoch = mix_numbers(self.seed, epoch)
        for turn in np.unique(turns).tolist():
            mine = turns == turn
            cases[mine] = permute(places[mine], total, mix_numbers(mix_numbers(of_epoch, turn), _TURN))
        return cases

    def place(self, cases: NDArray[np.int64], keys: Keys, positions: Positions) -> list[Placement]:  # noqa: ARG002
        transforms = draw_transforms(keys, self.transforms, self.patch)
        chances = uniforms(keys, PLACE, 3).tolist()
        return [
            self._placed(case, transform, draws)
            for case, transform, draws in zip(cases.tolist(), transforms, chances, strict=True)
        ]

    def _placed(self, case: int, transform: Transform, draws: Sequence[float]) -> Placement:
        shape, voxel = self.shapes[case], self._voxel(case, draws)
        source = transform.source_shape(self.patch)
        start = _start_around(voxel, source, shape)
        if not transform.is_plain and not _contains(transform, self.patch, start, voxel):
            # Rotated about a centre that the border has moved away from it, the patch would miss its voxel, and with it
            # perhaps everything labelled: it is centred on the voxel, and padded.
            start = _centred(voxel, source)
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
    """Patches that cover every voxel of every case, in order; neighbours overlap."""

    patch: Shape
    shapes: tuple[Shape, ...]
    overlap: float = 0.0
    """Share of a patch that overlaps the next one, at least."""

    is_random = False

    def __post_init__(self) -> None:
        if not 0 <= self.overlap < 1:
            raise UserError("bad-overlap", f"the overlap is {self.overlap}", why="it is a share of the patch below 1")

    @property
    def most_voxels(self) -> int:
        return self.patch[0] * self.patch[1] * self.patch[2]

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        sizes = [int(np.prod([len(axis) for axis in self._axes(shape)])) for shape in self.shapes]
        return np.cumsum(sizes, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.shapes else 0

    def keys(self, epoch: int, positions: Positions) -> Keys:  # noqa: ARG002 - nothing about validation is random
        return np.zeros(len(positions), np.uint64)

    def cases(self, epoch: int, positions: Positions) -> NDArray[np.int64]:  # noqa: ARG002
        return np.searchsorted(self._ends, positions, side="right").astype(np.int64)

    def place(self, cases: NDArray[np.int64], keys: Keys, positions: Positions) -> list[Placement]:  # noqa: ARG002
        placed, plain = [], Transform()
        for case, position in zip(cases.tolist(), positions.tolist(), strict=True):
            axes = self._axes(self.shapes[case])
            first = int(self._ends[case - 1]) if case else 0
            z, y, x = np.unravel_index(position - first, [len(axis) for axis in axes])
            start = (axes[0][int(z)], axes[1][int(y)], axes[2][int(x)])
            placed.append(Placement(case, start, plain, plain.region(self.patch, start)))
        return placed

    def starts(self, case: int) -> list[Shape]:
        """Where the patches of a case begin, in their order."""
        return [(z, y, x) for z, y, x in itertools.product(*self._axes(self.shapes[case]))]

    def _axes(self, shape: Shape) -> list[list[int]]:
        return [grid_starts(size, length, self.overlap) for size, length in zip(shape, self.patch, strict=True)]


@dataclass(frozen=True)
class SomeOf:
    """A part of the patches of a grid, evenly spread over all of it."""

    all: Patches
    total: int
    used: int

    is_random = False

    @property
    def patch(self) -> Shape:
        return self.all.patch

    @property
    def most_voxels(self) -> int:
        return self.all.most_voxels

    def keys(self, epoch: int, positions: Positions) -> Keys:
        return self.all.keys(epoch, self._at(positions))

    def cases(self, epoch: int, positions: Positions) -> NDArray[np.int64]:
        return self.all.cases(epoch, self._at(positions))

    def place(self, cases: NDArray[np.int64], keys: Keys, positions: Positions) -> list[Placement]:
        return self.all.place(cases, keys, self._at(positions))

    def _at(self, positions: Positions) -> Positions:
        """From the middle of each of `used` equal stretches."""
        found: Positions = (2 * np.asarray(positions, np.int64) + 1) * self.total // (2 * self.used)
        return found


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
            f"the patch is {_by(patch)}; {name} is {_by(shape)}{others}",
            why=f"an axis of length {min(shape)} looks like colours or channels; a volume has the axes z, y, x"
            if is_colour
            else "what lies outside a volume would be padding, which teaches nothing",
            hint="save each channel as a volume of its own, and list them as the images of a case"
            if is_colour
            else f"a patch of at most {_by(fits)}, or small_volumes=pad",
        )


def check_labelled(labels: LabelIndex, names: Sequence[str]) -> list[int]:
    """The cases with a labelled voxel; raises UserError if there is none."""
    labelled = np.flatnonzero(labels.counts.sum(axis=1)).tolist()
    if not labelled:
        raise UserError(
            "no-labelled-voxel",
            f"none of the {len(names)} volumes to train on has a labelled voxel: {', '.join(names[:5])}",
            why="every voxel has the ignore label",
            hint="check the ignore label, and that train_labels has the labels",
        )
    return labelled


def _start_around(voxel: Shape, source: Shape, shape: Shape) -> Shape:
    """The box around a voxel, moved into the volume; a volume smaller than the box is centred in it."""
    starts = []
    for at, length, size in zip(voxel, source, shape, strict=True):
        starts.append(min(max(at - length // 2, 0), size - length) if size >= length else -((length - size) // 2))
    return starts[0], starts[1], starts[2]


def _centred(voxel: Shape, source: Shape) -> Shape:
    z, y, x = (at - length // 2 for at, length in zip(voxel, source, strict=True))
    return z, y, x


def _contains(transform: Transform, patch: Shape, start: Shape, voxel: Shape) -> bool:
    """Whether a voxel is within a patch: at least half a voxel inside its border."""
    centre = np.array(start) + (np.array(transform.source_shape(patch)) - 1) / 2
    place = np.linalg.solve(transform.matrix, np.array(voxel) - centre)
    return bool((np.abs(place) <= (np.array(patch) - 1) / 2).all())


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
