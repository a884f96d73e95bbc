"""Cleans a mask after prediction: removes small components, fills holes, closes gaps; slab by slab, in bounded memory.

Components are labelled slab by slab, joined where slabs touch, and judged when all of them are known; slabs are
labelled again for the second pass instead of being kept. What stays in memory is a few numbers for each component.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import UserError, did_you_mean
from stoker.tasks.volumes.formats.opening import library
from stoker.tasks.volumes.formats.volume import Shape, as_shape

StepName = Literal["remove_small", "fill_holes", "closing"]
# Voxels that are labelled at once; see BYTES_PER_VOXEL.
SLAB_VOXELS = 1 << 24
# For each voxel of such a slab: one for the mask, four for its label, the rest for the library's work and the output.
BYTES_PER_VOXEL = 12
_COUNTED_AT_ONCE = 1 << 21
LARGEST_RADIUS = 8
_NUMBERS = {"remove_small": "voxels, as in remove_small=100", "fill_holes": "", "closing": "a radius, as in closing=1"}
"""What the number of a step is; empty for one without a number."""


class Planes(Protocol):
    """A mask that is read and written plane by plane."""

    @property
    def shape(self) -> Shape: ...

    def planes(self, start: int, stop: int) -> NDArray[Any]: ...

    def write_planes(self, start: int, voxels: NDArray[Any]) -> None: ...


class ArrayPlanes:
    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    @property
    def shape(self) -> Shape:
        return as_shape(self.array.shape)

    def planes(self, start: int, stop: int) -> NDArray[Any]:
        return self.array[start:stop].copy()

    def write_planes(self, start: int, voxels: NDArray[Any]) -> None:
        self.array[start : start + len(voxels)] = voxels


@dataclass(frozen=True)
class PostStep:
    name: StepName
    number: int = 0
    """Voxels of the smallest component that stays; radius of the closing."""

    def __str__(self) -> str:
        return f"{self.name}={self.number}" if _NUMBERS[self.name] else self.name


def parse_chain(text: str) -> tuple[PostStep, ...]:
    """`remove_small=100,fill_holes,closing=1`, in this order; raises UserError."""
    steps = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in word.partition("="))
        if name not in _NUMBERS:
            raise UserError(
                "unknown-post-step",
                f"predict_postprocess has the step {name!r}",
                why=f"known are {', '.join(_NUMBERS)}",
                hint=did_you_mean(name, _NUMBERS) or "remove_small=100,fill_holes,closing=1",
            )
        seen = f"predict_postprocess has {word!r}"
        if bool(equals) != bool(_NUMBERS[name]) or (equals and not (value.isdecimal() and int(value) > 0)):
            raise UserError("bad-post-step", seen, why=f"{name} takes {_NUMBERS[name] or 'no number'}")
        if name == "closing" and int(value) > LARGEST_RADIUS:
            raise UserError("bad-post-step", seen, why=f"radii up to {LARGEST_RADIUS} are supported")
        steps.append(PostStep(name, int(value) if equals else 0))  # type: ignore[arg-type]
    return tuple(steps)


def check_chain(chain: Sequence[PostStep], classes: int) -> None:
    """Refuses steps that mean nothing for this number of classes."""
    strange = [step.name for step in chain if step.name != "remove_small"]
    if classes > 2 and strange:
        raise UserError(
            "post-step-for-two-classes",
            f"predict_postprocess has {', '.join(strange)}, and the network knows {classes} classes",
            why="it is not defined which of them a hole or a gap belongs to",
            hint="predict_postprocess=remove_small=100",
        )


def apply_step(step: PostStep, source: Planes, target: Planes, slab_voxels: int = SLAB_VOXELS) -> None:
    """Writes the mask after one step to `target`, which is another one than `source`."""
    if step.name == "remove_small":
        _remove_small(source, target, step.number, slab_voxels)
    elif step.name == "fill_holes":
        _fill_holes(source, target, slab_voxels)
    else:
        _close(source, target, step.number, slab_voxels)


def post_processed(mask: NDArray[Any], chain: Sequence[PostStep]) -> NDArray[Any]:
    """A mask in memory after the whole chain."""
    for step in chain:
        source, target = ArrayPlanes(mask), ArrayPlanes(np.empty_like(mask))
        apply_step(step, source, target)
        mask = target.array
    return mask


def working_bytes(shape: Shape, chain: Sequence[PostStep]) -> int:
    """Memory that the chain takes at most, apart from a few numbers for each component."""
    planes = min(shape[0], _planes_at_once(shape, SLAB_VOXELS))
    # A slab for closing has its margins on both sides.
    margins = max((4 * step.number for step in chain if step.name == "closing"), default=0)
    return (planes + margins) * shape[1] * shape[2] * BYTES_PER_VOXEL if chain else 0


def _remove_small(source: Planes, target: Planes, smallest: int, slab_voxels: int) -> None:
    """Removes 26-connected components of fewer voxels; voxels of different classes are never connected."""
    found = _Components(source, lambda mask: mask, 26, slab_voxels)
    sizes = found.totals(found.voxels)
    for start, mask, labels, first in found.slabs():
        keep = sizes[first : first + int(labels.max()) + 1] >= smallest
        keep[0] = True
        mask[~keep[labels]] = 0
        target.write_planes(start, mask)


def _fill_holes(source: Planes, target: Planes, slab_voxels: int) -> None:
    """Fills background that no path along faces connects with the volume's border."""
    found = _Components(source, lambda mask: (mask == 0).astype(np.uint8), 6, slab_voxels)
    outside = found.totals(found.at_border) > 0
    for start, mask, labels, first in found.slabs():
        hole = ~outside[first : first + int(labels.max()) + 1]
        hole[0] = False
        mask[hole[labels]] = 1
        target.write_planes(start, mask)


