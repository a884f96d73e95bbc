"""From a file's bytes to a crop in its slot of the batch: fast for training, faithful to torchvision for validation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stoker.loader.rng import CROP, FLIP, Keys, uniforms
from stoker.tasks.images.decode.decoders import PILLOW, Refused, Scratch, load_decoder
from stoker.tasks.images.decode.headers import MAX_DECODED_BYTES, Box, Bytes, ImageHeader, read_header

DecodeMode = Literal["fast", "faithful", "draft"]
MAX_PIXELS = 178_956_970
"""The same limit as Pillow's."""
CROP_TRIES = 10
END_OF_IMAGE = b"\xff\xd9"
# How much smaller a JPEG can be decoded with its colours in place. At an eighth, 4:2:2 and 4:4:0 were 5 grey levels off
# on a smooth picture, and 4:1:1 at any scale.
LARGEST_REDUCTION = {"444": 8, "420": 8, "grey": 8, "422": 4, "440": 4}
# EXIF orientation: seen = stored, transposed for 5..8, then mirrored left-right and top-bottom.
_MIRRORED = frozenset({2, 3, 6, 7})
_UPSIDE_DOWN = frozenset({3, 4, 7, 8})
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
# Not the decoders' memory, in which the pixels to pack may be.
_packed = Scratch(kept_bytes=16 << 20)
# Each worker has its own core: threads of OpenCV would only compete with it.
cv2.setNumThreads(0)


@dataclass(frozen=True)
class Decoding:
    """How images are decoded; threads and processes may share one."""

    decoder: str = "pillow"
    """The library that decodes JPEGs; Pillow decodes what it refuses, and every other kind."""
    max_pixels: int = MAX_PIXELS
    """An image with more pixels is refused as a decompression bomb."""
    max_bytes: int = MAX_DECODED_BYTES
    """An image that takes more memory to decode is refused, too."""
    upright: bool = True
    """Whether images are seen as their EXIF orientation says; torchvision takes them as they are stored."""

    def read_header(self, data: Bytes) -> ImageHeader:
        """Kind, size and orientation; raises BadImage."""
        header = read_header(data, self.max_pixels, self.max_bytes)
        if self.upright or header.orientation == 1:
            return header
        return replace(header, width=header.stored_width, height=header.stored_height, orientation=1)

    def crop_into(
        self,
        data: Bytes,
        header: ImageHeader,
        box: Box,
        out: Slot,
        interpolation: Interpolation = "bilinear",
        mode: DecodeMode = "fast",
    ) -> None:
        """Fills `out` with the box in a mode of the config key `decode_mode`; raises BadImage.

        Faithful is torchvision's resized_crop of a Pillow image. Fast and faithful decode no more than the box needs,
        but always at full size, where all decoders agree: crops that were decoded at half the size differed by three
        grey levels (results/resize). In a draft, large reductions happen in the decoder, and small ones alias."""
        _check_slot(out)
        orientation = header.orientation
        inner = stored_box(orientation, header.width, header.height, box)
        if mode == "faithful":
            resize_into(turned(self._region(data, header, inner, 1), orientation), out, interpolation)
            return
        # Turned afterwards: turning the smaller picture is cheaper, and the filters are symmetric.
        rows, columns = out.shape[1::-1] if orientation >= 5 else out.shape[:2]
        small = out if orientation == 1 else np.empty((rows, columns, 3), np.uint8)
        if mode == "fast":
            antialias_into(self._region(data, header, inner, 1), small, interpolation)
        else:
            largest = LARGEST_REDUCTION.get(header.jpeg.subsampling, 1) if header.jpeg is not None else 1
            draft_into(self._region(data, header, inner, min(reduction(inner, rows, columns), largest)), small)
        if small is not out:
            np.copyto(out, turned(small, orientation))

    def faithful_centre_into(
        self, data: Bytes, header: ImageHeader, resize: int, out: Slot, interpolation: Interpolation
    ) -> None:
        """Fills `out` as torchvision's Resize and CenterCrop do on a Pillow image; raises BadImage."""
        _check_slot(out)
        pixels = self._region(data, header, Box(0, 0, header.stored_height, header.stored_width), 1)
        centre_into(turned(pixels, header.orientation), resize, out, interpolation)

    def _region(self, data: Bytes, header: ImageHeader, box: Box, scale: int) -> Slot:
        """The pixels of a box of the stored image; Pillow decides about what the decoder refuses."""
        if header.jpeg is not None and self.decoder != "pillow" and has_end(data):
            try:
                return load_decoder(self.decoder).region(data, header, box, scale)
            except Refused:
                pass
        return PILLOW.region(data, header, box, scale)


