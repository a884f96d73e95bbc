"""Random crops and flips, drawn for a whole batch at once from the samples' keys.

The distribution is torchvision's RandomResizedCrop: up to ten tries of a uniform area and a log-uniform
aspect; where none fits, the largest centred crop within the bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.data.draws import CROP, FLIP, Keys, uniforms

TRIES = 10


class Box(NamedTuple):
    """A rectangle of an image in pixels, in the orientation in which a person sees it."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class CropRange:
    """How large and how oblong a random crop may be."""

    scale: tuple[float, float] = (0.08, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class CropDraws:
    """The random part of a batch's crops, drawn before any image size is known."""

    area: NDArray[np.float64]
    """Share of the image's area for each try, (samples, TRIES)."""
    aspect: NDArray[np.float64]
    """Width / height for each try, (samples, TRIES)."""
    place: NDArray[np.float64]
    """Where between the borders the crop lies, (samples, 2)."""
    bounds: CropRange

    def box(self, sample: int, width: int, height: int) -> Box:
        """The crop of one sample of the batch, now that its size is known."""
        # Plain floats: for ten numbers numpy's overhead would be several times the arithmetic.
        for area_share, aspect in zip(self.area[sample].tolist(), self.aspect[sample].tolist(), strict=True):
            area = area_share * width * height
            crop_width, crop_height = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
            if 0 < crop_width <= width and 0 < crop_height <= height:
                down, right = self.place[sample].tolist()
                top, left = int(down * (height - crop_height + 1)), int(right * (width - crop_width + 1))
                return Box(top, left, crop_height, crop_width)
        return _largest_centred(width, height, self.bounds.aspect)


def draw_crops(keys: Keys, bounds: CropRange) -> CropDraws:
    """The random part of the crops of all samples with these keys."""
    numbers = uniforms(keys, CROP, 2 * TRIES + 2)
    low, high = bounds.scale
    log_low, log_high = np.log(bounds.aspect)
    return CropDraws(
        area=low + (high - low) * numbers[:, :TRIES],
        aspect=np.exp(log_low + (log_high - log_low) * numbers[:, TRIES : 2 * TRIES]),
        place=numbers[:, 2 * TRIES :],
        bounds=bounds,
    )


def draw_flips(keys: Keys, probability: float) -> NDArray[np.bool_]:
    """Which samples are mirrored; the device does it."""
    return uniforms(keys, FLIP, 1)[:, 0] < probability


def _largest_centred(width: int, height: int, aspect: tuple[float, float]) -> Box:
    ratio = width / height
    crop_width, crop_height = width, height
    if ratio < aspect[0]:
        crop_height = round(width / aspect[0])
    elif ratio > aspect[1]:
        crop_width = round(height * aspect[1])
    # Bounds that no image of this size can keep would round to nothing.
    crop_width, crop_height = max(1, crop_width), max(1, crop_height)
    return Box((height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width)
