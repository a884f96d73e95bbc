"""How a sample becomes a square of pixels: a random crop for training, a centred one for validation.

Crops and flips are drawn for a whole batch at once from the samples' keys. The distribution is torchvision's
RandomResizedCrop: up to ten tries of a uniform area and a log-uniform aspect; if none fits, the largest centred crop
within the bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.loader.rng import CROP, FLIP, Keys, uniforms
from stoker.tasks.images.decode.decoding import DecodeMode, Decoding, Interpolation
from stoker.tasks.images.decode.headers import Box

TRIES = 10


class View(Protocol):
    """Turns a sample's bytes into its slot of the batch."""

    @property
    def size(self) -> int: ...

    def draw(self, keys: Keys) -> Any:
        """The random part for the samples with these keys."""

    def decode(self, data: Any, draws: Any, slot: int, out: NDArray[np.uint8]) -> None:
        """Decodes one sample of the batch into its slot; raises BadImage."""


@dataclass(frozen=True)
class RandomCrop:
    """A random resized crop."""

    size: int
    bounds: CropRange
    decoding: Decoding
    mode: DecodeMode = "fast"
    interpolation: Interpolation = "bilinear"

    def draw(self, keys: Keys) -> CropDraws:
        return draw_crops(keys, self.bounds)

    def decode(self, data: Any, draws: CropDraws, slot: int, out: NDArray[np.uint8]) -> None:
        header = self.decoding.read_header(data)
        box = draws.box(slot, header.width, header.height)
        self.decoding.crop_into(data, header, box, out, self.interpolation, self.mode)


@dataclass(frozen=True)
class CentreCrop:
    """The shorter side resized and the middle kept, as torchvision does."""

    size: int
    resize: int
    decoding: Decoding
    interpolation: Interpolation = "bicubic"

    def draw(self, keys: Keys) -> None:  # noqa: ARG002 - nothing about validation is random
        return None

    def decode(self, data: Any, draws: None, slot: int, out: NDArray[np.uint8]) -> None:  # noqa: ARG002
        header = self.decoding.read_header(data)
        self.decoding.faithful_centre_into(data, header, self.resize, out, self.interpolation)


@dataclass(frozen=True)
class CropRange:
    """The area and aspect that a random crop may have."""

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
    """The crop's position between the borders, (samples, 2)."""
    bounds: CropRange

    def box(self, slot: int, width: int, height: int) -> Box:
        """The crop of one sample of the batch, once its size is known."""
        # Plain floats: for ten numbers numpy's overhead would be several times the arithmetic.
        for area_share, aspect in zip(self.area[slot].tolist(), self.aspect[slot].tolist(), strict=True):
            area = area_share * width * height
            crop_width, crop_height = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
            if 0 < crop_width <= width and 0 < crop_height <= height:
                down, right = self.place[slot].tolist()
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
    """Which samples the device should mirror."""
    return uniforms(keys, FLIP, 1)[:, 0] < probability


def _largest_centred(width: int, height: int, aspect: tuple[float, float]) -> Box:
    ratio = width / height
    crop_width, crop_height = width, height
    if ratio < aspect[0]:
        crop_height = round(width / aspect[0])
    elif ratio > aspect[1]:
        crop_width = round(height * aspect[1])
    # With bounds that no image of this size can meet, a side would round to zero.
    crop_width, crop_height = max(1, crop_width), max(1, crop_height)
    return Box((height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width)