def has_end(data: Bytes) -> bool:
    """Whether a JPEG has its end marker. A truncated one lacks it, even if the crop is above the cut."""
    if bytes(data[-2:]) == END_OF_IMAGE:
        return True
    return bytes(data[-4096:]).rstrip(b"\0").endswith(END_OF_IMAGE)


def _check_slot(out: Slot) -> None:
    # OpenCV silently writes elsewhere if its destination does not fit.
    assert out.dtype == np.uint8, out.dtype
    assert out.ndim == 3, out.shape
    assert out.shape[2] == 3, out.shape
    assert out.flags.c_contiguous, out.strides


def stored_box(orientation: int, width: int, height: int, box: Box) -> Box:
    """The box in the stored image, of a box in an image that is seen as width x height."""
    assert 0 <= box.top < box.top + box.height <= height, (box, width, height)
    assert 0 <= box.left < box.left + box.width <= width, (box, width, height)
    if orientation == 1:
        return box
    left = width - box.left - box.width if orientation in _MIRRORED else box.left
    top = height - box.top - box.height if orientation in _UPSIDE_DOWN else box.top
    if orientation >= 5:
        return Box(left, top, box.width, box.height)
    return Box(top, left, box.height, box.width)


def turned(stored: Slot, orientation: int) -> Slot:
    """A view of the stored pixels as a person sees them."""
    seen = stored.transpose(1, 0, 2) if orientation >= 5 else stored
    return seen[:: -1 if orientation in _UPSIDE_DOWN else 1, :: -1 if orientation in _MIRRORED else 1]


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


def _as_image(pixels: Slot) -> Any:
    """A tensor that is a view in the order that torch expects: 1 x channels x rows x columns."""
    import torch  # not above: the processes that pack images decode them, too, and start faster without it

    return torch.from_numpy(pixels[None]).permute(0, 3, 1, 2)


def pack(pixels: Slot) -> Slot:
    """The pixels without gaps between the rows. torch would close them too, but in fresh memory and with all its
    threads, whose cores belong to the other workers."""
    if pixels.flags.c_contiguous and pixels.flags.writeable:
        return pixels
    packed = _packed.take(pixels.size)[: pixels.size].reshape(pixels.shape)
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


# Crops and flips are drawn for a whole batch at once from the samples' keys. The distribution is torchvision's
# RandomResizedCrop: up to ten tries of a uniform area and a log-uniform aspect; if none fits, the largest centred crop
# within the bounds.


@dataclass(frozen=True)
class CropRange:
    scale: tuple[float, float] = (0.08, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class CropDraws:
    """The random part of a batch's crops, drawn before any image size is known."""

    area: NDArray[np.float64]
    """Share of the image's area for each try, (samples, CROP_TRIES)."""
    aspect: NDArray[np.float64]
    """Width / height for each try, (samples, CROP_TRIES)."""
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
    numbers = uniforms(keys, CROP, 2 * CROP_TRIES + 2)
    low, high = bounds.scale
    log_low, log_high = np.log(bounds.aspect)
    return CropDraws(
        area=low + (high - low) * numbers[:, :CROP_TRIES],
        aspect=np.exp(log_low + (log_high - log_low) * numbers[:, CROP_TRIES : 2 * CROP_TRIES]),
        place=numbers[:, 2 * CROP_TRIES :],
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


@dataclass(frozen=True)
class RandomCrop:
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


View = RandomCrop | CentreCrop
"""Turns a sample's bytes into its slot of the batch; raises BadImage."""