class _Components:
    """The connected components of a mask that is read slab by slab.

    Component 1 … n of a slab has the number `first + 1` … `first + n`; number `first` is the slab's background."""

    def __init__(
        self, source: Planes, of: Callable[[NDArray[Any]], NDArray[Any]], neighbours: Literal[6, 26], slab_voxels: int
    ) -> None:
        self._label: Callable[[NDArray[Any]], NDArray[Any]] = partial(
            library("cc3d").connected_components, connectivity=neighbours
        )
        self._source, self._of = source, of
        self._depth, self._planes = source.shape[0], _planes_at_once(source.shape, slab_voxels)
        counts: list[NDArray[np.int64]] = []
        borders: list[NDArray[np.int64]] = []
        pairs: list[NDArray[np.int64]] = []
        self._firsts: list[int] = []
        first, before = 0, None
        for start, _, voxels, labels in self._labelled():
            total = int(labels.max()) + 1
            self._firsts.append(first)
            counts.append(_count(labels, total))
            borders.append(self._touching(labels, total, start))
            if before is not None:
                pairs.append(_touching_pairs(*before, voxels[0], labels[0].astype(np.int64) + first, neighbours))
            before = voxels[-1].copy(), labels[-1].astype(np.int64) + first
            first += total
        self.voxels, self.at_border = np.concatenate(counts), np.concatenate(borders)
        self._roots = _joined(first, np.concatenate(pairs) if pairs else np.empty((0, 2), np.int64))

    def totals(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each number, the sum over everything that is connected with it."""
        sums = np.bincount(self._roots, weights=values, minlength=len(self._roots))
        return sums[self._roots].astype(np.int64)

    def slabs(self) -> Iterator[tuple[int, NDArray[Any], NDArray[Any], int]]:
        """Each slab again: where it begins, its mask, its labels, and the number of its background."""
        for first, (start, mask, _, labels) in zip(self._firsts, self._labelled(), strict=True):
            yield start, mask, labels, first

    def _labelled(self) -> Iterator[tuple[int, NDArray[Any], NDArray[Any], NDArray[Any]]]:
        for start in range(0, self._depth, self._planes):
            mask = self._source.planes(start, min(start + self._planes, self._depth))
            voxels = self._of(mask)
            yield start, mask, voxels, self._label(voxels)

    def _touching(self, labels: NDArray[Any], total: int, start: int) -> NDArray[np.int64]:
        faces = [labels[:, 0], labels[:, -1], labels[:, :, 0], labels[:, :, -1]]
        faces += [labels[0]] if start == 0 else []
        faces += [labels[-1]] if start + len(labels) == self._depth else []
        touching = np.zeros(total, np.int64)
        for face in faces:
            touching[np.unique(face)] = 1
        return touching


def _count(labels: NDArray[Any], total: int) -> NDArray[np.int64]:
    """Voxels of each label; numpy widens what it counts to eight bytes, so a few planes at a time."""
    counts = np.zeros(total, np.int64)
    flat = labels.reshape(-1)
    for begin in range(0, flat.size, _COUNTED_AT_ONCE):
        part = np.bincount(flat[begin : begin + _COUNTED_AT_ONCE])
        counts[: len(part)] += part
    return counts


def _touching_pairs(
    values: NDArray[Any], numbers: NDArray[np.int64], next_values: NDArray[Any], next_numbers: NDArray[np.int64],
    neighbours: Literal[6, 26],
) -> NDArray[np.int64]:  # fmt: skip
    """(pairs, 2): components of two adjacent planes that touch."""
    height, width = values.shape
    shifts = [(0, 0)] if neighbours == 6 else list(itertools.product((-1, 0, 1), (-1, 0, 1)))
    found = []
    for dy, dx in shifts:
        here = slice(max(0, -dy), height - max(0, dy)), slice(max(0, -dx), width - max(0, dx))
        there = slice(max(0, dy), height - max(0, -dy)), slice(max(0, dx), width - max(0, -dx))
        touching = (values[here] != 0) & (values[here] == next_values[there])
        # As one number each: unique rows take far longer to find.
        found.append(np.unique(numbers[here][touching] << 32 | next_numbers[there][touching]))
    pairs = np.unique(np.concatenate(found))
    return np.stack([pairs >> 32, pairs & 0xFFFFFFFF], axis=1)


def _joined(count: int, pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each number, the smallest that it is connected with."""
    roots = list(range(count))

    def root_of(number: int) -> int:
        while roots[number] != number:
            roots[number] = roots[roots[number]]
            number = roots[number]
        return number

    for one, other in pairs.tolist():
        a, b = root_of(one), root_of(other)
        roots[max(a, b)] = min(a, b)
    return np.array([root_of(number) for number in range(count)], np.int64)


def _close(source: Planes, target: Planes, radius: int, slab_voxels: int) -> None:
    """Dilation and then erosion by a ball; beyond the volume there is background, which closing never adds to."""
    depth = source.shape[0]
    planes = _planes_at_once(source.shape, slab_voxels)
    ball = [
        offset
        for offset in itertools.product(range(-radius, radius + 1), repeat=3)
        if sum(step * step for step in offset) <= radius * radius
    ]
    # A voxel of the result depends on those within two radii.
    margin = 2 * radius
    inner = slice(margin, -margin)
    for start in range(0, depth, planes):
        stop = min(start + planes, depth)
        low, high = max(0, start - margin), min(depth, stop + margin)
        mask = source.planes(low, high) != 0
        padded = np.pad(mask, [(margin - (start - low), margin - (high - stop)), (margin, margin), (margin, margin)])
        closed = ~_dilated(~_dilated(padded, ball), ball)
        target.write_planes(start, closed[inner, inner, inner].astype(np.uint8))


def _dilated(mask: NDArray[np.bool_], ball: Sequence[tuple[int, ...]]) -> NDArray[np.bool_]:
    """Every voxel with a set voxel within the ball; beyond the array none are set."""
    grown = np.zeros_like(mask)
    for offset in ball:
        here = tuple(slice(max(0, -step), size - max(0, step)) for step, size in zip(offset, mask.shape, strict=True))
        there = tuple(slice(max(0, step), size - max(0, -step)) for step, size in zip(offset, mask.shape, strict=True))
        grown[there] |= mask[here]
    return grown


def _planes_at_once(shape: Shape, slab_voxels: int) -> int:
    return max(1, slab_voxels // (shape[1] * shape[2]))
