"""Exact scores of a whole volume: Dice, IoU and surface Dice of every class, and on demand the score of the Vesuvius
surface competition, by its published definition.

That score is 0.30 TopoScore + 0.35 surface Dice at 2 voxels + 0.35 / (1 + 0.3 VOI), the mean over volumes. Every value
but 0 is foreground; unlabelled voxels are background in both masks.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.core.console import Advance
from stoker.tasks.volumes.formats.opening import library
from stoker.tasks.volumes.formats.volume import as_shape
from stoker.tasks.volumes.scores.topology import Topology, compare_topology

Mask = NDArray[np.bool_]
Spacing = tuple[float, float, float]
ISOTROPIC: Spacing = (1.0, 1.0, 1.0)
ScoreName = Literal["segmentation", "vesuvius-surface"]
SLAB = 32
"""Slices, or corners along z, that are counted together; about ten masks of this height are in memory."""
TOPOLOGY, SURFACE, VARIATION = 0.30, 0.35, 0.35
TOLERANCE = 2.0
"""Voxels."""
ALPHA = 0.3
"""Weight of VOI in its part of the score."""


class Variation(NamedTuple):
    """Variation of information between the components of two masks, in bits."""

    splits: float
    """Bits needed to name a voxel's predicted component once its labelled one is known: components torn apart."""
    merges: float
    """The reverse: components that have grown together."""

    @property
    def score(self) -> float:
        return 1 / (1 + ALPHA * (self.splits + self.merges))


@dataclass(frozen=True)
class SurfaceScore:
    """The competition's score of one volume, and its parts; each from 0 to 1."""

    topology: Topology
    surface_dice: float
    variation: Variation

    @property
    def score(self) -> float:
        return TOPOLOGY * self.topology.score + SURFACE * self.surface_dice + VARIATION * self.variation.score

    def as_dict(self) -> dict[str, Any]:
        return {
            "score": self.score,
            "topo_score": self.topology.score,
            "surface_dice_2": self.surface_dice,
            "voi_score": self.variation.score,
            "voi_splits": self.variation.splits,
            "voi_merges": self.variation.merges,
            "features": {
                name: {"matched": matched, "predicted": predicted, "labelled": labelled, "f1": f1}
                for name, matched, predicted, labelled, f1 in zip(
                    ("components", "tunnels", "cavities"),
                    self.topology.matched, self.topology.predicted, self.topology.labelled, self.topology.f1,
                    strict=True,
                )
            },
        }  # fmt: skip


def score_surface(
    prediction: NDArray[Any],
    label: NDArray[Any],
    ignore: int | None,
    processes: int = 1,
    progress: Advance | None = None,
) -> SurfaceScore:
    """Scores a volume; voxels whose label is `ignore` count as background."""
    ours, theirs = foreground(prediction, label, ignore)
    dice = surface_dice(ours, theirs, TOLERANCE)
    return SurfaceScore(
        topology=compare_topology(ours, theirs, processes, progress),
        surface_dice=1.0 if dice is None else dice,
        variation=variation_of_information(ours, theirs),
    )


def foreground(prediction: NDArray[Any], label: NDArray[Any], ignore: int | None) -> tuple[Mask, Mask]:
    """Both as masks, with background where nothing is labelled."""
    ours, theirs = prediction != 0, label != 0
    if ignore is not None:
        known = label != ignore
        ours &= known
        theirs &= known
    return ours, theirs


def variation_of_information(prediction: Mask, label: Mask) -> Variation:
    """Compares the 26-connected components of two masks, over the voxels that at least one of them sets; background in
    one mask counts as a component."""
    components, union = library("cc3d").connected_components, prediction | label
    ours, theirs = (components(mask, connectivity=26)[union].astype(np.int64) for mask in (prediction, label))
    if not len(ours):
        return Variation(0.0, 0.0)
    _, together = np.unique(ours * (int(theirs.max()) + 1) + theirs, return_counts=True)
    joint = _bits(together)
    # H(ours, theirs) - H(theirs) = H(ours | theirs); rounding must not make it negative.
    return Variation(max(0.0, joint - _bits(np.bincount(theirs))), max(0.0, joint - _bits(np.bincount(ours))))


