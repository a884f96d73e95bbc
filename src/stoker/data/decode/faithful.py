"""Resizing as torchvision does it on Pillow images: by Pillow, so that not one grey level differs.

torch's antialiased resize of uint8 takes half the time (480 against 870 µs for crops of ImageNet), but was off by
two levels in one of 650 bilinear crops that were tried, and by up to 20 in bicubic ones: probably because these
overshoot and are clipped between the passes over rows and columns, which Pillow 13 takes in the cheaper order and torch
in a fixed one. So an image is turned by its EXIF orientation before it is resized, not after.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stoker.data.crops import Box

Pixels = NDArray[np.uint8]
RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
# Above this ratio of all resized pixels to those that the crop keeps, only those of the crop are made, which may
# differ by a few levels (the test allows 20): a strip of 100 000 x 1 pixels would otherwise become one of
# 25 600 000 x 256.
_MOST_WASTE = 32


def resize_into(pixels: Pixels, out: Pixels, interpolation: str) -> None:
    """Fills `out` with all of `pixels`, antialiased."""
    size = (out.shape[1], out.shape[0])
    np.copyto(out, np.asarray(Image.fromarray(pixels).resize(size, RESAMPLING[interpolation])))


def centre_into(pixels: Pixels, resize: int, out: Pixels, interpolation: str) -> None:
    """Fills `out` with the middle of `pixels` after their shorter side was resized; black around it where the
    image is smaller than `out`."""
    width, height = resized_size(pixels.shape[1], pixels.shape[0], resize)
    (top, above), (left, beside) = _middle(height, out.shape[0]), _middle(width, out.shape[1])
    kept = Box(top, left, min(height, out.shape[0]), min(width, out.shape[1]))
    if (kept.height, kept.width) != out.shape[:2]:
        out.fill(0)
    image, method = Image.fromarray(pixels), RESAMPLING[interpolation]
    if height * width <= _MOST_WASTE * kept.height * kept.width:
        edges = (kept.left, kept.top, kept.left + kept.width, kept.top + kept.height)
        part = image.resize((width, height), method).crop(edges)
    else:
        part = _resize_part(image, width, height, kept, method)
    np.copyto(out[above : above + kept.height, beside : beside + kept.width], np.asarray(part))


def resized_size(width: int, height: int, resize: int) -> tuple[int, int]:
    """Width and height once the shorter side is `resize` long; torchvision rounds the longer one down."""
    if width <= height:
        return resize, int(resize * height / width)
    return int(resize * width / height), resize


def _middle(length: int, wanted: int) -> tuple[int, int]:
    """Where the crop begins in the image, and the image in the crop, by torchvision's rounding."""
    if length >= wanted:
        return round((length - wanted) / 2.0), 0  # Python's round: halves go to the even number
    return 0, (wanted - length) // 2


def _resize_part(image: Image.Image, width: int, height: int, kept: Box, method: Image.Resampling) -> Image.Image:
    """The kept box of the image as it would be at width x height, without making the rest."""
    across, down = image.width / width, image.height / height
    edges = (
        kept.left * across,
        kept.top * down,
        min((kept.left + kept.width) * across, image.width),
        min((kept.top + kept.height) * down, image.height),
    )
    return image.resize((kept.width, kept.height), method, box=edges)
