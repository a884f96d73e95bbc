"""Surface Dice at a tolerance, by DeepMind's definition (Nikolov et al. 2018; the package `surface-distance`).

A surface element sits on every corner between voxels whose 2 x 2 x 2 neighbours are not all alike. It has the area of
the surface that marching cubes draws through these eight, and counts if an element of the other surface lies within the
tolerance. Nothing but background lies outside the volume. The package itself holds two float64 distance maps of the
whole volume, and uses names that numpy has removed; here a volume goes by in slabs, and areas are looked up at the very
end, so the result does not depend on the slabs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Spacing = tuple[float, float, float]
ISOTROPIC: Spacing = (1.0, 1.0, 1.0)
SLAB = 32
"""Corners along z that are looked at together; about ten masks of this height are in memory."""

_Corner = tuple[int, int, int]
_CORNERS: tuple[_Corner, ...] = tuple(itertools.product((0, 1), repeat=3))  # type: ignore[arg-type]
_Area = tuple[float, float, float]
# The pieces of surface around each connected group of up to four corners of a cube, cut through the middle of its
# edges: the areas that they show along z, y and x, in eighths. A group is one of these shapes, turned or mirrored;
# larger ones are the holes in a full cube, which have the same surface.
_SHAPES: dict[tuple[_Corner, ...], tuple[_Area, ...]] = {
    ((0, 0, 0),): ((1, 1, 1),),
    ((0, 0, 0), (0, 0, 1)): ((2, 2, 0), (2, 2, 0)),
    ((0, 0, 0), (0, 0, 1), (0, 1, 0)): ((4, 0, 0), (2, 2, 2), (1, 1, 1)),
    ((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)): ((4, 0, 0), (4, 0, 0)),
    ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)): ((2, 2, 2), (2, 2, 2), (1, 1, 1), (1, 1, 1)),
    ((0, 1, 1), (1, 1, 1), (1, 1, 0), (1, 0, 0)): ((0, 2, 2), (2, 0, 2), (3, 3, 3), (1, 1, 1)),
}


class SurfaceCounts(NamedTuple):
    """Surface elements of two masks by the code of their neighbourhood (0 to 255)."""

    near: NDArray[np.int64]
    """(2, 256): elements of either mask with one of the other within the tolerance."""
    all: NDArray[np.int64]

    def dice(self, spacing: Spacing = ISOTROPIC) -> float | None:
        """The share of the surface that is near the other one, by area; None if neither mask has a surface."""
        areas = areas_by_code(spacing)
        whole = float(self.all.sum(0) @ areas)
        return float(self.near.sum(0) @ areas) / whole if whole else None


def surface_dice(one: Mask, two: Mask, tolerance: float, spacing: Spacing = ISOTROPIC) -> float | None:
    """Surface Dice of two masks, 0 to 1; None if both are empty. Tolerance and spacing have the same unit."""
    return count_surfaces(one, two, tolerance, spacing).dice(spacing)


def count_surfaces(one: Mask, two: Mask, tolerance: float, spacing: Spacing = ISOTROPIC) -> SurfaceCounts:
    """The surface elements of two masks of the same shape (z, y, x)."""
    assert one.shape == two.shape, "masks of different volumes"
    near, every = np.zeros((2, 256), np.int64), np.zeros((2, 256), np.int64)
    reach = _reach(tolerance, spacing)
    halo = max((abs(z) for z, _ in reach), default=0)
    corners = one.shape[0] + 1
    for begin in range(0, corners, SLAB):
        end = min(begin + SLAB, corners)
        first, last = max(0, begin - halo), min(corners, end + halo)
        codes = [_codes(mask, first, last) for mask in (one, two)]
        borders = [(code > 0) & (code < 255) for code in codes]
        inner = slice(begin - first, end - first)
        for which in (0, 1):
            mine = borders[which][inner]
            code = codes[which][inner][mine]
            every[which] += np.bincount(code, minlength=256)
            close = _within(borders[1 - which], inner, reach)[mine]
            near[which] += np.bincount(code[close], minlength=256)
    return SurfaceCounts(near, every)


def _codes(mask: Mask, first: int, last: int) -> NDArray[np.uint8]:
    """The neighbourhood of the corners `first` to `last` along z and all along y and x: a bit for each voxel."""
    depth, height, width = mask.shape
    low, high = max(0, first - 1), min(depth, last)
    padded = np.zeros((last - first + 1, height + 2, width + 2), np.uint8)
    padded[low - (first - 1) : high - (first - 1), 1:-1, 1:-1] = mask[low:high]
    codes = np.zeros((last - first, height + 1, width + 1), np.uint8)
    for bit, (z, y, x) in enumerate(_CORNERS):
        codes |= padded[z : z + last - first, y : y + height + 1, x : x + width + 1] << np.uint8(bit)
    return codes


def _reach(tolerance: float, spacing: Spacing) -> dict[tuple[int, int], int]:
    """How far along x the tolerance reaches for every step along z and y that it allows."""
    far_z, far_y = (int(tolerance / step) + 1 for step in spacing[:2])
    found = {}
    for z, y in itertools.product(range(-far_z, far_z + 1), range(-far_y, far_y + 1)):
        x = int(tolerance / spacing[2]) + 1
        while x >= 0 and not _distance((z, y, x), spacing) <= tolerance:
            x -= 1
        if x >= 0:
            found[z, y] = x
    return found


def _distance(step: tuple[int, int, int], spacing: Spacing) -> float:
    # Squares are added in this order by the distance transform of scipy: rounding decides ties as it does there.
    z, y, x = (one * size for one, size in zip(step, spacing, strict=True))
    return math.sqrt(z * z + y * y + x * x)


def _within(border: Mask, inner: slice, reach: dict[tuple[int, int], int]) -> Mask:
    """Which corners of the slices `inner` have a border corner within reach.

    The ball is put together from lines along x, so it costs its cross-section and not its volume."""
    found = np.zeros((inner.stop - inner.start, *border.shape[1:]), bool)
    lines, radius = border.copy(), 0
    for wanted in sorted(set(reach.values())):
        while radius < wanted:
            radius += 1
            lines[:, :, radius:] |= border[:, :, :-radius]
            lines[:, :, :-radius] |= border[:, :, radius:]
        for (z, y), x in reach.items():
            if x == wanted:
                _or_shifted(found, lines, inner.start, z, y)
    return found


def _or_shifted(found: Mask, lines: Mask, start: int, z: int, y: int) -> None:
    """found[k, j] |= lines[start + k + z, j + y], as far as both exist."""
    depth, height = len(found), found.shape[1]
    k0, k1 = max(0, -(start + z)), min(depth, len(lines) - start - z)
    j0, j1 = max(0, -y), min(height, height - y)
    if k0 < k1 and j0 < j1:
        found[k0:k1, j0:j1] |= lines[start + z + k0 : start + z + k1, j0 + y : j1 + y]


@cache
def areas_by_code(spacing: Spacing = ISOTROPIC) -> NDArray[np.float64]:
    """The area of the surface through a 2 x 2 x 2 neighbourhood, for its 256 codes."""
    known = dict(_turned_shapes())
    sides = np.array([spacing[1] * spacing[2], spacing[0] * spacing[2], spacing[0] * spacing[1]])
    areas = np.zeros(256)
    for code in range(256):
        inside = {corner for bit, corner in enumerate(_CORNERS) if code >> bit & 1}
        if len(inside) > 4:
            inside = set(_CORNERS) - inside
        pieces = [piece for group in _groups(inside) for piece in known[group]]
        areas[code] = sum(float(np.linalg.norm(np.array(piece) / 8 * sides)) for piece in pieces)
    areas.setflags(write=False)
    return areas


def _groups(corners: set[_Corner]) -> Iterator[frozenset[_Corner]]:
    """The parts of a set of corners that are connected along edges."""
    left = set(corners)
    while left:
        group, new = set(), {left.pop()}
        while new:
            group |= new
            new = {other for other in left if any(sum(map(_differs, other, one)) == 1 for one in new)}
            left -= new
        yield frozenset(group)


def _differs(a: int, b: int) -> bool:
    return a != b


def _turned_shapes() -> Iterator[tuple[frozenset[_Corner], tuple[_Area, ...]]]:
    """The shapes in all 48 orientations."""
    for corners, pieces in _SHAPES.items():
        for order in itertools.permutations(range(3)):
            for flip in _CORNERS:
                turned = frozenset(_turn(corner, order, flip) for corner in corners)
                yield turned, tuple(_reorder(piece, order) for piece in pieces)


def _turn(corner: _Corner, order: tuple[int, ...], flip: _Corner) -> _Corner:
    z, y, x = (corner[axis] ^ turned for axis, turned in zip(order, flip, strict=True))
    return z, y, x


def _reorder(piece: _Area, order: tuple[int, ...]) -> _Area:
    z, y, x = (piece[axis] for axis in order)
    return z, y, x