def _bits(counts: NDArray[np.int64]) -> float:
    """The entropy of a distribution."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


class ClassScores(NamedTuple):
    """The scores of one class, 0 to 1; None if it is neither in the prediction nor in the label."""

    dice: float | None
    iou: float | None
    surface_dice: float | None


@dataclass(frozen=True)
class VolumeScores:
    id: str
    classes: tuple[ClassScores, ...]
    """The scores of the classes 1, 2, …"""
    labelled: float
    """Share of the voxels that have a label and were scored."""
    competition: SurfaceScore | None = None

    @property
    def mean(self) -> ClassScores:
        """The means over the classes that occur; None if none does."""
        return ClassScores(*map(mean_of, zip(*self.classes, strict=True)))

    @property
    def rank(self) -> float:
        """Volumes are sorted by this, the worst first; one without anything to score comes last."""
        if self.competition is not None:
            return self.competition.score
        dice = self.mean.dice
        return 2.0 if dice is None else dice


def score_volume(
    name: str,
    prediction: NDArray[Any],
    label: NDArray[Any],
    *,
    classes: int,
    ignore: int | None,
    tolerance: float = 2.0,
    spacing: Spacing = ISOTROPIC,
) -> VolumeScores:
    """Scores a prediction (z, y, x) of classes. Voxels whose label is `ignore` do not count for Dice and IoU; for
    surfaces, which need neighbours, they are background in both."""
    matrix, known = confusion(prediction, label, classes, ignore)
    scores = []
    for number in range(1, classes):
        both, ours, theirs = matrix[number, number], matrix[:, number].sum(), matrix[number].sum()
        if not ours + theirs:
            scores.append(ClassScores(None, None, None))
            continue
        one, two = prediction == number, label == number
        if ignore is not None:
            one &= label != ignore
        surface = surface_dice(one, two, tolerance, spacing)
        scores.append(ClassScores(float(2 * both / (ours + theirs)), float(both / (ours + theirs - both)), surface))
    return VolumeScores(name, tuple(scores), known / max(1, label.size))


def confusion(
    prediction: NDArray[Any], label: NDArray[Any], classes: int, ignore: int | None
) -> tuple[NDArray[np.int64], int]:
    """How many voxels of each class (row) were given each class (column), and how many are labelled."""
    matrix, known = np.zeros(classes * classes, np.int64), 0
    for begin in range(0, len(label), SLAB):
        ours, theirs = prediction[begin : begin + SLAB], label[begin : begin + SLAB]
        if ignore is not None:
            labelled = theirs != ignore
            ours, theirs = ours[labelled], theirs[labelled]
        known += theirs.size
        pairs = theirs.astype(np.int64).ravel() * classes + ours.ravel()
        matrix += np.bincount(pairs, minlength=classes * classes)
    return matrix.reshape(classes, classes), known


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean over what there is; None if there is nothing."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


# Surface Dice at a tolerance, by DeepMind's definition (Nikolov et al. 2018; the package `surface-distance`): a surface
# element sits on every corner between voxels whose 2 x 2 x 2 neighbours are not all alike. It has the area of the
# surface that marching cubes draws through these eight, and counts if an element of the other surface lies within the
# tolerance. Nothing but background lies outside the volume. The package itself holds two float64 distance maps of the
# whole volume, and uses names that numpy has removed; here a volume is processed in slabs, and areas are looked up at
# the very end, so the result does not depend on the slabs.

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


def surface_dice(one: Mask, two: Mask, tolerance: float, spacing: Spacing = ISOTROPIC) -> float | None:
    """The share of the surfaces of two masks (z, y, x) that is near the other one, by area; None if both are empty.
    Tolerance and spacing have the same unit."""
    assert one.shape == two.shape, "masks of different volumes"
    # Surface elements by the code of their neighbourhood (0 to 255).
    near, every = np.zeros(256, np.int64), np.zeros(256, np.int64)
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
            every += np.bincount(code, minlength=256)
            close = _within(borders[1 - which], inner, reach)[mine]
            near += np.bincount(code[close], minlength=256)
    areas = areas_by_code(spacing)
    whole = float(every @ areas)
    return float(near @ areas) / whole if whole else None


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
    far_z, far_y, far_x = (int(tolerance / step) + 1 for step in spacing)
    found = {}
    for z, y in itertools.product(range(-far_z, far_z + 1), range(-far_y, far_y + 1)):
        for x in range(far_x, -1, -1):
            a, b, c = z * spacing[0], y * spacing[1], x * spacing[2]
            # The distance transform of scipy adds squares in this order: rounding decides ties as it does there.
            if math.sqrt(a * a + b * b + c * c) <= tolerance:
                found[z, y] = x
                break
    return found


def _within(border: Mask, inner: slice, reach: dict[tuple[int, int], int]) -> Mask:
    """Which corners of the slices `inner` have a border corner within reach.

    The ball is put together from lines along x, so its cost grows with its cross-section, not its volume."""
    depth, height, width = inner.stop - inner.start, *border.shape[1:]
    found = np.zeros((depth, height, width), bool)
    lines, radius = border.copy(), 0
    for wanted in sorted(set(reach.values())):
        while radius < wanted:
            radius += 1
            lines[:, :, radius:] |= border[:, :, :-radius]
            lines[:, :, :-radius] |= border[:, :, radius:]
        for z, y in (step for step, x in reach.items() if x == wanted):
            # found[k, j] |= lines[begin + k, j + y], as far as both exist.
            begin = inner.start + z
            k0, k1 = max(0, -begin), min(depth, len(lines) - begin)
            j0, j1 = max(0, -y), min(height, height - y)
            if k0 < k1 and j0 < j1:
                found[k0:k1, j0:j1] |= lines[begin + k0 : begin + k1, j0 + y : j1 + y]
    return found


@cache
def areas_by_code(spacing: Spacing) -> NDArray[np.float64]:
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
            new = {other for other in left if any(sum(map(operator.ne, other, one)) == 1 for one in new)}
            left -= new
        yield frozenset(group)


def _turned_shapes() -> Iterator[tuple[frozenset[_Corner], tuple[_Area, ...]]]:
    """The shapes in all 48 orientations."""
    for corners, pieces in _SHAPES.items():
        for order in itertools.permutations(range(3)):
            for flip in _CORNERS:
                turned = frozenset(
                    as_shape(corner[axis] ^ turn for axis, turn in zip(order, flip, strict=True)) for corner in corners
                )
                yield turned, tuple((piece[order[0]], piece[order[1]], piece[order[2]]) for piece in pieces)
