"""An image's bytes as they go into a shard: checked, and on request made smaller and encoded as JPEG."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from stoker.data.crops import Box
from stoker.data.decode.decoders import Refused, load_decoder, pillow_
from stoker.data.decode.decoding import MAX_PIXELS
from stoker.data.decode.headers import BadImage, ImageHeader, read_header
from stoker.data.decode.orientation import turned

# For images that had to be made smaller where no quality was asked for: little loss beside the original.
QUALITY_AFTER_RESIZE = 95
EXTENSIONS = {"jpeg": "jpg", "tiff": "tif"}
"""Of the kinds that are not called like their files."""


@dataclass(frozen=True)
class Reencoding:
    """What is done to each image; nothing, by default."""

    longest: int | None = None
    """Pixels of the longer side, at most."""
    shortest: int | None = None
    """Pixels of the shorter side, at most; of both, only one may be given."""
    quality: int | None = None
    """JPEG quality of every image; None keeps the bytes of those that need no resize."""

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after the resize: never larger than before."""
        limit, side = (self.longest, max(width, height)) if self.longest else (self.shortest, min(width, height))
        if limit is None or side <= limit:
            return width, height
        return max(1, round(width * limit / side)), max(1, round(height * limit / side))


class Encoded(NamedTuple):
    """An image file: its extension, by content, and its bytes."""

    extension: str
    data: bytes


def prepare(data: bytes, how: Reencoding) -> Encoded:
    """The bytes to pack; raises BadImage. The same input gives the same bytes with the same library versions."""
    header = read_header(data, MAX_PIXELS)
    stored = header.stored_width, header.stored_height
    size = how.size_of(*stored)
    if how.quality is None and size == stored:
        return Encoded(EXTENSIONS.get(header.kind, header.kind), data)
    pixels = _decode(data, header)
    if size != stored:
        # Averages over the pixels that fall together: antialiased, for any factor.
        pixels = np.asarray(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA), np.uint8)
    # Upright: the new file has no EXIF that would say how to turn it.
    upright = np.ascontiguousarray(turned(pixels, header.orientation))
    quality = QUALITY_AFTER_RESIZE if how.quality is None else how.quality
    try:
        jpeg = simplejpeg.encode_jpeg(upright, quality=quality, colorspace="RGB", colorsubsampling="420")
    except ValueError as error:  # a side that is too long for a JPEG
        raise BadImage(f"cannot be encoded: {error}") from None
    return Encoded("jpg", jpeg)


def _decode(data: bytes, header: ImageHeader) -> NDArray[np.uint8]:
    """The whole image as RGB, as it is stored. Always by the same library: a choice would change the bits."""
    whole = Box(0, 0, header.stored_height, header.stored_width)
    if header.jpeg is not None:
        try:
            return load_decoder("simplejpeg").region(data, header, whole, 1)
        except Refused:
            pass  # CMYK, or a warning that may mean nothing: Pillow has the last word
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about odd palettes
        return pillow_.region(data, header, whole, 1)
