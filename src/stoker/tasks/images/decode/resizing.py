"""Resizing decoded pixels into their slot of the batch: antialiased by torch, exactly as Pillow does, or as a draft."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any, Literal

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stoker.tasks.images.decode.headers import Box

Interpolation = Literal["bilinear", "bicubic"]
Slot = NDArray[np.uint8]
RESAMPLING: dict[Interpolation, Image.Resampling] = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
# Above this ratio of all resized pixels to those that the crop keeps, only those of the crop are made, which may
# differ by a few levels (the test allows 20): a strip of 100 000 x 1 pixels would otherwise become one of
# 25 600 000 x 256.
_MOST_WASTE = 32
# Larger crops are rare, and the memory for packing them is freed.
_KEPT_BYTES = 16 << 20
_local = threading.local()
# Each worker has its own core: threads of OpenCV would only compete with it.
cv2.setNumThreads(0)


def antialias_into(pixels: Slot, out: Slot, interpolation: Interpolation) -> None:
    """Fills `out` with all of `pixels`, with Pillow's filters and other rounding: a few hundredths of a grey level from
    Pillow on average."""
    source, target = _as_image(pack(pixels)), _as_image(out)
    _antialiasing()[interpolation](source, out.shape[:2], False, None, None, out=target)


@cache
def _antialiasing() -> dict[Interpolation, Any]:
    """The operators behind torch.nn.functional.interpolate(antialias=True), which has no `out`: it returns one plane
    per colour, and takes more than twice as long for it (results/resize). On x86 they run in the calling thread alone,
    and without the GIL."""
    import torch

    return {"bilinear": torch._C._nn._upsample_bilinear2d_aa, "bicubic": torch._C._nn._upsample_bicubic2d_aa}


@cache
def _from_numpy() -> Any:
    """Imported only when needed: the processes that pack images decode them, too, and importing torch would take longer
    than starting them."""
    import torch

    return torch.from_numpy


def _as_image(pixels: Slot) -> Any:
    """A tensor that is a view in the order that torch expects: 1 x channels x rows x columns."""
    return _from_numpy()(pixels[None]).permute(0, 3, 1, 2)


def pack(pixels: Slot) -> Slot:
    """The pixels without gaps between the rows. torch would close them too, but in fresh memory and with all its
    threads, whose cores belong to the other workers."""
    if pixels.flags.c_contiguous and pixels.flags.writeable:
        return pixels
    size = pixels.size
    buffer: Slot | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.size < size:
        buffer = np.empty(max(size, 1 << 20), np.uint8)
        if size <= _KEPT_BYTES:
            _local.buffer = buffer
    packed = buffer[:size].reshape(pixels.shape)
    cv2.copyTo(pixels, None, packed)  # type: ignore[call-overload]
    return packed


def reduction(box: Box, rows: int, columns: int) -> int:
    """How many times smaller a box may be decoded and still have the wanted rows and columns.

    Only halves, quarters and eighths: the other scales of a JPEG's blocks are slower than full size."""
    surplus = min(box.height / rows, box.width / columns)
    return 1 if surplus < 2 else 2 if surplus < 4 else 4 if surplus < 8 else 8


def draft_into(pixels: Slot, out: Slot) -> None:
    """Fills `out` with all of `pixels`: linear, without antialiasing below a reduction of two; images at least twice
    too large are averaged first, as a scaled decoding would have done."""
    rows, columns = out.shape[:2]
    surplus = reduction(Box(0, 0, pixels.shape[0], pixels.shape[1]), rows, columns)
    if surplus > 1:
        smaller = (pixels.shape[1] // surplus, pixels.shape[0] // surplus)
        averaged: Any = cv2.resize(pixels, smaller, interpolation=cv2.INTER_AREA)
        pixels = averaged
    cv2.resize(pixels, (columns, rows), dst=out, interpolation=cv2.INTER_LINEAR)


# Faithful resizing is Pillow's, as in torchvision's transforms of Pillow images, so that not one grey level differs.
# torch's antialiased resize of uint8 takes half the time (480 against 870 µs for crops of ImageNet), but was off by two
# levels in one of 650 bilinear crops that were tried, and by up to 20 in bicubic ones: probably because these overshoot
# and are clipped between the passes over rows and columns, which Pillow 13 takes in the cheaper order and torch in a
# fixed one. For the same reason an image is turned by its EXIF orientation before it is resized, not after.


def resize_into(pixels: Slot, out: Slot, interpolation: Interpolation) -> None:
    """Fills `out` with all of `pixels`, antialiased."""
    size = (out.shape[1], out.shape[0])
    np.copyto(out, np.asarray(Image.fromarray(pixels).resize(size, RESAMPLING[interpolation])))


def centre_into(pixels: Slot, resize: int, out: Slot, interpolation: Interpolation) -> None:
    """Fills `out` with the middle of `pixels` after resizing their shorter side, with a black border if the result is
    smaller than `out`."""
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
    """Where the crop begins in the image, and the image in the crop, rounded as in torchvision."""
    if length >= wanted:
        return round((length - wanted) / 2.0), 0  # Python's round: halves go to the even number
    return 0, (wanted - length) // 2


def _resize_part(image: Image.Image, width: int, height: int, kept: Box, method: Image.Resampling) -> Image.Image:
    """The kept box of the image resized to width x height, without making the rest."""
    across, down = image.width / width, image.height / height
    edges = (
        kept.left * across,
        kept.top * down,
        min((kept.left + kept.width) * across, image.width),
        min((kept.top + kept.height) * down, image.height),
    )
    return image.resize((kept.width, kept.height), method, box=edges)
