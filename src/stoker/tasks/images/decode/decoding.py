"""From a file's bytes to a crop in its slot of the batch: fast for training, faithful to torchvision for validation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from stoker.tasks.images.decode.decoders import PILLOW, Refused, load_decoder
from stoker.tasks.images.decode.headers import MAX_DECODED_BYTES, Box, Bytes, ImageHeader, read_header
from stoker.tasks.images.decode.resizing import (
    Interpolation,
    Slot,
    antialias_into,
    centre_into,
    draft_into,
    reduction,
    resize_into,
)

DecodeMode = Literal["fast", "faithful", "draft"]
MAX_PIXELS = 178_956_970
"""The same limit as Pillow's."""
END_OF_IMAGE = b"\xff\xd9"
# How much smaller a JPEG can be decoded with its colours in place. At an eighth, 4:2:2 and 4:4:0 were 5 grey levels off
# on a smooth picture, and 4:1:1 at any scale.
LARGEST_REDUCTION = {"444": 8, "420": 8, "grey": 8, "422": 4, "440": 4}
# EXIF orientation: seen = stored, transposed for 5..8, then mirrored left-right and top-bottom.
_MIRRORED = frozenset({2, 3, 6, 7})
_UPSIDE_DOWN = frozenset({3, 4, 7, 8})


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
        """Fills `out` with the box in a mode of the config key `decode_mode`; raises BadImage."""
        if mode == "fast":
            self.fast_crop_into(data, header, box, out, interpolation)
        elif mode == "faithful":
            self.faithful_crop_into(data, header, box, out, interpolation)
        else:
            self.draft_crop_into(data, header, box, out)

    def fast_crop_into(
        self, data: Bytes, header: ImageHeader, box: Box, out: Slot, interpolation: Interpolation
    ) -> None:
        """Fills `out` with the box, antialiased; raises BadImage.

        Decodes no more than the box needs, but always at full size, where all decoders agree: crops that were decoded
        at half the size differed by three grey levels (results/resize)."""
        _check_slot(out)
        inner = stored_box(header.orientation, header.width, header.height, box)
        pixels = self._region(data, header, inner, 1)
        if header.orientation == 1:
            antialias_into(pixels, out, interpolation)
        else:
            # Turned afterwards: turning the smaller picture is cheaper, and the filters are symmetric.
            small = np.empty((*stored_shape(header.orientation, out.shape[0], out.shape[1]), 3), np.uint8)
            antialias_into(pixels, small, interpolation)
            np.copyto(out, turned(small, header.orientation))

    def draft_crop_into(self, data: Bytes, header: ImageHeader, box: Box, out: Slot) -> None:
        """Fills `out` with the box; raises BadImage. Large reductions happen in the decoder, small ones alias."""
        _check_slot(out)
        rows, columns = stored_shape(header.orientation, out.shape[0], out.shape[1])
        inner = stored_box(header.orientation, header.width, header.height, box)
        largest = LARGEST_REDUCTION.get(header.jpeg.subsampling, 1) if header.jpeg is not None else 1
        pixels = self._region(data, header, inner, min(reduction(inner, rows, columns), largest))
        if header.orientation == 1:
            draft_into(pixels, out)
        else:
            small = np.empty((rows, columns, 3), np.uint8)
            draft_into(pixels, small)
            np.copyto(out, turned(small, header.orientation))

    def faithful_crop_into(
        self, data: Bytes, header: ImageHeader, box: Box, out: Slot, interpolation: Interpolation
    ) -> None:
        """Fills `out` with the box as torchvision's resized_crop does on a Pillow image; raises BadImage."""
        _check_slot(out)
        inner = stored_box(header.orientation, header.width, header.height, box)
        pixels = self._region(data, header, inner, 1)
        resize_into(turned(pixels, header.orientation), out, interpolation)

    def faithful_centre_into(
        self, data: Bytes, header: ImageHeader, resize: int, out: Slot, interpolation: Interpolation
    ) -> None:
        """Fills `out` as torchvision's Resize and CenterCrop do on a Pillow image; raises BadImage."""
        _check_slot(out)
        pixels = self._region(data, header, Box(0, 0, header.stored_height, header.stored_width), 1)
        centre_into(turned(pixels, header.orientation), resize, out, interpolation)

    def _region(self, data: Bytes, header: ImageHeader, box: Box, scale: int) -> Slot:
        """The pixels of a box of the stored image; Pillow decides about what the decoder refuses."""
        if header.jpeg is not None and self.decoder != "pillow" and _has_end(data):
            try:
                return load_decoder(self.decoder).region(data, header, box, scale)
            except Refused:
                pass
        return PILLOW.region(data, header, box, scale)


def _has_end(data: Bytes) -> bool:
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


def stored_shape(orientation: int, rows: int, columns: int) -> tuple[int, int]:
    """The rows and columns in the stored image that are seen as these rows and columns."""
    return (columns, rows) if orientation >= 5 else (rows, columns)


def turned(stored: Slot, orientation: int) -> Slot:
    """A view of the stored pixels as a person sees them."""
    seen = stored.transpose(1, 0, 2) if orientation >= 5 else stored
    return seen[:: -1 if orientation in _UPSIDE_DOWN else 1, :: -1 if orientation in _MIRRORED else 1]
