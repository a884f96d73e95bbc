"""Cuts through volumes as pictures: the image in grey, and above it labels, predictions or errors in colour.

Colours are Okabe and Ito's, which people with any kind of colour vision can tell apart. Voxels without a label are
darkened and hatched, so that they are not mistaken for background.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.tasks.contact_sheet import Picture, SheetRow
from stoker.tasks.volumes.formats.volume import Volume, slab

Pixels = NDArray[np.uint8]
Plane = NDArray[Any]
AXES = "zyx"
RIGHT, MISSED, INVENTED = (0, 158, 115), (213, 94, 0), (86, 180, 233)
ERROR_LEGEND = "green: right · orange: missed · blue: predicted, but not labelled · hatched: not labelled"
CLASS_COLOURS = ((0, 158, 115), (230, 159, 0), (86, 180, 233), (204, 121, 167), (240, 228, 66), (0, 114, 178))
"""Colours of the classes 1, 2, …; they repeat."""
OPACITY = 0.6
"""Opacity of a colour above the image, which stays visible below it."""
HATCH = 6
"""Pixels from one line to the next."""
PAPER = 255
DARKEST, BRIGHTEST = 0.5, 99.5
"""Percentiles of the image's values that are drawn black and white."""
_SLAB = 32


@dataclass(frozen=True)
class Cut:
    """One plane of a volume, across an axis."""

    axis: int
    position: int
    image: Pixels
    label: Plane
    prediction: Plane
    known: NDArray[np.bool_]
    """Voxels that are labelled."""
    wrong: int
    """Labelled voxels of the plane that were given another class."""

    @property
    def name(self) -> str:
        return f"{AXES[self.axis]} = {self.position}"


def worst_cuts(image: Volume, label: Plane, prediction: Plane, ignore: int | None) -> tuple[Cut, Cut, Cut]:
    """Across each axis the plane with the most wrong voxels; if all are right, that with the most foreground."""
    wrong, foreground = ([np.zeros(size, np.int64) for size in label.shape] for _ in range(2))
    for begin in range(0, len(label), _SLAB):
        part = slice(begin, begin + _SLAB)
        known = _known(label[part], ignore)
        for totals, voxels in (
            (wrong, (label[part] != prediction[part]) & known),
            (foreground, (label[part] != 0) & known),
        ):
            totals[0][part] = voxels.sum((1, 2))
            totals[1] += voxels.sum((0, 2))
            totals[2] += voxels.sum((0, 1))
    cuts = []
    for axis in range(3):
        counts = wrong[axis] if wrong[axis].any() else foreground[axis]
        position = int(counts.argmax())
        plane = label.take(position, axis)
        grey = as_grey(image.read(slab(image.shape, axis, position, position + 1)).squeeze(axis))
        cuts.append(
            Cut(axis, position, grey, plane, prediction.take(position, axis), _known(plane, ignore),
                int(wrong[axis][position]))
        )  # fmt: skip
    return cuts[0], cuts[1], cuts[2]


def _known(label: Plane, ignore: int | None) -> NDArray[np.bool_]:
    return np.ones(label.shape, bool) if ignore is None else label != ignore


def as_grey(plane: Plane) -> Pixels:
    """Values of any range as grey levels; a few outliers are drawn black or white."""
    values = plane.astype(np.float32)
    values = np.where(np.isfinite(values), values, 0)
    low, high = np.percentile(values, (DARKEST, BRIGHTEST))
    spread = float(high - low) or 1.0
    grey: Pixels = np.clip((values - low) / spread * 255, 0, 255).astype(np.uint8)
    return grey


def plain(grey: Pixels) -> Pixels:
    return squared(np.repeat(grey[..., None], 3, axis=2))


def with_classes(grey: Pixels, classes: Plane, known: NDArray[np.bool_] | None = None) -> Pixels:
    """The image with every class except 0 in its colour."""
    pixels = np.repeat(grey[..., None], 3, axis=2).astype(np.float32)
    for number in np.unique(classes):
        if number > 0:
            colour = CLASS_COLOURS[(int(number) - 1) % len(CLASS_COLOURS)]
            _paint(pixels, (classes == number) & (True if known is None else known), colour)
    return _finished(pixels, known)


def with_errors(cut: Cut) -> Pixels:
    """The image with correct, missed and invented voxels; among several classes, one taken for another is missed."""
    pixels = np.repeat(cut.image[..., None], 3, axis=2).astype(np.float32)
    same = cut.label == cut.prediction
    _paint(pixels, cut.known & same & (cut.label != 0), RIGHT)
    _paint(pixels, cut.known & ~same & (cut.label != 0), MISSED)
    _paint(pixels, cut.known & ~same & (cut.label == 0), INVENTED)
    return _finished(pixels, cut.known)


def cuts_row(cuts: Sequence[Cut], title: str) -> SheetRow:
    """Image, label, prediction and errors of the first cut, and the errors of the others."""
    first = cuts[0]
    pictures = [
        Picture(plain(first.image), ("image",), (first.name,)),
        Picture(with_classes(first.image, first.label, first.known), ("label",), (first.name,)),
        Picture(with_classes(first.image, first.prediction), ("prediction",), (first.name,)),
    ]
    pictures += [Picture(with_errors(cut), ("errors",), (f"{cut.name} · {cut.wrong:,} wrong voxels",)) for cut in cuts]
    return SheetRow(tuple(pictures), title)


def squared(pixels: Pixels) -> Pixels:
    """The picture in the middle of a square."""
    height, width = pixels.shape[:2]
    side = max(height, width)
    if height == width:
        return pixels
    square = np.full((side, side, 3), PAPER, np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = pixels
    return square


def _paint(pixels: NDArray[np.float32], where: NDArray[np.bool_], colour: tuple[int, int, int]) -> None:
    pixels[where] = (1 - OPACITY) * pixels[where] + OPACITY * np.array(colour, np.float32)


def _finished(pixels: NDArray[np.float32], known: NDArray[np.bool_] | None) -> Pixels:
    if known is not None:
        rows, columns = np.indices(known.shape)
        lines = (rows + columns) % HATCH == 0
        pixels[~known] *= 0.5
        pixels[~known & lines] = 0.5 * pixels[~known & lines] + 70
    return squared(pixels.round().astype(np.uint8))
